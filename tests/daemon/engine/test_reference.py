"""The reference engine with a device worker."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from kvferry.daemon.core.actions import TransferCompleted
from kvferry.daemon.engine import reference
from kvferry.daemon.engine.reference import Faults, ReferenceEngine
from kvferry.daemon.memory.shared_memory import PAGE
from kvferry.proto.errors import Code
from kvferry.proto.memory import CudaAllocation, FdAllocation, Location
from kvferry.proto.specs import Direction, KVLayout
from kvferry.shm.memfd import sealed_memfd
from kvferry.testing.engine import until
from support.time_limits import TIMEOUT
from support.worker_fixture import SMALL, STORE, WorkerFixture, layout, open_descriptors


@dataclass
class CopyFixture:
    """A registration that the reference engine allocated, and its bytes: (block, byte) arrays."""

    fixture: WorkerFixture
    gpu: np.ndarray[Any, np.dtype[np.uint8]]
    host: np.ndarray[Any, np.dtype[np.uint8]]


BYTES = 64


@pytest.fixture
def faults() -> Faults:
    return Faults()


@pytest.fixture
def copies(faults: Faults) -> Iterator[CopyFixture]:
    fixture = WorkerFixture(ReferenceEngine(faults))
    report = fixture.map(locations=None)
    (descriptor,), (location,) = report.descriptors, report.locations
    memory = mmap.mmap(descriptor, 64 * BYTES)
    os.close(descriptor)
    assert location == Location(0, 0)
    gpu = np.frombuffer(memory, dtype=np.uint8).reshape(64, BYTES)
    pool: Any = (ctypes.c_ubyte * (64 * BYTES)).from_address(fixture.pool.address)
    rng = np.random.default_rng(3)
    gpu[:] = rng.integers(0, 256, gpu.shape, dtype=np.uint8)
    yield CopyFixture(fixture, gpu, np.frombuffer(pool, dtype=np.uint8).reshape(64, BYTES))
    fixture.close()


def wait_for(fixture: WorkerFixture, *serials: int) -> dict[int, TransferCompleted]:
    """Wait until all of these have ended."""
    ended: dict[int, TransferCompleted] = {}
    while not ended.keys() >= set(serials):
        ended |= {r.serial: r for r in fixture.reports() if isinstance(r, TransferCompleted)}
    return ended


@pytest.mark.parametrize("first", Direction)
def test_copies_with_a_common_block_run_one_after_the_other(
    copies: CopyFixture, first: Direction, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, copied = threading.Event(), queue.SimpleQueue[Direction]()
    copy = reference._copy

    def slow_copy(chunk: Any) -> None:
        if chunk.direction is first:
            assert gate.wait(TIMEOUT)
        copy(chunk)
        copied.put(chunk.direction)

    monkeypatch.setattr(reference, "_copy", slow_copy)
    gpu, host = copies.gpu.copy(), copies.host.copy()
    plans = copies.fixture.start(first, [1], [1]), copies.fixture.start(first.other, [2], [1])
    free = copies.fixture.start(first.other, [9], [9])
    assert copies.fixture.settle() == []
    assert copied.empty()
    gate.set()
    wait_for(copies.fixture, *plans, free)
    assert [copied.get(timeout=TIMEOUT) for _ in range(3)] == [first, first.other, first.other]
    if first is STORE:
        assert np.array_equal(copies.gpu[2], gpu[1])
    else:
        assert np.array_equal(copies.gpu[1], host[1])
        assert np.array_equal(copies.host[1], gpu[2])


def test_a_failed_copy_ends_once_and_the_next_is_done(copies: CopyFixture, faults: Faults) -> None:
    faults.fail_every = 2
    plans = [copies.fixture.start(STORE, [block]) for block in range(4)]
    ended = wait_for(copies.fixture, *plans)
    assert [ended[serial].outcome for serial in plans] == ["done", "failed", "done", "failed"]
    errors = [error.code for serial in plans if (error := ended[serial].error)]
    assert errors == [Code.COPY_FAILED, Code.COPY_FAILED]
    assert copies.fixture.settle() == []


def test_chunks_in_flight_are_bounded(copies: CopyFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    monkeypatch.setattr(reference, "_copy", lambda _: gate.wait(TIMEOUT))
    engine = copies.fixture.engine
    submitted: list[object] = []
    submit = engine.submit

    def counting_submit(*arguments: Any) -> object:
        submitted.append(submit(*arguments))
        return submitted[-1]

    monkeypatch.setattr(engine, "submit", counting_submit)
    plans = [copies.fixture.start(STORE, [block]) for block in range(30)]
    until(lambda: len(submitted) == reference.MAX_CHUNKS)
    assert copies.fixture.settle() == []
    assert len(submitted) == reference.MAX_CHUNKS
    gate.set()
    assert sorted(wait_for(copies.fixture, *plans)) == plans
    assert len(submitted) == 30


CUDA = CudaAllocation("GPU-1", bytes(64), PAGE)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        (SMALL, {"allocations": (CUDA,)}),
        (SMALL, {"allocations": (FdAllocation(0, 1 << 40),), "files": 1}),
        (SMALL, {"allocations": (FdAllocation(0, PAGE), CUDA), "files": 1}),
        (SMALL, {"allocations": (FdAllocation(0, PAGE),), "files": 1, "timeline": "pipe"}),
        (layout(1 << 47, 1 << 20), {"locations": None}),
        (layout(1 << 40, 1 << 10), {"locations": None}),
    ],
    ids=["CUDA", "too short", "mixed", "pipe as timeline", "beyond 64 bits", "too much memory"],
)
def test_wrong_registrations_are_refused_and_do_not_end_the_worker(
    shape: KVLayout, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = dict(options)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    fixture = WorkerFixture(ReferenceEngine())
    gc.collect()  # otherwise files of other tests may be closed meanwhile
    before = open_descriptors()
    descriptors = tuple(sealed_memfd("kv", PAGE) for _ in range(options.pop("files", 0)))
    ends = os.pipe() if options.pop("timeline", None) else None
    report = fixture.map(shape=shape, timeline=ends and ends[0], descriptors=descriptors, **options)
    assert report.error is not None
    if ends is not None:
        os.close(ends[1])
    until(lambda: open_descriptors() <= before)  # a thread closes them
    fixture.close()
