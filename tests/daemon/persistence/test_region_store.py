"""The region store keeps the tables of regions for the next daemon. It finds committed stores."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from kvferry.daemon.core.actions import (
    BlocksCorrupted,
    BlockSet,
    CommitBlocks,
    CopyPlan,
    RegionCreated,
    RegionFreed,
    RegionUpdated,
    StartTransfer,
)
from kvferry.daemon.core.records import RecoveredRegion, RegionOwner, RegionRecord, ResidentBlock
from kvferry.daemon.core.tier_actions import BlocksCommitted
from kvferry.daemon.persistence.block_table import BlockTable
from kvferry.daemon.persistence.region_store import RegionStore
from kvferry.proto.errors import Code, Refused
from kvferry.proto.fingerprint import Fingerprint
from kvferry.proto.specs import Direction
from kvferry.proto.status import VerificationStatus
from kvferry.shm.memfd import sealed_memfd
from support.background import in_background
from support.eventually import eventually

from .stored_pool import BLOCK, COUNT, FINGERPRINT, KEYED, RAW, StoredPool, key, numbers


class KeptFds:
    """Keeps descriptors like a service manager."""

    def __init__(self) -> None:
        self.kept: dict[str, int] = {}

    def store_fd(self, name: str, descriptor: int) -> None:
        self.kept[name] = os.dup(descriptor)

    def remove_fd(self, name: str) -> None:
        os.close(self.kept.pop(name))


class StoreFixture:
    def __init__(self, pool: StoredPool, fds: KeptFds, scrub_rate: int = 0) -> None:
        self.pool, self.fds = pool, fds
        self.store = RegionStore(pool.checksums, fds, pool.reports.extend, scrub_rate)
        self.serial = 0

    def start(
        self,
        blocks: list[int],
        keys: list[int] | None = None,
        *,
        owner: RegionOwner = KEYED.owner,
        direction: Direction = Direction.STORE,
    ) -> StartTransfer:
        self.serial += 1
        plan = CopyPlan(self.serial, 1, direction, (), 0, 0, 0, 0)
        names = tuple(map(key, keys or ()))
        start = StartTransfer(plan, "a", self.serial, BlockSet(owner, numbers(*blocks), names))
        self.store.invalidate_blocks(start)
        self.store.touch_blocks(start)
        return start

    def end(self, start: StartTransfer, *, done: bool = True, **parts: tuple[int, int]) -> None:
        block_set = start.block_set
        part_of = {int(name[1:]): part for name, part in parts.items()}
        if done:
            stored = BlockSet(block_set.owner, block_set.blocks, block_set.keys, part_of)
            self.store.commit_store(CommitBlocks(start.plan.serial, stored))
        self.store.end_store(start.plan.serial)

    async def read_residents(self, name: str = "block-table-1") -> tuple[ResidentBlock, ...]:
        """The residents that another daemon reads, after all commits."""
        await eventually(lambda: not self.store.busy)
        table = BlockTable(os.dup(self.fds.kept[name]))
        residents = table.residents()
        table.close()
        return residents


@pytest.fixture
async def fixture(make_pool: Callable[[], StoredPool]) -> AsyncIterator[StoreFixture]:
    """A store that runs, with one region."""
    fixture = StoreFixture(make_pool(), KeptFds())
    fixture.store.apply_change(RegionCreated(KEYED))
    async with in_background(fixture.store.run()):
        yield fixture
    fixture.store.close()


async def test_stores_are_found_in_the_order_of_their_start(fixture: StoreFixture) -> None:
    first, second = fixture.start([3, 4], [1, 2]), fixture.start([7], [3])
    fixture.end(second)
    fixture.end(first)
    load = fixture.start([4], direction=Direction.LOAD)
    fixture.end(load)
    expected = (ResidentBlock(3, key(1)), ResidentBlock(7, key(3)), ResidentBlock(4, key(2)))
    assert await fixture.read_residents() == expected


async def test_blocks_by_number_are_found_with_their_stored_part(
    fixture: StoreFixture,
) -> None:
    fixture.store.apply_change(RegionCreated(RAW))
    fixture.end(fixture.start([5, 2], owner=RAW.owner), b5=(0, 3))
    assert await fixture.read_residents("block-table-2") == (
        ResidentBlock(2, b""),
        ResidentBlock(5, b"", (0, 3)),
    )
    fixture.end(fixture.start([5], owner=RAW.owner))
    assert await fixture.read_residents("block-table-2") == (
        ResidentBlock(2, b""),
        ResidentBlock(5, b""),
    )


async def test_a_commit_may_have_fewer_blocks_than_the_store_in_another_order(
    fixture: StoreFixture,
) -> None:
    start = fixture.start([9, 3, 6], [9, 3, 6])
    overwriting = fixture.start([3], [3])
    block_set = BlockSet(KEYED.owner, numbers(3, 9), (key(3), key(9)))
    fixture.store.commit_store(CommitBlocks(start.plan.serial, block_set))
    fixture.store.end_store(start.plan.serial)
    fixture.end(overwriting, done=False)
    assert await fixture.read_residents() == (ResidentBlock(9, key(9)),)


async def test_only_checksums_of_committed_blocks_are_valid(fixture: StoreFixture) -> None:
    fixture.end(fixture.start([1, 2], [1, 2]))
    await eventually(lambda: not fixture.store.busy)
    checksums, valid = fixture.store.checksums_of(KEYED.owner, numbers(2, 5, 1))
    assert valid.tolist() == [True, False, True]
    overwriting = fixture.start([2], [3])
    after, valid = fixture.store.checksums_of(KEYED.owner, numbers(2, 5, 1))
    assert valid.tolist() == [False, False, True]
    assert after[2] == checksums[2] != 0
    fixture.end(overwriting, done=False)
    assert not fixture.store.checksums_of(RAW.owner, numbers(1))[1].any()


async def test_a_store_that_was_not_committed_is_not_found(fixture: StoreFixture) -> None:
    fixture.end(fixture.start([1, 2], [1, 2]))
    overwriting = fixture.start([2], [3])
    assert await fixture.read_residents() == (ResidentBlock(1, key(1)),)
    fixture.end(overwriting, done=False)
    fixture.store.commit_store(CommitBlocks(overwriting.plan.serial, overwriting.block_set))
    assert await fixture.read_residents() == (ResidentBlock(1, key(1)),)
    assert not fixture.store._stores


async def test_a_wipe_includes_stores_that_are_not_committed_yet(fixture: StoreFixture) -> None:
    fixture.end(fixture.start([1], [1]))
    late_store = fixture.start([2], [2])
    fixture.store.apply_change(RegionUpdated(KEYED, wipe=True))
    fixture.end(late_store)
    assert await fixture.read_residents() == ()
    fixture.end(fixture.start([1], [3]))
    assert await fixture.read_residents() == (ResidentBlock(1, key(3)),)


async def test_a_freed_region_is_removed_from_the_store(fixture: StoreFixture) -> None:
    fixture.end(fixture.start([1], [1]))
    late_store = fixture.start([2], [2])
    other = os.dup(fixture.fds.kept["block-table-1"])
    (table,) = fixture.store._all_tables()
    fixture.store.apply_change(RegionFreed(KEYED.owner))
    fixture.end(late_store)
    assert fixture.fds.kept == {}
    assert table.closed
    with pytest.raises(Refused):
        BlockTable(other)  # the table is void for other copies of the descriptor
    fixture.store.apply_change(RegionFreed(KEYED.owner))
    fixture.store.apply_change(RegionCreated(KEYED))
    assert list(fixture.fds.kept) == ["block-table-2"]


async def test_the_next_daemon_verifies_valid_tables_and_drops_others(
    fixture: StoreFixture, make_pool: Callable[[], StoredPool]
) -> None:
    fixture.end(fixture.start([1], [1]))
    fixture.store.apply_change(RegionCreated(RAW))
    fixture.end(fixture.start([4], owner=RAW.owner))
    assert await fixture.read_residents()
    junk = os.memfd_create("junk")
    fixture.fds.kept["block-table-7"] = junk
    longer = sealed_memfd("longer", os.fstat(fixture.fds.kept["block-table-1"]).st_size + 1)
    os.pwrite(longer, os.pread(fixture.fds.kept["block-table-1"], 1 << 24, 0), 0)
    fixture.fds.kept["block-table-8"] = longer
    kept = {name: os.dup(descriptor) for name, descriptor in fixture.fds.kept.items()}
    successor = StoreFixture(make_pool(), fixture.fds)
    assert successor.store.verification is None
    found: list[RecoveredRegion] = []
    successor.store.restore_regions(kept, found.append)
    assert found == [
        RecoveredRegion(KEYED, (ResidentBlock(1, key(1)),)),
        RecoveredRegion(RAW, (ResidentBlock(4, b""),)),
    ]
    assert list(fixture.fds.kept) == ["block-table-1", "block-table-2"]
    assert successor.store.verification == VerificationStatus(2 * BLOCK, 0)
    async with in_background(successor.store.run()):
        await eventually(lambda: len(successor.pool.reports) == 2)
    assert successor.store.verification == VerificationStatus(2 * BLOCK, 2 * BLOCK)

    def refuse(found: RecoveredRegion) -> None:
        raise Refused(Code.POOL_FULL, "no room", found.record.name)

    kept = {name: os.dup(descriptor) for name, descriptor in fixture.fds.kept.items()}
    other = StoreFixture(make_pool(), fixture.fds)
    other.store.restore_regions(kept, refuse)
    assert fixture.fds.kept == {}
    assert other.store._all_tables() == []
    successor.store.close()


async def test_the_next_daemon_restores_the_oldest_first_and_reuses_no_name(
    make_pool: Callable[[], StoredPool],
) -> None:
    fds = KeptFds()
    names = {"block-table-10": "b", "block-table-9": "a"}
    for name, model in names.items():
        fingerprint = Fingerprint(model, BLOCK, key_bytes=8)
        table = BlockTable.create(RegionRecord(model, 0, COUNT * BLOCK, fingerprint=fingerprint))
        fds.store_fd(name, table.descriptor)
        table.close()
    successor = StoreFixture(make_pool(), fds)
    found: list[RecoveredRegion] = []
    successor.store.restore_regions({name: os.dup(fds.kept[name]) for name in names}, found.append)
    assert [region.record.name for region in found] == ["a", "b"]
    successor.store.apply_change(RegionCreated(KEYED))
    assert list(fds.kept) == [*names, "block-table-11"]
    successor.store.close()


async def test_a_region_without_a_table_works_but_is_not_kept(
    fixture: StoreFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> BlockTable:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(BlockTable, "create", fail)
    fixture.store.apply_change(RegionCreated(RAW))
    fixture.store.apply_change(RegionUpdated(RAW, wipe=True))
    fixture.end(fixture.start([1], owner=RAW.owner))
    fixture.store.apply_change(RegionFreed(RAW.owner))
    assert not fixture.store.busy
    assert list(fixture.fds.kept) == ["block-table-1"]


async def test_a_region_whose_record_becomes_too_long_is_not_kept(fixture: StoreFixture) -> None:
    pages = ((1 << 60,) * (1 << 18),)
    longer = RegionRecord(KEYED.name, 0, KEYED.nbytes, fingerprint=FINGERPRINT, pages=pages)
    fixture.store.apply_change(RegionUpdated(longer))
    assert fixture.fds.kept == {}
    fixture.end(fixture.start([1], [1]))
    assert not fixture.store.busy


async def test_the_scrub_reads_committed_blocks(make_pool: Callable[[], StoredPool]) -> None:
    fixture = StoreFixture(make_pool(), KeptFds(), scrub_rate=1 << 30)
    fixture.store.apply_change(RegionCreated(KEYED))
    reports = fixture.pool.reports
    async with in_background(fixture.store.run()):
        fixture.end(fixture.start([3], [3]))
        await eventually(lambda: not fixture.store.busy)
        (committed,) = reports
        assert isinstance(committed, BlocksCommitted)
        assert (committed.owner, committed.keys) == (KEYED.owner, (key(3),))
        fixture.pool.damage(fixture.store._all_tables()[0], 3)
        await eventually(lambda: len(reports) > 1)
    fixture.store.close()
    assert isinstance(reports[1], BlocksCorrupted)
    assert reports[1].blocks.tolist() == committed.blocks.tolist() == [3]
