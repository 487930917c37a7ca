"""KV tensors that the daemon allocated.

With keep=True they outlive the engine. They outlive the daemon while the engine lives.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvferry.client import (
    CanonicalKVCaches,
    KVLayout,
    LocalDaemon,
    OffloadClient,
    TensorLayout,
    TensorRef,
)
from kvferry.proto.status import EngineStatus
from kvferry.testing.engine import StartSmallEngine, WorkerProcess, until
from support.restarting_fixture import RestartedService
from support.time_limits import PROMPTLY, TIMEOUT

LAYOUT = KVLayout((TensorLayout(16, 4096, 4096),) * 2, ((TensorRef(0, 4096), TensorRef(1, 4096)),))


def status_of(daemon: LocalDaemon, name: str) -> EngineStatus:
    with OffloadClient(daemon.directory, engine="observer") as observer:
        return next(engine for engine in observer.status().engines if engine.name == name)


# The engine ends


def test_a_restarted_engine_receives_its_kept_tensors(
    start_engine: StartSmallEngine, daemon: LocalDaemon, worker_process: Callable[[], WorkerProcess]
) -> None:
    engine = start_engine(daemon, daemon_owned=True, keep=True, row_padding=96)
    assert not engine.kept
    fence = engine.worker.write(range(16), 5)
    engine.finish(engine.store([3, 4], [0, 1], wait_for=fence))
    before = engine.worker.snapshot()
    engine.process.kill()
    until(lambda: not status_of(daemon, engine.options.name).present, PROMPTLY)
    size = status_of(daemon, engine.options.name).kept_bytes
    assert size >= sum(part.size for part in before)
    engine.start_worker(worker_process())
    assert engine.kept
    assert engine.region.reattached
    for actual, wanted in zip(engine.worker.snapshot(), before, strict=True):
        assert np.array_equal(actual, wanted)
    engine.finish(engine.load([0, 1], [20, 21]), engine.store([7], [5]))
    engine.finish(engine.load([5], [22]))
    assert np.array_equal(engine.worker.read([20, 21, 22]), engine.expected([3, 4, 7], 5))
    assert status_of(daemon, engine.options.name).kept_bytes == size


# The daemon ends


@pytest.fixture
def service(device: str, short_path: Path) -> Iterator[RestartedService]:
    service = RestartedService(short_path, device, pool_bytes=4 << 20)
    with service.manager:
        service.start()
        yield service


def kept_names(service: RestartedService) -> list[str]:
    return [name for name in service.manager.names if name.startswith("tensors-")]


@contextmanager
def allocate_kept(
    service: RestartedService, *, keep: bool = True
) -> Iterator[tuple[OffloadClient, Any, bool]]:
    """Connect as an engine and allocate. Yields the client, the second tensor, and `kept`."""
    with OffloadClient(service.directory, engine="kept") as client:
        _, (_, tensor), kept = client.allocate_kv_caches(LAYOUT, host_bytes=1 << 20, keep=keep)
        yield client, tensor, kept


def test_kept_tensors_outlive_their_engine_and_the_daemon(service: RestartedService) -> None:
    for generation in range(3):
        with allocate_kept(service) as (_, tensor, kept):
            assert kept == (generation > 0), service.manager.log()
            assert not kept or bool((tensor == generation - 1).all())
            tensor.fill_(generation)
            until(lambda: len(kept_names(service)) == 2)
        del tensor
        service.restart()
    with allocate_kept(service) as (client, _, kept):
        assert client.release_kv_caches() >= 2 * 16 * 4096
        until(lambda: not kept_names(service))
    service.restart()
    with allocate_kept(service) as (_, _, kept):
        assert not kept


def test_an_engine_registers_its_tensors_with_the_next_daemon(service: RestartedService) -> None:
    """That daemon keeps the same memory, with the bytes that the engine writes later."""
    with OffloadClient(service.directory, engine="kept", reconnect=False) as client:
        tensors = client.allocate_kv_caches(LAYOUT, host_bytes=1 << 20, keep=True).tensors
        service.restart()
    with OffloadClient(service.directory, engine="kept") as again:
        again.register_kv_caches(CanonicalKVCaches(LAYOUT, tuple(tensors)), host_bytes=1 << 20)
        tensors[1].fill_(77)
    del tensors
    with OffloadClient(service.directory, engine="observer") as observer:
        until(lambda: not any(engine.present for engine in observer.status().engines))
    with allocate_kept(service, keep=False) as (_, tensor, kept):
        assert kept, service.manager.log()
        assert bool((tensor == 77).all())
        until(lambda: not kept_names(service))


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
for turn in range(3):
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
