"""Checks of the engine's environment: packages, memory, settings."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator

from kvferry.client.doctor.case import Case, Finding, fail, ok, warn
from kvferry.proto.version import installed_version

NEEDED = {"msgspec": "0.18.6", "numpy": "1.26", "pyzmq": "26"}
# torch is needed only to share tensors, not by a scheduler.
OPTIONAL = {"torch": "2.9"}
# Versions that the connector is tested with.
VLLM = ("0.26",)
SMALL_SHM = 1 << 30


def packages(_: Case) -> Iterator[Finding]:
    installed = {name: installed_version(name) for name in (*NEEDED, *OPTIONAL)}
    for name, least in (NEEDED | OPTIONAL).items():
        has = installed[name]
        if has is None and name in NEEDED:
            yield fail("packages", f"{name} is not installed", f"pip install '{name}>={least}'")
        elif has is not None and numbers(has) < numbers(least):
            yield fail("packages", f"{name} {has} is too old", f"pip install '{name}>={least}'")
    said = [f"{name} {has}" for name, has in installed.items() if has is not None]
    said += [f"no {name} (to share tensors)" for name in OPTIONAL if installed[name] is None]
    yield ok("packages", ", ".join([f"Python {platform.python_version()}", *said]))


def shared_memory(_: Case) -> Iterator[Finding]:
    os.close(os.memfd_create("kvferry-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    try:
        room = os.statvfs("/dev/shm")
    except OSError as error:
        change = "mount a tmpfs at /dev/shm: torch and NCCL share memory there"
        yield warn("shared memory", f"/dev/shm: {error.strerror}", change)
        return
    size, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    found = f"/dev/shm has {size >> 20} MiB, {free >> 20} MiB free; memfds work"
    if free < SMALL_SHM:
        change = "docker run --shm-size=8g (kvferry needs none of it; torch and NCCL do)"
        yield warn("shared memory", found, change)
    else:
        yield ok("shared memory", found)


def allocator(case: Case) -> Iterator[Finding]:
    """Memory of expandable segments has no legacy IPC handle."""
    if case.status is not None and case.status.device.kind == "cpu":
        return
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        setting = os.environ.get(name, "")
        if re.search(r"expandable_segments\s*:\s*true", setting, re.IGNORECASE):
            yield warn(
                "allocator",
                f"{name}={setting}: torch's tensors may not be shareable by CUDA IPC",
                f"if KV caches are refused (not_shareable), unset {name}, or use "
                "allocate_kv_caches. The same applies to vLLM's sleep mode",
            )
            return
    yield ok("allocator", "torch uses its default allocator")


def vllm(_: Case) -> Iterator[Finding]:
    """Says nothing where vLLM is not installed."""
    has = installed_version("vllm")
    if has is None:
        return
    if any(numbers(has)[:2] == numbers(one)[:2] for one in VLLM):
        yield ok("vLLM", has)
    else:
        change = f"pip install 'vllm=={VLLM[-1]}.*': the connector follows its internals"
        yield warn("vLLM", f"{has}; the connector was tested with {', '.join(VLLM)}", change)
    if seed := os.environ.get("PYTHONHASHSEED"):
        yield ok("hash seed", f"PYTHONHASHSEED={seed}")
    else:
        yield warn(
            "hash seed",
            "PYTHONHASHSEED is not set: block hashes differ from process to process, so nothing "
            "is shared with other engines, or found again after a restart",
            "PYTHONHASHSEED=0 vllm serve ...",
        )


def numbers(version: str) -> tuple[int, ...]:
    """ "2.13.0+cpu" -> (2, 13, 0)"""
    leading = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in leading[0].split(".")) if leading else ()
