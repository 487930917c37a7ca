"""The region store keeps the tables of regions for the next daemon. It finds committed stores."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvferry.daemon.core.actions import (
    BlocksCorrupted,
    RegionCreated,
    RegionFreed,
    RegionUpdated,
)
from kvferry.daemon.core.block_table import UNVERIFIED
from kvferry.daemon.core.records import RecoveredRegion, RegionRecord
from kvferry.daemon.core.region import Region
from kvferry.daemon.persistence.region_store import RegionStore
from kvferry.daemon.persistence.table_file import TableFile
from kvferry.proto.errors import Code, Refused
from kvferry.proto.fingerprint import Fingerprint
from kvferry.proto.status import VerificationStatus
from kvferry.shm.memfd import sealed_memfd
from support.background import in_background
from support.committed_blocks import ResidentBlock, residents_of
from support.eventually import eventually
from support.old_table import old_table

from .fd_stores import KeptFds
from .stored_pool import (
    BLOCK,
    COUNT,
    FINGERPRINT,
    KEYED,
    RAW,
    StoredPool,
    key,
    overwrite,
)

pytestmark = pytest.mark.virtual_time


class StoreFixture:
    def __init__(self, pool: StoredPool, fds: KeptFds, scrub_rate: int = 0) -> None:
        self.pool, self.fds = pool, fds
        self.store = RegionStore(pool.client, fds, pool.report, scrub_rate)

    def create(self, record: RegionRecord) -> Region:
        region = self.pool.new_region(record)
        self.store.apply_change(RegionCreated(record, region))
        return region

    def restore(self, found: RecoveredRegion) -> Region:
        """Restore a region as the core does."""
        region = Region(
            found.record.owner,
            found.record.contents,
            found.record.start,
            found.record.nbytes,
            memory=found.lines,
        )
        region.table.restore(1)
        self.pool.regions.append(region)
        return region

    def complete_store(self, region: Region, blocks: list[int], keys: list[int] = []) -> None:  # noqa: B006
        region.table.set_stored(overwrite(region, *blocks), tuple(map(key, keys)))
        self.store.wake_up()

    async def read_residents(self, name: str = "block-table-1") -> tuple[ResidentBlock, ...]:
        """The residents that another daemon reads, after all commits."""
        await eventually(lambda: not self.store.busy)
        file = TableFile(os.dup(self.fds.kept[name]))
        file.close()
        return residents_of(file.lines)


@pytest.fixture
async def fixture() -> AsyncIterator[StoreFixture]:
    """A store that runs."""
    fixture = StoreFixture(StoredPool(), KeptFds())
    async with in_background(fixture.store.run()):
        yield fixture
    fixture.store.close()


async def test_completed_stores_are_committed_for_the_next_daemon(fixture: StoreFixture) -> None:
    keyed, raw = fixture.create(KEYED), fixture.create(RAW)
    fixture.complete_store(keyed, [4, 3], [1, 2])
    fixture.complete_store(raw, [5])
    overwrite(raw, 6)
    assert fixture.store.busy
    expected = (ResidentBlock(3, key(2)), ResidentBlock(4, key(1)))
    assert await fixture.read_residents() == expected
    assert await fixture.read_residents("block-table-2") == (ResidentBlock(5, b"\0"),)


async def test_a_freed_region_is_removed_from_the_store(fixture: StoreFixture) -> None:
    region = fixture.create(KEYED)
    other = os.dup(fixture.fds.kept["block-table-1"])
    fixture.store.apply_change(RegionFreed(KEYED.owner))
    fixture.complete_store(region, [1], [1])  # its memory is still mapped
    assert fixture.fds.kept == {}
    assert not fixture.store.busy
    with pytest.raises(Refused):
        TableFile(other)  # the table is void for other copies of the descriptor
    fixture.store.apply_change(RegionFreed(KEYED.owner))
    fixture.create(KEYED)
    assert list(fixture.fds.kept) == ["block-table-2"]


async def test_the_next_daemon_verifies_valid_tables_and_drops_others(
    fixture: StoreFixture,
) -> None:
    fixture.complete_store(fixture.create(KEYED), [1], [1])
    fixture.complete_store(fixture.create(RAW), [4])
    assert await fixture.read_residents()
    junk = os.memfd_create("junk")
    fixture.fds.kept["block-table-7"] = junk
    longer = sealed_memfd("longer", os.fstat(fixture.fds.kept["block-table-1"]).st_size + 1)
    os.pwrite(longer, os.pread(fixture.fds.kept["block-table-1"], 1 << 24, 0), 0)
    fixture.fds.kept["block-table-8"] = longer
    kept = fixture.fds.copies()
    successor = StoreFixture(StoredPool(), fixture.fds)
    assert successor.store.verification is None
    found: list[RecoveredRegion] = []

    def restore(region: RecoveredRegion) -> Region:
        found.append(region)
        return successor.restore(region)

    successor.store.restore_regions(kept, restore)
    assert [each.record for each in found] == [KEYED, RAW]
    unverified = [each.table.find(UNVERIFIED).tolist() for each in successor.pool.regions]
    assert unverified == [[1], [4]]
    assert list(fixture.fds.kept) == ["block-table-1", "block-table-2"]
    assert successor.store.verification == VerificationStatus(2 * BLOCK, 0)
    async with in_background(successor.store.run()):
        await eventually(lambda: len(successor.pool.reports) == 2)
    assert successor.store.verification == VerificationStatus(2 * BLOCK, 2 * BLOCK)

    def refuse(found: RecoveredRegion) -> Region:
        raise Refused(Code.POOL_FULL, "no room", found.record.name)

    kept = fixture.fds.copies()
    other = StoreFixture(StoredPool(), fixture.fds)
    other.store.restore_regions(kept, refuse)
    assert fixture.fds.kept == {}
    assert other.store._regions() == []
    successor.store.close()


async def test_the_next_daemon_restores_the_oldest_first_and_reuses_no_name() -> None:
    fds = KeptFds()
    names = {"block-table-10": "b", "block-table-9": "a"}
    for name, model in names.items():
        fingerprint = Fingerprint(model, BLOCK, key_bytes=8)
        file = TableFile.create(RegionRecord(model, 0, COUNT * BLOCK, fingerprint=fingerprint))
        fds.store_fd(name, file.descriptor)
        file.close()
    successor = StoreFixture(StoredPool(), fds)
    successor.store.restore_regions(fds.copies(), successor.restore)
    assert [region.owner.name for region in successor.pool.regions] == ["a", "b"]
    successor.create(KEYED)
    assert list(fds.kept) == [*names, "block-table-11"]
    successor.store.close()


async def test_a_table_of_the_format_before_is_restored_and_stored_again() -> None:
    fds = KeptFds()
    fds.kept["block-table-3"] = old_table(KEYED, {2: (9, 77, (0, 0), 5, True, key(2))})
    kept = fds.copies()
    successor = StoreFixture(StoredPool(), fds)
    successor.store.restore_regions(kept, successor.restore)
    (region,) = successor.pool.regions
    assert region.table.find(UNVERIFIED).tolist() == [2]
    assert list(fds.kept) == ["block-table-3"]
    file = TableFile(os.dup(fds.kept["block-table-3"]))
    assert residents_of(file.lines) == (ResidentBlock(2, key(2)),)
    file.close()
    successor.store.close()


async def test_a_region_without_a_table_works_but_is_not_kept(
    fixture: StoreFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> TableFile:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(TableFile, "create", fail)
    region = fixture.create(RAW)
    fixture.store.apply_change(RegionUpdated(RAW))
    fixture.complete_store(region, [1])
    fixture.store.apply_change(RegionFreed(RAW.owner))
    assert not fixture.store.busy
    assert fixture.fds.kept == {}


async def test_a_region_whose_record_becomes_too_long_is_not_kept(fixture: StoreFixture) -> None:
    pages = ((1 << 60,) * (1 << 18),)
    longer = RegionRecord(KEYED.name, 0, KEYED.nbytes, fingerprint=FINGERPRINT, pages=pages)
    region = fixture.create(KEYED)
    fixture.store.apply_change(RegionUpdated(longer))
    assert fixture.fds.kept == {}
    fixture.complete_store(region, [1], [1])
    assert not fixture.store.busy


async def test_the_scrub_reads_committed_blocks() -> None:
    fixture = StoreFixture(StoredPool(), KeptFds(), scrub_rate=1 << 30)
    region, reports = fixture.create(KEYED), fixture.pool.reports
    async with in_background(fixture.store.run()):
        fixture.complete_store(region, [3, 4], [3, 4])
        await eventually(lambda: not fixture.store.busy)
    fixture.pool.damage(region, 3)
    async with in_background(fixture.store.run()):  # a new round begins
        await eventually(lambda: reports)
    fixture.store.close()
    (report,) = reports
    assert isinstance(report, BlocksCorrupted)
    assert report.blocks.tolist() == [3]
