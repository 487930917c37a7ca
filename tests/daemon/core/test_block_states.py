"""Host blocks that are addressed by number: which of them may be loaded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvferry.daemon.core.actions import (
    BlocksCorrupted,
    BlocksVerified,
    TensorsMapped,
    TensorsUnmapped,
    TransferCompleted,
)
from kvferry.daemon.core.block_states import BlockStates
from kvferry.daemon.core.block_table import BlockTable
from kvferry.daemon.core.layout import BlockLayout, ResolvedBlocks
from kvferry.daemon.core.records import engine_owner
from kvferry.proto import messages as wire
from kvferry.proto.errors import Code, Refused
from kvferry.proto.layout import LayoutArrays
from kvferry.proto.protocol import make_hello
from kvferry.proto.results import Outcome
from kvferry.proto.specs import (
    CPULoadStoreSpec,
    Direction,
    GPULoadStoreSpec,
    KVLayout,
    TensorLayout,
    TensorRef,
)
from support.committed_blocks import commit_all, next_table, residents_of
from support.core_fixture import LAYOUT, CoreFixture, load, store


def test_a_host_block_that_the_engine_never_stored_is_not_loaded() -> None:
    """They may contain bytes of another engine."""
    fixture = CoreFixture("a", "b")
    fixture.start("a", 1, store(0, 1, hosts=(0,)))
    fixture.start("a", 2, load(0, 1, hosts=(0,)))
    (action,) = fixture.submit("a", 3, load(0, 1, 2, 3, hosts=(0, 1)))
    (result,) = action.message.results
    assert (result.error.code, result.error.value) == (Code.STALE, "1")
    assert fixture.refused("b", 1, load(0, 1, hosts=(0,))) == Code.STALE


def test_a_reconnected_engine_may_load_its_stored_blocks() -> None:
    fixture = CoreFixture("a/old", "a/new")
    plan = fixture.start("a/old", 1, store(0, 1, hosts=(0,)))
    fixture.report(TransferCompleted(plan.serial, Outcome.DONE))
    fixture.core.close_session("a/old")
    fixture.report(TensorsUnmapped(1))
    (mapping,) = fixture.send("a/new", wire.AllocateKVCaches(5, LAYOUT, 4096))
    fixture.report(TensorsMapped(mapping.registration, "a/new"))
    fixture.start("a/new", 1, load(0, 1, hosts=(0,)))
    assert fixture.refused("a/new", 2, load(0, 1, hosts=(1,))) == Code.STALE


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.CANCELLED])
def test_a_host_block_whose_last_store_did_not_complete_is_stale(outcome: Outcome) -> None:
    fixture = CoreFixture("a")
    fixture.fill("a")
    plan = fixture.start("a", 1, store(0, 1, hosts=(0,)))
    fixture.report(TransferCompleted(plan.serial, outcome))
    assert fixture.refused("a", 2, load(0, 1, hosts=(0,))) == Code.STALE
    fixture.start("a", 3, load(0, 1, hosts=(1,)))


def test_a_store_that_never_ran_does_not_expose_bytes_of_an_earlier_owner() -> None:
    fixture = CoreFixture("a", "b", registered=False, pool_bytes=4096)
    for session in ("a", "b"):
        (*_, mapping) = fixture.send(session, wire.AllocateKVCaches(1, LAYOUT, 4096, timeline=3))
        fixture.report(TensorsMapped(mapping.registration, session))
        if session == "a":
            fixture.fill("a")
            fixture.core.close_session("a")
            fixture.report(TensorsUnmapped(mapping.registration))
    plan = fixture.start("b", 1, store(0, 1, hosts=(0,)), wait_for=1 << 40)
    fixture.send("b", wire.Cancel((1,)))
    fixture.report(TransferCompleted(plan.serial, Outcome.CANCELLED))
    assert fixture.refused("b", 2, load(0, 1, hosts=(0,))) == Code.STALE


def test_a_load_requires_the_stores_of_its_blocks_that_have_not_ended() -> None:
    fixture = CoreFixture("a")
    fixture.fill("a")
    first = fixture.start("a", 1, store(0, hosts=(0,)))
    second = fixture.start("a", 2, store(2, 3, hosts=(1,)))
    assert fixture.start("a", 3, load(4, 5, 6, 7, hosts=(0, 1))).requires == (
        first.serial,
        second.serial,
    )
    third = fixture.start("a", 4, store(0, hosts=(0,)))
    assert fixture.start("a", 5, load(4, hosts=(0,))).requires == (third.serial,)
    fixture.report(TransferCompleted(first.serial, Outcome.FAILED))
    fixture.report(TransferCompleted(third.serial, Outcome.DONE))
    fixture.report(TransferCompleted(second.serial, Outcome.DONE))
    assert fixture.start("a", 6, load(4, hosts=(0,))).requires == ()


def test_the_end_of_an_older_store_of_a_block_is_not_that_of_the_newer_one() -> None:
    fixture = CoreFixture("a")
    older = fixture.start("a", 1, store(0, hosts=(0,)))
    newer = fixture.start("a", 2, store(0, hosts=(0,)))
    fixture.report(TransferCompleted(older.serial, Outcome.DONE))
    assert fixture.start("a", 3, load(4, hosts=(0,))).requires == (newer.serial,)


def test_a_completed_store_is_committed_with_the_parts_that_are_loadable() -> None:
    fixture = CoreFixture("a")
    plans = [
        fixture.start("a", 1, store(0, hosts=(1,))),
        fixture.start("a", 2, store(1, 2, hosts=(0,))),
    ]
    for plan, parts in zip(plans, ({1: (0, 1)}, {1: (0, 1), 0: None}), strict=True):
        fixture.report(TransferCompleted(plan.serial, Outcome.DONE))
        (found,) = fixture.region_records.found()
        assert {each.block: each.part for each in residents_of(found.lines)} == parts
    rest = GPULoadStoreSpec([3], (1,), (1,)), CPULoadStoreSpec([1])
    fixture.report(TransferCompleted(fixture.start("a", 3, rest).serial, Outcome.DONE))
    (found,) = fixture.region_records.found()
    assert {each.block: each.part for each in residents_of(found.lines)} == {0: None, 1: None}


def test_loads_in_flight_of_a_corrupt_block_fail_and_the_block_becomes_stale() -> None:
    fixture = CoreFixture("a")
    fixture.fill("a")
    plans = [fixture.start("a", job, load(0, 1, hosts=(job,))) for job in (0, 1)]
    assert fixture.report(BlocksCorrupted(engine_owner("a"), np.array([1]))) == []
    for plan, outcome in zip(plans, (Outcome.DONE, Outcome.FAILED), strict=True):
        (action,) = fixture.report(TransferCompleted(plan.serial, Outcome.DONE))
        (result,) = action.message.results
        assert result.outcome == outcome
    assert (result.error.code, result.error.value, result.nbytes) == (Code.CORRUPT_BLOCK, "1", 0)
    assert fixture.refused("a", 3, load(0, 1, hosts=(1,))) == Code.STALE
    fixture.start("a", 4, load(0, 1, hosts=(0,)))
    assert fixture.core.errors[Code.CORRUPT_BLOCK] == 2


def restarted(old: CoreFixture) -> CoreFixture:
    """The next daemon, in which engine a is registered again."""
    fixture = CoreFixture(registered=False)
    fixture.region_records = old.region_records
    fixture.core.restore_region(*old.region_records.found())
    fixture.core.open_session("a", make_hello("client", "a"))
    (mapping,) = fixture.send("a", wire.AllocateKVCaches(1, LAYOUT, 4096))
    (reply,) = fixture.report(TensorsMapped(mapping.registration, "a"))
    assert reply.message.region.reattached
    return fixture


def test_blocks_of_an_earlier_daemon_are_stale_until_they_are_verified() -> None:
    old = CoreFixture("a")
    plans = [old.start("a", 1, store(0, hosts=(0,))), old.start("a", 2, store(2, 3, hosts=(1,)))]
    for plan in plans:
        old.report(TransferCompleted(plan.serial, Outcome.DONE))
    fixture = restarted(old)
    (action,) = fixture.submit("a", 1, load(2, 3, hosts=(1,)))
    (result,) = action.message.results
    assert (result.error.code, result.error.value) == (Code.STALE, "1")
    fixture.report(BlocksVerified(engine_owner("a"), np.array([0])))
    fixture.start("a", 2, load(0, hosts=(0,)))
    assert fixture.refused("a", 3, load(0, 1, hosts=(0,))) == Code.STALE
    assert fixture.refused("a", 4, load(0, 1, hosts=(1,))) == Code.STALE
    assert fixture.report(BlocksVerified(engine_owner("unknown"), np.array([0]))) == []


@pytest.mark.parametrize("restarted", [False, True])
def test_only_the_user_of_an_engine_gets_its_host_blocks(restarted: bool) -> None:
    """The user who stored the blocks gets them, also after a restart of the daemon."""
    hello = make_hello("client", "a")
    for uid, same_user in ((1000, True), (1001, False)):
        fixture = CoreFixture(registered=False)
        fixture.core.open_session("old", hello, 1000)
        (mapping,) = fixture.send("old", wire.AllocateKVCaches(1, LAYOUT, 4096))
        fixture.report(TensorsMapped(mapping.registration, "old"))
        fixture.fill("old")
        fixture.core.close_session("old")
        fixture.report(TensorsUnmapped(mapping.registration))
        if restarted:
            records, fixture = fixture.region_records, CoreFixture(registered=False)
            fixture.region_records = records
            fixture.core.restore_region(*records.found())
        fixture.core.open_session("new", hello, uid)
        (mapping,) = fixture.send("new", wire.AllocateKVCaches(1, LAYOUT, 4096))
        (reply,) = fixture.report(TensorsMapped(mapping.registration, "new"))
        assert reply.message.region.reattached is same_user
        fixture.report(BlocksVerified(engine_owner("a"), np.array([0, 1])))
        if same_user:
            fixture.start("new", 1, load(0, 1, hosts=(0,)))
        else:
            assert fixture.refused("new", 1, load(0, 1, hosts=(0,))) == Code.STALE


# Host blocks of four GPU blocks, whose groups have pages of these sizes.
WIDE, NARROW = 0, 1


def new_states(table: BlockTable, *pages: int) -> BlockStates:
    return BlockStates.for_layout(layout_of(*pages), table)


def layout_of(*pages: int) -> LayoutArrays:
    tensors = tuple(TensorLayout(8, page, page) for page in pages)
    groups = tuple((TensorRef(number, page),) for number, page in enumerate(pages))
    return LayoutArrays.from_layout(KVLayout(tensors, groups, 4))


def parts_of(*pages: int, group: int = WIDE, host: int = 0, first: int = 0, count: int = 4) -> Any:
    """`count` sub-blocks of a host block."""
    sizes = tuple(count * (each == group) for each in range(len(pages)))
    gpu = GPULoadStoreSpec(range(count), sizes, (first,) * len(pages))
    layout = BlockLayout(layout_of(*pages), 0, 2)
    return layout.resolve(Direction.STORE, gpu, np.array([host]))


def stored(states: BlockStates, serial: int, blocks: ResolvedBlocks) -> None:
    states.submit_store(serial, blocks)
    states.end_store(serial, blocks, done=True)


def test_a_host_block_belongs_to_the_page_size_that_was_stored_last() -> None:
    table, pages = BlockTable(2), (64, 32)
    states = new_states(table, *pages)
    wide, narrow = (parts_of(*pages, group=group, count=2) for group in (WIDE, NARROW))
    for serial, (own, other) in enumerate(((wide, narrow), (narrow, wide)), 1):
        stored(states, serial, own)
        assert states.required_stores(own) == ()
        with pytest.raises(Refused, match="host block 0 has no completed store"):
            states.required_stores(other)
    commit_all(table)
    restarted = next_table(table, 0)
    after = new_states(restarted, *pages)
    after.restore_blocks()  # the size is not recorded
    assert not restarted.lines.memory["committed"].any()
    with pytest.raises(Refused):
        after.required_stores(wide)


def test_of_a_block_with_gaps_the_longest_run_is_kept() -> None:
    table = BlockTable(2)
    states = new_states(table, 64)
    for serial, (first, count) in enumerate(((0, 1), (2, 2)), 1):
        stored(states, serial, parts_of(64, first=first, count=count))
    assert table.part(0) == (2, 4)
    states.required_stores(parts_of(64, count=1))
    commit_all(table)
    restarted = next_table(table, 0)
    after = new_states(restarted, 64)
    after.restore_blocks()
    after.mark_verified(np.array([0]))
    assert after.required_stores(parts_of(64, first=2, count=2)) == ()
    with pytest.raises(Refused):
        after.required_stores(parts_of(64, count=1))


def test_a_store_into_an_unverified_block_makes_the_rest_of_it_undefined() -> None:
    """The checksum is of the whole host block."""
    table = BlockTable(2)
    stored(new_states(table, 64), 1, parts_of(64))
    commit_all(table)
    states = new_states(restarted := next_table(table, 0), 64)
    states.restore_blocks()
    stored(states, 2, parts_of(64, count=1))
    states.mark_verified(np.array([0]))
    assert (restarted.part(0), states.required_stores(parts_of(64, count=1))) == ((0, 1), ())
    with pytest.raises(Refused, match="no completed store"):
        states.required_stores(parts_of(64, first=1, count=1))


def test_a_corrupt_block_that_is_being_stored_stays_pending() -> None:
    states = new_states(BlockTable(2), 64)
    states.submit_store(1, parts_of(64))
    states.discard_blocks(np.array([0]))
    assert states.required_stores(parts_of(64)) == (1,)
