"""The device worker: every transfer ends once and in order, for random events."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.daemon.core.actions import CancelTransfers, TransferCompleted, UnmapTensors
from kvferry.daemon.engine.base import ChunkBudget
from kvferry.proto.results import Outcome
from kvferry.proto.specs import Direction
from support.worker_fixture import (
    ERROR,
    LOAD,
    STORE,
    FakeChunk,
    StubEngine,
    WorkerFixture,
    finish_all,
    serials,
    take_submitted,
)

block_lists = st.lists(st.integers(0, 5), max_size=4, unique=True)
events = st.one_of(
    st.tuples(st.just("start"), st.sampled_from(Direction), block_lists, st.permutations(range(6))),
    st.tuples(st.sampled_from(["finish", "finish", "finish", "fail", "cancel"]), st.integers(0, 9)),
    st.just(("refuse",)),
)


@settings(max_examples=150)
@given(
    st.lists(events, max_size=30),
    st.sampled_from([ChunkBudget(1 << 30), ChunkBudget(64), ChunkBudget(1 << 30, 2)]),
    st.integers(1, 4),
    st.booleans(),
)
def test_every_transfer_ends_once_and_in_order(
    history: list[tuple[Any, ...]], budget: ChunkBudget, max_chunks: int, unmapped: bool
) -> None:
    stub = StubEngine()
    stub.chunk, stub.max_in_flight = budget, max_chunks
    fixture = WorkerFixture(stub)
    fixture.map()
    plans: dict[int, tuple[Direction, list[int]]] = {}
    ended: list[TransferCompleted] = []
    for event in history:
        match event:
            case "start", direction, blocks, hosts:
                serial = fixture.start(direction, blocks, hosts[: len(blocks)])
                plans[serial] = direction, blocks
            case ("refuse",):
                stub.refusals.append(ERROR)
            case "cancel", number:
                fixture.worker.post_command(CancelTransfers(1, (number + 1,)))
            case verb, number if number < len(stub.in_flight):
                chunk = stub.in_flight[number]
                chunk.done, chunk.error = verb == "finish", None if verb == "finish" else ERROR
        ended += [report for report in fixture.settle() if isinstance(report, TransferCompleted)]
        check_no_common_blocks(stub.in_flight)
    stub.refusals.clear()
    if unmapped:
        fixture.worker.post_command(UnmapTensors(1))
    ended += [
        report for report in finish_all(fixture, stub) if isinstance(report, TransferCompleted)
    ]
    fixture.close()
    chunks = take_submitted(stub)
    assert sorted(serials(ended)) == sorted(plans)
    assert len(stub.closed) == unmapped
    for direction in Direction:
        ends = [end for end in ended if plans[end.serial][0] is direction]
        order = [end.serial for end in ends if end.outcome is not Outcome.CANCELLED]
        assert order == sorted(order)
        submitted = [p.blocks for p in chunks if p.direction is direction]
        if {end.outcome for end in ends} <= {Outcome.DONE}:  # then all blocks are submitted
            assert [*chain(*submitted)] == [*chain(*(plans[serial][1] for serial in order))]


def check_no_common_blocks(chunks: Sequence[FakeChunk]) -> None:
    """A store and a load in flight have no common block, neither on the GPU nor on the host."""
    for store in (chunk for chunk in chunks if chunk.direction is STORE):
        for load in (chunk for chunk in chunks if chunk.direction is LOAD):
            assert not set(store.blocks) & set(load.blocks)
            assert not {*store.run.host_offsets.tolist()} & {*load.run.host_offsets.tolist()}
