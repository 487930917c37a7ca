"""KV tensors that the daemon allocated: they outlive the engine where it asked for that, and the
daemon as long as the engine lives."""

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

# Seconds. Less than the timeouts of 10 s; longer than usual, because other processes may use the
# cores.
PROMPTLY = 8.0
LAYOUT = KVLayout((TensorLayout(16, 4096, 4096),) * 2, ((TensorRef(0, 4096), TensorRef(1, 4096)),))
GRANULE = 2 << 20


def large(device: str) -> dict[str, Any]:
    """Tensors of 2 MiB a block, so many that on a GPU they show beside processes' contexts."""
    blocks = 128 if device == "cpu" else 2048
    groups = (GroupOptions(4, (64, 16, 128)),)
    return {"groups": groups, "num_blocks": blocks, "host_bytes": 32 << 20, "daemon_owned": True}


def status_of(daemon: LocalDaemon, name: str) -> EngineStatus | None:
    with OffloadClient(daemon.directory, engine="observer") as observer:
        return next((e for e in observer.status().engines if e.name == name), None)


def kept_bytes(daemon: LocalDaemon, name: str) -> int:
    found = status_of(daemon, name)
    return 0 if found is None else found.kept_bytes


def away(daemon: LocalDaemon, name: str) -> bool:
    found = status_of(daemon, name)
    return found is None or not found.present


def memory_of(daemon: LocalDaemon, device: str) -> int:
    """Bytes that tensors take, as far as can be seen from here."""
    if device != "cpu":
        free, total = torch.cuda.mem_get_info(0)
        return int(total - free)
    seen = set()
    for name in os.listdir(fds := f"/proc/{daemon.pid}/fd"):
        try:
            path = Path(fds, name)
            if "memfd:kvferry-kv" in os.readlink(path):
                status = path.stat()
                seen.add((status.st_ino, status.st_size))
        except FileNotFoundError:
            continue
    for line in Path(f"/proc/{daemon.pid}/maps").read_text().splitlines():
        if "memfd:kvferry-kv" in line:
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            seen.add((int(line.split()[4]), end - start))
    return sum(dict(seen).values())


def memory_before(daemon: LocalDaemon, device: str) -> int:
    """What they take once the engines of the tests before are gone, and their tensors with them."""
    with OffloadClient(daemon.directory, engine="observer") as observer:
        until(lambda: not any(engine.present for engine in observer.status().engines), PROMPTLY)
    seen: list[int] = []

    def steady() -> bool:
        time.sleep(0.05)
        seen.append(memory_of(daemon, device))
        return len(seen) > 4 and len(set(seen[-4:])) == 1

    until(steady, 10)
    return seen[-1]


def killed(engine: SmallEngine, daemon: LocalDaemon) -> None:
    """SIGKILL for its worker, and back when the daemon has noticed."""
    engine.process.kill()
    until(lambda: away(daemon, engine.options.name), PROMPTLY)


# The engine goes


def test_an_engine_that_was_killed_finds_its_tensors(
    start_engine: StartSmallEngine, daemon: LocalDaemon, worker_process: Callable[[], WorkerProcess]
) -> None:
    engine = start_engine(daemon, daemon_owned=True, keep=True, row_padding=96)
    assert not engine.kept
    fence = engine.worker.write(range(16), 5)
    engine.finish(engine.store([3, 4], [0, 1], wait_for=fence))
    whole = engine.worker.snapshot()
    killed(engine, daemon)
    size = kept_bytes(daemon, engine.options.name)
    assert size >= sum(part.size for part in whole)

    engine.start_worker(worker_process())
    assert engine.kept
    assert engine.region.reattached
    for found, wanted in zip(engine.worker.snapshot(), whole, strict=True):
        assert np.array_equal(found, wanted)
    engine.finish(engine.load([0, 1], [20, 21]), engine.store([7], [5]))
    engine.finish(engine.load([5], [22]))
    assert np.array_equal(engine.worker.read([20, 21, 22]), engine.expected([3, 4, 7], 5))
    assert kept_bytes(daemon, engine.options.name) == size


def test_kept_tensors_are_freed_by_release_kv_caches(
    start_engine: StartSmallEngine, daemon: LocalDaemon, device: str
) -> None:
    before = memory_before(daemon, device)
    engine = start_engine(daemon, **large(device), keep=True)
    name, size = engine.options.name, kept_bytes(daemon, engine.options.name)
    assert size >= engine.options.num_blocks * GRANULE
    killed(engine, daemon)
    assert memory_of(daemon, device) >= before + size // 2
    with OffloadClient(daemon.directory, engine=name) as client:
        assert client.release_kv_caches() == size
        until(lambda: memory_of(daemon, device) < before + size // 2, PROMPTLY)
        with pytest.raises(Refused) as refused:
            client.release_kv_caches()
    assert (refused.value.code, refused.value.value) == (Code.NOT_REGISTERED, name)
    assert kept_bytes(daemon, name) == 0


def test_the_command_line_shows_and_releases_them(
    kvferryd: LocalDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["-d", str(kvferryd.directory)]
    with OffloadClient(kvferryd.directory, engine="llama") as client:
        client.allocate_kv_caches(LAYOUT, host_bytes=1 << 20, keep=True)
    for arguments, status, said in (
        (["status", *where], 0, "128 KiB"),
        (["release", "llama", *where], 0, "released 128 KiB kept for llama"),
        (["release", "llama", *where], 1, "not_registered"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == status
        words = "".join(capsys.readouterr())
        assert said in words, words


# The daemon goes


class Serviced:
    """A daemon that a service manager starts, and keeps descriptors for."""

    def __init__(self, device: str, folder: Path) -> None:
        name = "0" if device != "cpu" else device
        command = kvferryd_command(folder / "run", name, 4 << 20)
        self.folder = folder / "run"
        self.manager = ServiceManager(command, folder / "notify", log=folder / "log")

    def start(self) -> Path:
        """Returns where its sockets are."""
        self.manager.start(ready=False)
        until(self._answers, 60)
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
def serviced(device: str, short_path: Path) -> Iterator[Serviced]:
    serviced = Serviced(device, short_path)
    with serviced.manager:
        yield serviced


@contextmanager
def come(directory: Path, *, keep: bool = True) -> Iterator[tuple[OffloadClient, Any, bool]]:
    """An engine, its second tensor, and whether that was kept."""
    with OffloadClient(directory, engine="kept") as client:
        _, (_, tensor), kept = client.allocate_kv_caches(LAYOUT, host_bytes=1 << 20, keep=keep)
        yield client, tensor, kept


def test_kept_tensors_outlive_their_engine_and_the_daemon(serviced: Serviced) -> None:
    directory = serviced.start()
    for generation in range(4):
        with come(directory) as (_, tensor, kept):
            assert kept == (generation > 0), serviced.manager.log()
            assert not kept or bool((tensor == generation - 1).all())
            tensor.fill_(generation)
            until(lambda: len(serviced.tensors()) == 2)
        del tensor
        directory = serviced.restart()
    with come(directory) as (client, _, kept):
        assert client.release_kv_caches() >= 2 * 16 * 4096
        until(lambda: not serviced.tensors())
    with come(serviced.restart()) as (_, _, kept):
        assert not kept


def test_an_engine_lives_on_and_leaves_its_tensors_with_the_next_daemon(
    serviced: Serviced,
) -> None:
    """It registers them there: they are the very same, and what it writes later stays, too."""
    with OffloadClient(serviced.start(), engine="kept", reconnect=False) as client:
        tensors = client.allocate_kv_caches(LAYOUT, host_bytes=1 << 20, keep=True).tensors
        directory = serviced.restart()
    with OffloadClient(directory, engine="kept") as again:
        again.register_kv_caches(CanonicalKVCaches(LAYOUT, tuple(tensors)), host_bytes=1 << 20)
        tensors[1].fill_(77)
    del tensors
    with OffloadClient(directory, engine="observer") as observer:
        until(lambda: not any(engine.present for engine in observer.status().engines))
    with come(directory, keep=False) as (_, tensor, kept):
        assert kept, serviced.manager.log()
        assert bool((tensor == 77).all())
        until(lambda: not serviced.tensors())


LETS_GO = """
import gc, os, sys, time, torch
from kvferry.client import KVLayout, OffloadClient, TensorLayout, TensorRef

def open_files():
    paths = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    names = [os.readlink(path) for path in paths if os.path.exists(path)]
    return sum("memfd" in name or "nvidia" in name for name in names)

directory, device = sys.argv[1:]
layout = KVLayout((TensorLayout(128, 1 << 21, 1 << 21),), ((TensorRef(0, 1 << 21),),))
for turn in range(4):
    with OffloadClient(directory, engine="lets go") as client:
        (tensor,) = client.allocate_kv_caches(layout, host_bytes=1 << 22).tensors
    view = tensor[5:6, :10]
    del tensor
    view.fill_(3)
    assert int(view.sum()) == 30
    if turn == 1:  # whatever a driver opens for the first of all is open
        usual = open_files()
    assert turn < 1 or open_files() == usual, (turn, open_files(), usual)
    if device != "cpu":
        taken = torch.cuda.mem_get_info()[0]
    del view
    gc.collect()
    deadline = time.monotonic() + 5
    while device != "cpu" and (freed := torch.cuda.mem_get_info()[0] - taken) < 200 << 20:
        assert time.monotonic() < deadline, (turn, freed)
print("done")
"""


def test_the_last_tensor_takes_the_memory_along(daemon: LocalDaemon, device: str) -> None:
    """A view holds it; without any it is freed, and the descriptor closed, in a live process."""
    done = subprocess.run(
        [sys.executable, "-c", LETS_GO, daemon.directory, device],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip() == "done", done.stderr


# Descriptors of something else
