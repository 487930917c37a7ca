"""The device worker: start and end, failures, unmapping."""

from __future__ import annotations

import os
import threading
from typing import Any, cast

import pytest

from kvferry.daemon.core.actions import (
    CancelTransfers,
    Report,
    TensorsMapped,
    TensorsUnmapped,
    TransferCompleted,
    UnmapTensors,
)
from kvferry.daemon.engine.base import ChunkBudget
from kvferry.proto.errors import Code, Failed, Refused
from kvferry.proto.results import Outcome
from kvferry.proto.status import CopyStatus
from kvferry.testing.engine import until
from support.time_limits import TIMEOUT
from support.worker_fixture import (
    ERROR,
    LOAD,
    STORE,
    FakeChunk,
    StubEngine,
    TimelineFixture,
    WorkerFixture,
    cancelled,
    done,
    failed,
    finish_all,
    open_descriptors,
    serials,
    take_submitted,
)

# Failures


def completions(reports: list[Report]) -> dict[int, TransferCompleted]:
    """The completions among reports, by serial number."""
    return {report.serial: report for report in reports if isinstance(report, TransferCompleted)}


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.CANCELLED])
def test_a_load_is_stale_if_a_store_that_it_requires_is_not_done(
    fixture: WorkerFixture, stub: StubEngine, outcome: Outcome
) -> None:
    """The store of block 0 is done, the store of block 1 is not. A load waits for each."""
    fixture.map()
    good, bad = (fixture.start(STORE, [block]) for block in (0, 1))
    loads = [
        fixture.start(LOAD, [block], [block - 4], requires=(store,))
        for block, store in ((4, good), (5, bad))
    ]
    first, second = stub.submitted.get(), stub.submitted.get()
    first.done = True
    if outcome is Outcome.FAILED:
        second.error = Failed(Code.COPY_FAILED, "broken")
    else:
        fixture.worker.post_command(CancelTransfers(1, (bad,)))
        second.done = True
    copied = stub.submitted.get(timeout=TIMEOUT)
    assert (copied.direction, copied.blocks) == (LOAD, [4])
    copied.done = True
    ends = completions(fixture.settle())
    assert ends[loads[0]].outcome is Outcome.DONE
    refused = ends[loads[1]]
    assert refused.outcome is Outcome.FAILED
    assert refused.error is not None
    assert refused.error.code == Code.STALE
    assert stub.submitted.empty()


def test_a_load_planned_before_its_store_failed_is_not_copied(
    fixture: WorkerFixture, stub: StubEngine
) -> None:
    """The core plans the load before it receives the report of the failure."""
    fixture.map()
    late: list[int] = []

    def plan_a_load(batch: list[Report]) -> None:
        if not late and completions(batch):
            late.append(fixture.start(LOAD, [4], [0], requires=(1,)))

    take = fixture.receive_batch
    fixture.worker._report = lambda batch: (plan_a_load(batch), take(batch))  # type: ignore[assignment, func-returns-value]
    fixture.start(STORE, [0])
    stub.submitted.get().error = Failed(Code.COPY_FAILED, "broken")
    ends = completions(fixture.settle())
    assert ends[late[0]].error is not None
    assert stub.submitted.empty()
    queues = fixture.worker._registrations[1]
    assert not queues.failed_stores


def test_a_chunk_that_fails_on_the_device_fails_its_plan_once(
    fixture: WorkerFixture, stub: StubEngine
) -> None:
    stub.chunk, stub.max_in_flight = ChunkBudget(64), 2
    fixture.map()
    failing, other = fixture.start(STORE, range(5)), fixture.start(STORE, [9])
    fixture.settle()
    first_chunk, second_chunk = take_submitted(stub)
    first_chunk.error = ERROR
    assert fixture.settle() == []  # its second chunk may still write
    assert [chunk.blocks for chunk in take_submitted(stub)] == [[9]]
    second_chunk.error = Failed(Code.COPY_FAILED, "not reported: the first error is")
    assert fixture.settle() == [failed(failing)]
    assert finish_all(fixture, stub) == [done(other)]


def test_a_cancelled_plan_that_fails_is_cancelled(fixture: WorkerFixture, stub: StubEngine) -> None:
    fixture.map()
    serial = fixture.start(STORE, [0])
    fixture.settle()
    fixture.worker.post_command(CancelTransfers(1, (serial,)))
    fixture.settle()
    stub.in_flight[0].error = ERROR
    assert fixture.settle() == [cancelled(serial)]


def test_a_transfer_whose_time_cannot_be_read_still_ends(
    fixture: WorkerFixture, stub: StubEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def elapsed(*_: object) -> float:
        raise ERROR

    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr(stub, "elapsed", elapsed)
    fixture.map()
    plans = [fixture.start(STORE, [block]) for block in (0, 1)]
    assert serials(finish_all(fixture, stub)) == plans


def test_an_exception_of_the_engine_ends_the_worker_and_is_reported(
    stub: StubEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised = threading.Event()

    def fail(*_: object) -> FakeChunk:
        return cast(FakeChunk, [].pop())

    monkeypatch.setattr(threading, "excepthook", lambda _: raised.set())
    monkeypatch.setattr(stub, "submit", fail)
    fixture = WorkerFixture(stub, expected=1)
    fixture.map()
    fixture.start(STORE, [0])
    assert raised.wait(TIMEOUT)
    assert "IndexError" in fixture.deaths[0].message
    fixture.close()


@pytest.mark.parametrize("error", [Refused(Code.NO_DEVICE, "no device"), RuntimeError("no")])
def test_an_error_of_the_device_is_raised_at_the_start(
    stub: StubEngine, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attach(*_: object) -> CopyStatus | None:
        raise error

    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr(stub, "attach", attach)
    with pytest.raises(type(error), match="no"):
        WorkerFixture(stub)


def test_at_its_end_the_worker_releases_held_memory_and_the_device(
    stub: StubEngine, timeline: TimelineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_at_shutdown: list[bool] = []
    held = timeline.copy
    path = f"/proc/self/fd/{held}"
    monkeypatch.setattr(stub, "shutdown", lambda: open_at_shutdown.append(os.path.lexists(path)))
    fixture = WorkerFixture(stub, held=(held,))
    fixture.close()
    assert open_at_shutdown == [False]


# Unmapping


def test_a_failed_mapping_is_reported_and_can_be_unmapped(fixture: WorkerFixture) -> None:
    assert fixture.map(locations=None) == TensorsMapped(
        1, "session", Failed(Code.MAP_FAILED, "no memory").info
    )
    fixture.worker.post_command(UnmapTensors(1))
    assert fixture.settle() == [TensorsUnmapped(1)]


@pytest.mark.parametrize("works", [True, False])
def test_descriptors_of_a_map_command_are_closed(
    fixture: WorkerFixture, timeline: TimelineFixture, works: bool
) -> None:
    tensor_fd, timeline_fd = os.dup(timeline.descriptor), timeline.copy
    options: dict[str, Any] = {} if works else {"locations": None}
    report = fixture.map(timeline=timeline_fd, descriptors=(tensor_fd,), **options)
    assert (report.error is None) == works
    received = {str(tensor_fd), str(timeline_fd)}
    until(lambda: not received & open_descriptors())  # a thread closes them
