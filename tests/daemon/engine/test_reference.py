"""The reference engine with a device worker."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kvferry.daemon.core.actions import TransferCompleted
from kvferry.daemon.engine import reference
from kvferry.daemon.engine.reference import Faults, ReferenceEngine
from kvferry.daemon.memory.shared_memory import PAGE
from kvferry.proto.errors import Code
from kvferry.proto.memory import CudaAllocation, FdAllocation
from kvferry.proto.specs import KVLayout
from kvferry.shm.memfd import sealed_memfd
from kvferry.testing.engine import until
from support.time_limits import TIMEOUT
from support.worker_fixture import SMALL, STORE, WorkerFixture, layout, open_descriptors


@pytest.fixture
def faults() -> Faults:
    return Faults()


@pytest.fixture
def fixture(faults: Faults) -> Iterator[WorkerFixture]:
    """With tensors that the engine has allocated."""
    fixture = WorkerFixture(ReferenceEngine(faults))
    (descriptor,) = fixture.map(locations=None).descriptors
    os.close(descriptor)
    yield fixture
    fixture.close()


def wait_for(fixture: WorkerFixture, *serials: int) -> dict[int, TransferCompleted]:
    """Wait until all of these have ended."""
    ended: dict[int, TransferCompleted] = {}
    while not ended.keys() >= set(serials):
        ended |= {r.serial: r for r in fixture.reports() if isinstance(r, TransferCompleted)}
    return ended


def test_a_failed_copy_ends_once_and_the_next_is_done(
    fixture: WorkerFixture, faults: Faults
) -> None:
    faults.fail_every = 2
    plans = [fixture.start(STORE, [block]) for block in range(4)]
    ended = wait_for(fixture, *plans)
    assert [ended[serial].outcome for serial in plans] == ["done", "failed", "done", "failed"]
    errors = [error.code for serial in plans if (error := ended[serial].error)]
    assert errors == [Code.COPY_FAILED, Code.COPY_FAILED]
    assert fixture.settle() == []


def test_chunks_in_flight_are_bounded(
    fixture: WorkerFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    monkeypatch.setattr(reference, "_copy", lambda _: gate.wait(TIMEOUT))
    engine = fixture.engine
    submitted: list[object] = []
    submit = engine.submit

    def counting_submit(*arguments: Any) -> object:
        submitted.append(submit(*arguments))
        return submitted[-1]

    monkeypatch.setattr(engine, "submit", counting_submit)
    plans = [fixture.start(STORE, [block]) for block in range(30)]
    until(lambda: len(submitted) == reference.MAX_CHUNKS)
    assert fixture.settle() == []
    assert len(submitted) == reference.MAX_CHUNKS
    gate.set()
    assert sorted(wait_for(fixture, *plans)) == plans
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
