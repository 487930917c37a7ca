"""Checks of the engine's environment: packages, the kernel, memory, settings."""

from __future__ import annotations

import os
import platform
import re
import warnings
from collections.abc import Iterator
from importlib import import_module

from kvferry.client.doctor.check import CheckContext, Finding, fail, ok, warn
from kvferry.client.sglang.supported import check_version
from kvferry.proto.errors import Refused
from kvferry.proto.process import check_system_calls
from kvferry.proto.version import installed_version

REQUIRED = {"msgspec": "0.18.6", "numpy": "1.26", "pyzmq": "26"}
# torch is needed only for tensors on a GPU, not by a scheduler.
OPTIONAL = {"torch": "2.9"}
# Versions that the connector is tested with.
VLLM_VERSIONS = tuple(f"0.{minor}" for minor in range(26, 34))
# The first vLLM whose seed of block hashes is fixed for sha256.
FIXED_SEED = (0, 29)
# Free bytes of /dev/shm that torch and NCCL need.
MIN_SHM = 1 << 30


def packages(_: CheckContext) -> Iterator[Finding]:
    installed = {name: installed_version(name) for name in (*REQUIRED, *OPTIONAL)}
    for name, minimum in (REQUIRED | OPTIONAL).items():
        version = installed[name]
        if version is None and name in REQUIRED:
            yield fail("packages", f"{name} is not installed", f"pip install '{name}>={minimum}'")
        elif version is not None and parse_version(version) < parse_version(minimum):
            yield fail(
                "packages", f"{name} {version} is too old", f"pip install '{name}>={minimum}'"
            )
    installed_text = [
        f"{name} {version}" for name, version in installed.items() if version is not None
    ]
    installed_text += [
        f"no {name} (for tensors on a GPU)" for name in OPTIONAL if installed[name] is None
    ]
    yield ok("packages", ", ".join([f"Python {platform.python_version()}", *installed_text]))


def kernel(context: CheckContext) -> Iterator[Finding]:
    """Whether the system calls are there that this process needs, and a daemon that has no socket.

    Without them, libzmq would end this process when it connects.
    """
    is_served = context.directory is not None  # its daemon has what it needs, wherever it runs
    needed = ("memfd_create", "sched_setscheduler", *(() if is_served else ("pidfd_open",)))
    try:
        check_system_calls(*needed)
    except Refused as error:
        context.directory = None
        found, _, change = error.message.partition("; ")
        yield fail("kernel", found, change)
    else:
        yield ok("kernel", f"Linux {platform.release()} has the system calls that are needed")


def shared_memory(_: CheckContext, minimum: int = MIN_SHM) -> Iterator[Finding]:
    try:
        room = os.statvfs("/dev/shm")
    except OSError as error:
        change = "mount a tmpfs at /dev/shm: torch and NCCL share memory there"
        yield warn("shared memory", f"/dev/shm: {error.strerror}", change)
        return
    size, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    found = f"/dev/shm has {size >> 20} MiB, {free >> 20} MiB free"
    if free < minimum:
        change = "docker run --shm-size=8g (kvferry needs none of it; torch and NCCL do)"
        yield warn("shared memory", found, change)
    else:
        yield ok("shared memory", found)


def allocator(context: CheckContext) -> Iterator[Finding]:
    """Whether torch allocates expandable segments, which have no IPC handle."""
    if context.status is not None and context.status.device.kind == "cpu":
        return
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        setting = os.environ.get(name, "")
        if re.search(r"expandable_segments\s*:\s*true", setting, re.IGNORECASE):
            yield warn(
                "allocator",
                f"{name}={setting}: torch's tensors may not be shareable by CUDA IPC",
                f"unset {name}, or use allocate_kv_caches. vLLM does not start with "
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True and a connector, unless "
                "--enable-cumem-allocator is set, too",
            )
            return
    yield ok("allocator", "expandable_segments is not set")


def vllm(_: CheckContext) -> Iterator[Finding]:
    """Yields nothing if vLLM is not installed."""
    has = installed_version("vllm")
    if has is None:
        return
    if any(parse_version(has)[:2] == parse_version(one)[:2] for one in VLLM_VERSIONS):
        yield ok("vLLM", has)
    else:
        change = f"pip install 'vllm=={VLLM_VERSIONS[-1]}.*': the connector follows its internals"
        yield warn(
            "vLLM", f"{has}; the connector was tested with {', '.join(VLLM_VERSIONS)}", change
        )
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is not None:
        yield ok("hash seed", f"PYTHONHASHSEED={seed}")
    elif parse_version(has) >= FIXED_SEED:
        yield ok("hash seed", "vLLM's own for sha256; for xxhash, set PYTHONHASHSEED")
    else:
        yield warn(
            "hash seed",
            "PYTHONHASHSEED is not set: block hashes differ from process to process, so nothing "
            "is shared with other engines, or found again after a restart",
            "PYTHONHASHSEED=0 vllm serve ...",
        )


def sglang(_: CheckContext) -> Iterator[Finding]:
    """Yields nothing if SGLang is not installed. Importing it takes seconds."""
    has = installed_version("sglang")
    if has is None:
        return
    try:
        check_version()
        check_version(import_linkers())
    except Refused as error:
        found, change = error.message.split("; ", 1)
        yield fail("SGLang", found, change)
    except Exception as error:  # of any package that SGLang imports
        found = f"{has} cannot be imported: {type(error).__name__}: {error}"
        yield fail("SGLang", found, "run this in the environment that starts SGLang's server")
    else:
        yield ok("SGLang", f"{has}, with the interface that the linker needs")


def import_linkers() -> type:
    """SGLang's interface of linkers, imported with all that kvferry's linker uses of SGLang."""
    with warnings.catch_warnings(action="ignore"):
        module = import_module("kvferry.client.sglang.linker")
    interface: type = module.UnifiedCacheLinker
    return interface


def parse_version(version: str) -> tuple[int, ...]:
    """ "2.13.0+cpu" -> (2, 13, 0)"""
    leading = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in leading[0].split(".")) if leading else ()
