"""Transfer queues: the order in which transfers are submitted and end, and what they wait for."""

from __future__ import annotations

import time
from typing import cast

import numpy as np
import pytest

from kvferry.daemon.core.actions import (
    CancelTransfers,
    CopyPlan,
    Pong,
    TransferCompleted,
    UnmapTensors,
)
from kvferry.daemon.core.layout import BlockLayout
from kvferry.daemon.device.command_queue import Ping
from kvferry.daemon.device.device_worker import MAX_CANCELS
from kvferry.daemon.device.transfer_queues import RegistrationQueues
from kvferry.daemon.engine.base import ChunkBudget, Mapping
from kvferry.daemon.memory.shared_memory import TimelineReader
from kvferry.proto.layout import LayoutArrays
from kvferry.proto.results import Outcome
from kvferry.proto.specs import Direction
from support.raw_client import one_tensor
from support.time_limits import TIMEOUT
from support.worker_fixture import (
    LOAD,
    STORE,
    UNKNOWN,
    StubEngine,
    TimelineFixture,
    WorkerFixture,
    cancelled,
    done,
    finish,
    finish_all,
    serials,
    take_submitted,
)

# Order


@pytest.mark.parametrize("direction", Direction)
def test_plans_of_one_direction_run_and_end_in_order(
    fixture: WorkerFixture, stub: StubEngine, direction: Direction
) -> None:
    fixture.map()
    first, second = (fixture.start(direction, [block, block + 1]) for block in (0, 2))
    assert fixture.settle() == []
    chunks = take_submitted(stub)
    assert [chunk.blocks for chunk in chunks] == [[0, 1], [2, 3]]
    assert {chunk.direction for chunk in chunks} == {direction}
    assert finish(fixture, chunks[1]) == []
    assert finish(fixture, chunks[0]) == [done(first), done(second)]
    assert stub.timed == [([0, 1], None), ([2, 3], [0, 1])]


def test_a_transfer_waits_for_the_last_chunk_of_another(
    fixture: WorkerFixture, stub: StubEngine
) -> None:
    stub.chunk, stub.max_in_flight = ChunkBudget(64), 2
    fixture.map()
    store = fixture.start(STORE, [0, 1, 2, 3])
    load = fixture.start(LOAD, [9], [0])
    fixture.settle()
    for block in range(4):
        assert all(chunk.direction is STORE for chunk in stub.in_flight)
        assert stub.in_flight[0].blocks == [block]
        reports = finish(fixture, stub.in_flight[0])
    assert reports == [done(store, 4.0)]  # from the start of the first to the end of the last
    assert serials(finish_all(fixture, stub)) == [load]


# Fences


def test_a_plan_waits_for_the_timeline(
    fixture: WorkerFixture, stub: StubEngine, timeline: TimelineFixture
) -> None:
    fixture.map(timeline=timeline.copy)
    timeline.write_value(2)
    fixture.start(STORE, [0], wait_for=2)
    held, next_store = fixture.start(STORE, [1], wait_for=3), fixture.start(STORE, [2])
    load = fixture.start(LOAD, [3])
    fixture.settle()
    assert sorted(chunk.blocks for chunk in take_submitted(stub)) == [[0], [3]]
    assert load in serials(finish_all(fixture, stub))
    timeline.write_value(4)
    chunks = [stub.submitted.get(timeout=TIMEOUT) for _ in range(2)]  # without a wake-up
    assert [chunk.blocks for chunk in chunks] == [[1], [2]]
    assert finish(fixture, *chunks) == [done(held), done(next_store)]


def test_an_empty_transfer_waits_for_the_timeline(
    fixture: WorkerFixture, stub: StubEngine, timeline: TimelineFixture
) -> None:
    fixture.map(timeline=timeline.copy)
    first, empty = fixture.start(STORE, [0]), fixture.start(STORE, [], wait_for=1)
    assert serials(finish_all(fixture, stub)) == [first]
    timeline.write_value(1)
    assert fixture.settle() == [done(empty, 0.0)]


def test_a_pong_has_the_times_of_the_oldest_running_and_held_job(
    fixture: WorkerFixture, stub: StubEngine, timeline: TimelineFixture
) -> None:
    """A job that waits for a held job is held. A started job runs, whatever the timeline is."""
    fixture.map(timeline=timeline.copy)
    fixture.map(2, timeline=timeline.copy)
    now = time.monotonic()
    fixture.worker.post_command(Ping(1.0))
    assert fixture.settle() == [Pong(1.0, None, None)]
    timeline.write_value(1)
    begun = fixture.start(STORE, [1], number=2, wait_for=1, accepted=now - 60)
    fixture.start(STORE, [2], number=2, accepted=now - 30)
    fixture.settle()
    timeline.write_value(0)
    fixture.start(STORE, [0], wait_for=1, accepted=now - 80)
    fixture.start(LOAD, [5], [0], accepted=now - 90)
    fixture.worker.post_command(Ping(2.0))
    assert fixture.settle() == [Pong(2.0, now - 60, now - 90)]
    (ended,) = finish(fixture, stub.in_flight[0])
    assert isinstance(ended, TransferCompleted)
    assert (ended.serial, ended.queued >= 60) == (begun, True)


def test_a_plan_waits_for_the_part_of_the_pool_that_it_uses(
    fixture: WorkerFixture, stub: StubEngine
) -> None:
    fixture.pool.ready_bytes = 3 * 64
    fixture.map()
    ready, not_ready = fixture.start(STORE, [0], [2]), fixture.start(STORE, [1], [3])
    assert serials(finish_all(fixture, stub)) == [ready]
    fixture.pool.ready_bytes = 4 * 64
    assert serials(finish_all(fixture, stub)) == [not_ready]


# Cancel


def test_a_waiting_plan_is_cancelled_at_once(
    fixture: WorkerFixture, stub: StubEngine, timeline: TimelineFixture
) -> None:
    fixture.map(timeline=timeline.copy)
    held = fixture.start(STORE, [0], wait_for=1)
    store, load = fixture.start(STORE, [1]), fixture.start(LOAD, [5], [0])
    fixture.settle()
    fixture.worker.post_command(CancelTransfers(1, (held,)))
    assert fixture.settle() == [cancelled(held)]
    assert [chunk.blocks for chunk in take_submitted(stub)] in ([[5], [1]], [[1], [5]])
    assert sorted(serials(finish_all(fixture, stub))) == [store, load]


def test_a_revoked_timeline_cancels_all_jobs_of_its_engine(
    fixture: WorkerFixture, stub: StubEngine, timeline: TimelineFixture
) -> None:
    """No further chunk is submitted, and the chunk in flight does not make its job done."""
    fixture.map(timeline=timeline.copy)
    stub.max_in_flight = 1
    first, second = fixture.start(STORE, [1]), fixture.start(STORE, [2])
    fixture.settle()
    timeline.revoke()
    (ended,) = [r for r in finish(fixture, stub.in_flight[0]) if isinstance(r, TransferCompleted)]
    assert (ended.serial, ended.outcome) == (first, Outcome.CANCELLED)
    fixture.settle()
    assert not stub.in_flight
    fixture.worker.post_command(UnmapTensors(1))
    assert serials(fixture.settle()) == [second]


@pytest.mark.parametrize("dies", [False, True], ids=["cancels", "dies"])
def test_cancelling_very_many_jobs_does_not_delay_others(
    fixture: WorkerFixture, stub: StubEngine, dies: bool
) -> None:
    """The worker cancels some at a time. After the engine died, it submits none of its jobs."""
    fixture.map()
    fixture.map(2)
    stub.is_full = True
    held = [fixture.start(STORE, [1]) for _ in range(5 * MAX_CANCELS)]
    fixture.settle()
    stub.is_full = False
    ends_at_submit: list[tuple[Direction, int]] = []
    stub.on_submit = lambda: ends_at_submit.append(
        (stub.in_flight[-1].direction, fixture.reported_ends)
    )
    loads: list[int] = []

    def start_load() -> None:
        if not loads:
            loads.append(fixture.start(LOAD, [1], number=2))

    fixture.on_cancel_continued = start_load
    fixture.worker.post_command(
        UnmapTensors(1) if dies else CancelTransfers(1, tuple(reversed(held)))
    )
    ended = serials(finish_all(fixture, stub))
    assert sorted(ended) == sorted([*held, *loads])
    (before,) = [count for direction, count in ends_at_submit if direction is LOAD]
    assert before <= 2 * MAX_CANCELS
    assert dies == (STORE not in dict(ends_at_submit))
    assert len(stub.closed) == dies


@pytest.mark.parametrize(
    "order", [CancelTransfers(1, (1,)), CancelTransfers(1, (77,)), CancelTransfers(UNKNOWN, (1,))]
)
def test_a_cancel_after_the_end_is_ignored(
    fixture: WorkerFixture, stub: StubEngine, order: CancelTransfers
) -> None:
    fixture.map()
    fixture.start(STORE, [0])
    assert serials(finish_all(fixture, stub)) == [1]
    fixture.worker.post_command(order)
    assert fixture.settle() == []


class RevokedWhileRead:
    """The engine revokes its timeline, and then a late write of its stream reaches the fence."""

    revoked = False

    def reached(self, value: int) -> bool:
        self.revoked = True
        return True

    def is_revoked(self) -> bool:
        return self.revoked


def test_the_revocation_is_read_after_the_fence() -> None:
    layout = BlockLayout(LayoutArrays.from_layout(one_tensor()), 0, 4)
    timeline = cast(TimelineReader, RevokedWhileRead())
    queues = RegistrationQueues(Mapping(layout, np.zeros(1, dtype=np.int64)), timeline)
    plan = CopyPlan(1, 1, Direction.LOAD, (), 0, wait_for=5, after=0, host_end=0)
    assert queues.must_wait(plan, pool_ready=1 << 30)
