"""The device worker: the order in which it submits chunks of several transfers."""

from __future__ import annotations

import pytest

from kvferry.daemon.core.actions import (
    CancelTransfers,
    Report,
    UnmapTensors,
)
from kvferry.daemon.engine.base import ChunkBudget, ChunkRequest
from kvferry.proto.specs import Direction
from kvferry.testing.engine import until
from support.time_limits import TIMEOUT
from support.worker_fixture import (
    LOAD,
    STORE,
    UNKNOWN,
    StubEngine,
    WorkerFixture,
    cancelled,
    done,
    finish,
    finish_all,
    serials,
    take_submitted,
)


def test_chunks_of_several_registrations_alternate(
    fixture: WorkerFixture, stub: StubEngine
) -> None:
    stub.chunk, stub.max_in_flight = ChunkBudget(64), 1
    for number in (1, 2, 3):
        fixture.map(number)
    fixture.start(STORE, [60], number=3)
    fixture.settle()  # it uses the whole budget until all other plans are queued
    plans = [fixture.start(STORE, range(4 - n), number=n) for n in (1, 2, 3)]
    fixture.settle()
    number_of = {layout: number for number, layout in fixture.geometries.items()}
    order: list[tuple[int, int]] = []
    reports: list[Report] = []
    while stub.in_flight:
        chunk = stub.in_flight[0]
        order.append((number_of[chunk.mapping.layout], chunk.blocks[0]))
        reports += finish(fixture, chunk)
    assert order[0] == (3, 60)
    turns = [number for number, _ in order[1:]]
    assert sorted(turns[:3]) == [1, 2, 3]
    assert sorted(turns[3:5]) == [1, 2]
    assert turns[5:] == [1]
    assert [block for number, block in order if number == 1] == [0, 1, 2]
    assert sorted(serials(reports)[1:]) == plans


def test_a_load_is_submitted_between_two_chunks_of_a_store(
    fixture: WorkerFixture, stub: StubEngine
) -> None:
    """The load arrives while the worker submits the first of many chunks of a store."""
    stub.chunk, stub.max_in_flight = ChunkBudget(64), 100
    fixture.map()
    load: list[int] = []

    def start_load() -> None:
        if not load:
            load.append(fixture.start(LOAD, [40]))

    stub.on_submit = start_load
    fixture.start(STORE, range(8))
    reports = finish_all(fixture, stub)
    order = [chunk.direction for chunk in take_submitted(stub)]
    assert order == [STORE, LOAD] + [STORE] * 7
    assert sorted(serials(reports)) == [1, 2]


def test_a_cancel_takes_effect_between_two_chunks(fixture: WorkerFixture, stub: StubEngine) -> None:
    """It arrives while the first chunk is submitted. The budget has room for all chunks."""
    stub.chunk, stub.max_in_flight = ChunkBudget(64), 100
    fixture.map()
    stub.on_submit = lambda: fixture.worker.post_command(CancelTransfers(1, (1,)))
    fixture.start(STORE, range(8))
    assert finish_all(fixture, stub) == [cancelled(1)]
    assert len(take_submitted(stub)) == 1


def test_an_end_is_reported_before_the_next_chunk_is_submitted(
    fixture: WorkerFixture, stub: StubEngine
) -> None:
    stub.max_in_flight = 1
    fixture.map()
    first, second = fixture.start(STORE, [0]), fixture.start(STORE, [1])
    fixture.settle()
    reported: list[list[Report]] = []
    stub.on_submit = lambda: reported.append(fixture.batches.get_nowait())
    stub.in_flight[0].done = True
    until(lambda: len(reported) == 1)
    assert reported == [[done(first)]]
    stub.on_submit = lambda: None
    assert serials(finish_all(fixture, stub)) == [second]


def test_stores_continue_while_commands_arrive(fixture: WorkerFixture, stub: StubEngine) -> None:
    """The worker submits one chunk in each step."""
    stub.chunk, stub.max_in_flight = ChunkBudget(64), 100
    fixture.map()
    stub.on_submit = lambda: fixture.worker.post_command(UnmapTensors(UNKNOWN))
    store = fixture.start(STORE, range(8))
    until(lambda: len(stub.in_flight) == 8)
    stub.on_submit = lambda: None
    assert serials(finish_all(fixture, stub)) == [store]


def test_chunks_are_submitted_within_the_engines_budget(
    fixture: WorkerFixture, stub: StubEngine
) -> None:
    stub.chunk, stub.max_in_flight = ChunkBudget(1 << 20, blocks=2), 3
    fixture.map()
    plan = fixture.start(STORE, range(10))
    small = [fixture.start(STORE, [block]) for block in range(20, 24)]
    fixture.settle()
    chunks: list[list[int]] = []
    reports: list[Report] = []
    while stub.in_flight:
        assert len(stub.in_flight) == min(3, 9 - len(chunks))
        chunks.append(stub.in_flight[0].blocks)
        reports += finish(fixture, stub.in_flight[0])
    assert chunks == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [20], [21], [22], [23]]
    assert serials(reports) == [plan, *small]


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("large", [False, True])
def test_a_completion_of_one_direction_makes_room_for_the_other(
    fixture: WorkerFixture, stub: StubEngine, direction: Direction, large: bool
) -> None:
    """No other event makes the worker try again."""
    if large:
        fixture.map_large()
    else:
        fixture.map()
    fixture.start(direction, [0])
    if large:
        fixture.start(direction.other, [1])
    fixture.settle()
    first, *_ = [chunk for chunk in take_submitted(stub) if chunk.direction is direction]
    stub.is_full = True
    refused = fixture.start(direction.other, [9])
    fixture.settle()
    stub.is_full = False
    first.done = True
    assert stub.submitted.get(timeout=TIMEOUT).blocks == [9]
    assert refused in serials(finish_all(fixture, stub))


@pytest.mark.parametrize("event", ["cancel", "start"])
def test_a_transfer_without_room_is_submitted_after_a_cancel_or_start(
    fixture: WorkerFixture, stub: StubEngine, event: str
) -> None:
    fixture.map()
    stub.is_full = True
    first, second = fixture.start(STORE, [0]), fixture.start(STORE, [1])
    fixture.settle()
    stub.is_full = False
    if event == "cancel":
        fixture.worker.post_command(CancelTransfers(1, (first,)))
    else:
        fixture.start(STORE, [2])
    assert stub.submitted.get(timeout=TIMEOUT).blocks == [int(event == "cancel")]
    assert second in serials(finish_all(fixture, stub))


def test_flush_is_called_after_each_round(fixture: WorkerFixture, stub: StubEngine) -> None:
    stub.chunk, stub.max_in_flight = ChunkBudget(1 << 20, blocks=2), 2
    fixture.map()
    fixture.settle()
    assert not stub.flushes
    fixture.start(STORE, range(6))
    fixture.settle()
    assert stub.flushes[-1] == (STORE, True)
    finish(fixture, stub.in_flight[0])
    assert stub.flushes[-1] == (STORE, False)
    assert (LOAD, False) not in stub.flushes


def test_chunk_requests_state_the_remaining_bytes_and_other_waiting_directions(
    fixture: WorkerFixture, stub: StubEngine
) -> None:
    stub.chunk, stub.max_in_flight = ChunkBudget(128), 1
    fixture.map()
    fixture.start(STORE, range(5))
    fixture.settle()
    assert set(stub.requests) == {
        (STORE, ChunkRequest(0, 5 * 64, False)),
        (STORE, ChunkRequest(0, 3 * 64, False)),
    }
    fixture.start(LOAD, [9])
    fixture.start(LOAD, [10])
    fixture.settle()
    stub.requests.clear()
    fixture.settle()
    assert set(stub.requests) == {
        (LOAD, ChunkRequest(0, 64, True)),
        (STORE, ChunkRequest(0, 3 * 64, True)),
    }
