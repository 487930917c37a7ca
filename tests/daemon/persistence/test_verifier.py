"""The verifier reads all unverified blocks after a restart, the most recently used first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvferry.daemon.core.actions import BlocksCorrupted, BlocksVerified
from kvferry.daemon.persistence.block_check import BlockCheck
from kvferry.daemon.persistence.checksum_client import BATCH_BYTES, Purpose
from kvferry.daemon.persistence.verifier import Verifier
from kvferry.proto.status import VerificationStatus
from support.eventually import eventually

from .stored_pool import BLOCK, COUNT, KEYED, RAW, StoredPool, numbers, with_block_bytes


class VerifiedBlocks:
    """Records requests for checks. The test calls the callbacks."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, list[int]]] = []
        self.waiting: list[Callable[[], None]] = []

    def check_blocks(
        self, table: Any, blocks: Any, purpose: Purpose, done: Callable[[], None]
    ) -> None:
        assert purpose is Purpose.VERIFY
        self.requests.append((table.record.owner.kind, blocks.tolist()))
        self.waiting.append(done)
        table.mark_verified(blocks)


async def test_all_restored_blocks_are_verified_except_damaged_ones(pool: StoredPool) -> None:
    keyed, raw = pool.table(KEYED), pool.table(RAW)
    for table in (keyed, raw):
        pool.commit(table, *range(COUNT))
        table.mark_unverified(numbers(*range(COUNT)))
    pool.damage(raw, 7)
    verifier = Verifier(BlockCheck(pool.checksums, pool.reports.extend), 2)
    assert verifier.status is None
    verifier.start([keyed, raw])
    assert verifier.status == VerificationStatus(2 * COUNT * BLOCK, 0)
    await eventually(lambda: keyed.unverified is None and raw.unverified is None)
    assert verifier.status == VerificationStatus(2 * COUNT * BLOCK, 2 * COUNT * BLOCK)
    verified = sum(r.blocks.size for r in pool.reports if isinstance(r, BlocksVerified))
    (corrupted,) = (r for r in pool.reports if isinstance(r, BlocksCorrupted))
    assert verified == 2 * COUNT - 1
    assert (corrupted.owner, corrupted.blocks.tolist()) == (RAW.owner, [7])


async def test_the_most_recently_used_blocks_of_all_regions_are_verified_first(
    pool: StoredPool,
) -> None:
    keyed, raw = pool.table(KEYED), pool.table(RAW)
    for table, block in ((keyed, 1), (raw, 1), (raw, 5), (keyed, 9), (keyed, 3), (raw, 4)):
        pool.commit(table, block)
    keyed.touch(numbers(1))
    for table in (keyed, raw):
        table.mark_unverified(table.committed_blocks())
    checks = VerifiedBlocks()
    verifier = Verifier(checks, 100, range_blocks=2)  # type: ignore[arg-type]
    verifier.start([keyed, raw])
    assert checks.requests == [
        ("namespace", [1]),
        ("engine", [4]),
        ("namespace", [3, 9]),
        ("engine", [5, 1]),
    ]


async def test_batches_in_flight_are_bounded_and_overwritten_blocks_skipped(
    pool: StoredPool,
) -> None:
    table = pool.table(with_block_bytes(KEYED, BATCH_BYTES // 2))
    pool.commit(table, *reversed(range(8)))
    table.mark_unverified(table.committed_blocks())
    checks = VerifiedBlocks()
    verifier = Verifier(checks, 2)  # type: ignore[arg-type]
    verifier.start([table])
    assert [blocks for _, blocks in checks.requests] == [[7, 6], [5, 4]]
    table.invalidate(numbers(3, 1, 0))
    checks.waiting.pop(0)()
    assert checks.requests[2:] == [("namespace", [2])]
    assert verifier.status == VerificationStatus(4 * BATCH_BYTES, 4 * BATCH_BYTES)
    for done in tuple(checks.waiting):
        done()
    assert len(checks.requests) == 3


async def test_a_region_may_be_freed_before_its_verification(pool: StoredPool) -> None:
    keyed, raw = pool.table(KEYED), pool.table(RAW)
    for table in (keyed, raw):
        pool.commit(table, *range(COUNT))
        table.mark_unverified(numbers(*range(COUNT)))
    verifier = Verifier(BlockCheck(pool.checksums, pool.reports.extend), 1)
    verifier.start([keyed, raw])
    raw.close()
    await eventually(lambda: keyed.unverified is None)
    assert verifier.status == VerificationStatus(2 * COUNT * BLOCK, 2 * COUNT * BLOCK)
    assert {r.owner for r in pool.reports if isinstance(r, BlocksVerified)} == {KEYED.owner}
