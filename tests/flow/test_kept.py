"""KV tensors that the daemon allocated.

With keep=True they outlive the engine. They outlive the daemon while the engine lives.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvferry.client import (
    CanonicalKVCaches,
    Code,
    Gone,
    KVLayout,
    LocalDaemon,
    OffloadClient,
    Refused,
    TensorLayout,
    TensorRef,
)
from kvferry.client.cli import main
from kvferry.proto.status import EngineStatus
from kvferry.testing.engine import GroupOptions, SmallEngine, StartSmallEngine, WorkerProcess, until
from support.service_manager import ServiceManager, kvferryd_command
from support.time_limits import PROMPTLY, TIMEOUT

LAYOUT = KVLayout((TensorLayout(16, 4096, 4096),) * 2, ((TensorRef(0, 4096), TensorRef(1, 4096)),))
GRANULE = 2 << 20


def large_options(device: str) -> dict[str, Any]:
    """Options for tensors of 2 MiB per block, much larger than the CUDA contexts on a GPU."""
    blocks = 128 if device == "cpu" else 2048
    groups = (GroupOptions(4, (64, 16, 128)),)
    return {"groups": groups, "num_blocks": blocks, "host_bytes": 32 << 20, "daemon_owned": True}


def status_of(daemon: LocalDaemon, name: str) -> EngineStatus | None:
    with OffloadClient(daemon.directory, engine="observer") as observer:
        return next((e for e in observer.status().engines if e.name == name), None)


def kept_bytes(daemon: LocalDaemon, name: str) -> int:
    status = status_of(daemon, name)
    return 0 if status is None else status.kept_bytes


def is_absent(daemon: LocalDaemon, name: str) -> bool:
    status = status_of(daemon, name)
    return status is None or not status.present


def memory_of(daemon: LocalDaemon, device: str) -> int:
    """Bytes that tensors use: on a GPU all used memory, else the memfds of the daemon."""
    if device != "cpu":
        free, total = torch.cuda.mem_get_info(0)
        return int(total - free)
    sizes = set()
    for name in os.listdir(fds := f"/proc/{daemon.pid}/fd"):
        try:
            path = Path(fds, name)
            if "memfd:kvferry-kv" in os.readlink(path):
                status = path.stat()
                sizes.add((status.st_ino, status.st_size))
        except FileNotFoundError:
            continue
    for line in Path(f"/proc/{daemon.pid}/maps").read_text().splitlines():
        if "memfd:kvferry-kv" in line:
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            sizes.add((int(line.split()[4]), end - start))
    return sum(dict(sizes).values())


def memory_before(daemon: LocalDaemon, device: str) -> int:
    """Bytes that tensors use when the engines of earlier tests have ended."""
    with OffloadClient(daemon.directory, engine="observer") as observer:
        until(lambda: not any(engine.present for engine in observer.status().engines), PROMPTLY)
    sizes: list[int] = []

    def steady() -> bool:
        time.sleep(0.05)
        sizes.append(memory_of(daemon, device))
        return len(sizes) > 4 and len(set(sizes[-4:])) == 1

    until(steady)
    return sizes[-1]


def kill_worker(engine: SmallEngine, daemon: LocalDaemon) -> None:
    """Kill the worker (SIGKILL). Returns when the daemon has noticed."""
    engine.process.kill()
    until(lambda: is_absent(daemon, engine.options.name), PROMPTLY)


# The engine ends


def test_a_restarted_engine_receives_its_kept_tensors(
    start_engine: StartSmallEngine, daemon: LocalDaemon, worker_process: Callable[[], WorkerProcess]
) -> None:
    engine = start_engine(daemon, daemon_owned=True, keep=True, row_padding=96)
    assert not engine.kept
    fence = engine.worker.write(range(16), 5)
    engine.finish(engine.store([3, 4], [0, 1], wait_for=fence))
    before = engine.worker.snapshot()
    kill_worker(engine, daemon)
    size = kept_bytes(daemon, engine.options.name)
    assert size >= sum(part.size for part in before)

    engine.start_worker(worker_process())
    assert engine.kept
    assert engine.region.reattached
    for actual, wanted in zip(engine.worker.snapshot(), before, strict=True):
        assert np.array_equal(actual, wanted)
    engine.finish(engine.load([0, 1], [20, 21]), engine.store([7], [5]))
    engine.finish(engine.load([5], [22]))
    assert np.array_equal(engine.worker.read([20, 21, 22]), engine.expected([3, 4, 7], 5))
    assert kept_bytes(daemon, engine.options.name) == size


def test_kept_tensors_are_freed_by_release_kv_caches(
    start_engine: StartSmallEngine, daemon: LocalDaemon, device: str
) -> None:
    before = memory_before(daemon, device)
    engine = start_engine(daemon, **large_options(device), keep=True)
    name, size = engine.options.name, kept_bytes(daemon, engine.options.name)
    assert size >= engine.options.num_blocks * GRANULE
    kill_worker(engine, daemon)
    assert memory_of(daemon, device) >= before + size // 2
    with OffloadClient(daemon.directory, engine=name) as client:
        assert client.release_kv_caches() == size
        until(lambda: memory_of(daemon, device) < before + size // 2, PROMPTLY)
        with pytest.raises(Refused) as refused:
            client.release_kv_caches()
    assert (refused.value.code, refused.value.value) == (Code.NOT_REGISTERED, name)
    assert kept_bytes(daemon, name) == 0


def test_the_command_line_shows_and_releases_kept_tensors(
    kvferryd: LocalDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    option = ["-d", str(kvferryd.directory)]
    with OffloadClient(kvferryd.directory, engine="llama") as client:
        client.allocate_kv_caches(LAYOUT, host_bytes=1 << 20, keep=True)
    for arguments, exit_status, expected in (
        (["status", *option], 0, "128 KiB"),
        (["release", "llama", *option], 0, "released 1.12 MiB kept for llama"),
        (["release", "llama", *option], 1, "not_registered"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == exit_status
        output = "".join(capsys.readouterr())
        assert expected in output, output


# The daemon ends


class KeptTensorsService:
    """A daemon of a service manager that keeps its descriptors."""

    def __init__(self, device: str, folder: Path) -> None:
        name = "0" if device != "cpu" else device
        command = kvferryd_command(folder / "run", name, 4 << 20)
        self.folder = folder / "run"
        self.manager = ServiceManager(command, folder / "notify", log=folder / "log")

    def start(self) -> Path:
        """Start the daemon. Returns the directory of its sockets."""
        self.manager.start(ready=False)
        until(self._answers)
        return self._directory()

    def restart(self) -> Path:
        self.manager.kill()
        return self.start()

    def tensors(self) -> list[str]:
        return [name for name in self.manager.names if name.startswith("tensors-")]

    def _directory(self) -> Path:
        return next(path.parent for path in self.folder.glob("*/kvferry.sock"))

    def _answers(self) -> bool:
        assert self.manager.process.poll() is None, self.manager.log()
        with suppress(Gone, StopIteration):
            OffloadClient(self._directory(), timeout=0.2).close()
            return True
        return False


@pytest.fixture
def service(device: str, short_path: Path) -> Iterator[KeptTensorsService]:
    service = KeptTensorsService(device, short_path)
    with service.manager:
        yield service


@contextmanager
def allocate_kept(
    directory: Path, *, keep: bool = True
) -> Iterator[tuple[OffloadClient, Any, bool]]:
    """Connect as an engine and allocate. Yields the client, the second tensor, and `kept`."""
    with OffloadClient(directory, engine="kept") as client:
        _, (_, tensor), kept = client.allocate_kv_caches(LAYOUT, host_bytes=1 << 20, keep=keep)
        yield client, tensor, kept


def test_kept_tensors_outlive_their_engine_and_the_daemon(service: KeptTensorsService) -> None:
    directory = service.start()
    for generation in range(4):
        with allocate_kept(directory) as (_, tensor, kept):
            assert kept == (generation > 0), service.manager.log()
            assert not kept or bool((tensor == generation - 1).all())
            tensor.fill_(generation)
            until(lambda: len(service.tensors()) == 2)
        del tensor
        directory = service.restart()
    with allocate_kept(directory) as (client, _, kept):
        assert client.release_kv_caches() >= 2 * 16 * 4096
        until(lambda: not service.tensors())
    with allocate_kept(service.restart()) as (_, _, kept):
        assert not kept


def test_an_engine_registers_its_tensors_with_the_next_daemon(service: KeptTensorsService) -> None:
    """That daemon keeps the same memory, with the bytes that the engine writes later."""
    with OffloadClient(service.start(), engine="kept", reconnect=False) as client:
        tensors = client.allocate_kv_caches(LAYOUT, host_bytes=1 << 20, keep=True).tensors
        directory = service.restart()
    with OffloadClient(directory, engine="kept") as again:
        again.register_kv_caches(CanonicalKVCaches(LAYOUT, tuple(tensors)), host_bytes=1 << 20)
        tensors[1].fill_(77)
    del tensors
    with OffloadClient(directory, engine="observer") as observer:
        until(lambda: not any(engine.present for engine in observer.status().engines))
    with allocate_kept(directory, keep=False) as (_, tensor, kept):
        assert kept, service.manager.log()
        assert bool((tensor == 77).all())
        until(lambda: not service.tensors())


RELEASES_TENSORS = """
import gc, os, sys, time, torch
from kvferry.client import KVLayout, OffloadClient, TensorLayout, TensorRef
from support.time_limits import TIMEOUT

def open_files():
    paths = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    names = [os.readlink(path) for path in paths if os.path.exists(path)]
    return sum("memfd" in name or "nvidia" in name for name in names)

directory, device = sys.argv[1:]
layout = KVLayout((TensorLayout(128, 1 << 21, 1 << 21),), ((TensorRef(0, 1 << 21),),))
for turn in range(4):
    with OffloadClient(directory, engine="releases") as client:
        (tensor,) = client.allocate_kv_caches(layout, host_bytes=1 << 22).tensors
    view = tensor[5:6, :10]
    del tensor
    view.fill_(3)
    assert int(view.sum()) == 30
    if turn == 1:  # files that a driver opens for the first tensor are open now
        usual = open_files()
    assert turn < 1 or open_files() == usual, (turn, open_files(), usual)
    if device != "cpu":
        taken = torch.cuda.mem_get_info()[0]
    del view
    gc.collect()
    deadline = time.monotonic() + TIMEOUT
    while device != "cpu" and (freed := torch.cuda.mem_get_info()[0] - taken) < 200 << 20:
        assert time.monotonic() < deadline, (turn, freed)
print("done")
"""


def test_deleting_the_last_view_frees_the_memory(daemon: LocalDaemon, device: str) -> None:
    """The process that held the view lives on, and its descriptor is closed."""
    done = subprocess.run(
        [sys.executable, "-c", RELEASES_TENSORS, daemon.directory, device],
        capture_output=True,
        text=True,
        timeout=2 * TIMEOUT,
    )
    assert done.stdout.strip() == "done", done.stderr


# Descriptors of something else
