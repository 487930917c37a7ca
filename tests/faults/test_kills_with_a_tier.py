"""SIGKILL of daemons with a disk tier, under load. Half of them lose their pool and the hints.

Written blocks are found again with their bytes. Blocks from before a reset are not found.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvferry.testing.engine import until
from support.daemon_invariants import check_released
from support.disk_tier_files import lose_hints
from support.restarting_daemons import RestartingDaemons
from support.tier_ledger import BATCH, TierLedger
from support.time_limits import PROMPTLY
from support.traffic_processes import TrafficProcesses, mixed_engines
from support.traffic_statistics import summary

pytestmark = pytest.mark.timeout(3600)

POOL_BYTES = 32 << 20
# Maximum of rounds between two resets, so that all written blocks fit into the tier.
MAX_ROUNDS = 5


def work(ledger: TierLedger, rng: random.Random) -> None:
    """Store and promote, so that some of it is in progress at the kill.

    A checksum follows a store within 0.2 s, and the write follows the checksum.
    """
    for _ in range(rng.randrange(1, 10)):
        ledger.store(BATCH)
        start = rng.randrange(len(ledger.stored))
        ledger.prefetch(ledger.stored[start : start + BATCH])
        time.sleep(rng.choice((0.0, 0.0, 0.3)) * rng.random())
    time.sleep(0.3 * rng.random())


def test_daemons(
    start_traffic: Callable[[Path], TrafficProcesses],
    short_path: Path,
    tmp_path: Path,
    device: str,
    rng: random.Random,
    long: bool,
) -> None:
    """100 kills (6 in the short form), while four other engines store and load."""
    root, rounds = tmp_path / "tier", 100 if long else 6
    ledger = TierLedger(root)
    written = found = resets = since_reset = 0
    others_count = others_found_count = 0
    with RestartingDaemons(
        device,
        short_path,
        kept=True,
        pool_bytes=POOL_BYTES,
        tiers_disk_path=root,
        tiers_disk_size="256MiB",
        tiers_disk_write="write_through",
        reference_stall=0.002,
    ) as daemons:
        traffic = start_traffic(daemons.directory)
        engines = mixed_engines(device, rng, job_timeout=PROMPTLY, prefetches=0.3, resets=0.0005)
        traffic.start(*engines)
        for number in range(rounds):
            ledger.connect(daemons.directory)
            ledger.store_and_write(4 * BATCH)
            work(ledger, rng)
            known = ledger.written()
            others = [n for n in ledger.stored if n not in known]
            since_reset += 1
            reset = since_reset == MAX_ROUNDS or rng.random() < 0.2
            if reset:
                old = list(ledger.stored)
                ledger.reset()
            daemons.kill()
            ledger.close()
            if number % 2:
                daemons.lose_pool()
                lose_hints(root)
            daemons.start()
            ledger.connect(daemons.directory)
            if reset:
                resets, since_reset = resets + 1, 0
                until(lambda: not ledger.directories())
                assert not ledger.search(old)
                continue
            others_found = ledger.search(others)  # some are in the pool, if that was kept
            lost = known - ledger.search_until_found(sorted(known))
            others_found |= ledger.search(others)
            written, found = written + len(known), found + len(known) - len(lost)
            others_count += len(others)
            others_found_count += len(others_found)
            assert not ledger.errors, "\n".join(ledger.errors)
            assert ledger.tier().checksum_failures == 0
            if lost:
                print(f"round {number}: not found: {sorted(lost)}; {ledger.tier()}")
        ledger.close()
        total = traffic.stop()
        check_released(daemons.directory)
        print(
            f"{rounds} kills, {resets} right after a reset: {found} of {written} written blocks "
            f"found, and {others_found_count} of {others_count} that were not written yet; "
            f"{ledger.compared} blocks compared, 0 wrong"
        )
        print(summary(total))
        assert not total.errors, "\n".join(total.errors)
        assert total.counts["prefetches"] > 0
        _, traceback, text = daemons.log().partition("Traceback")
        assert not traceback, text[:3000]
        assert found >= 0.99 * written > 0
