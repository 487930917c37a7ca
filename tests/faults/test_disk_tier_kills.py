"""SIGKILL of a disk tier's process at random moments, during puts, drops and evictions.

Never wrong bytes, no key whose drop was confirmed, and every key that was put if there is room.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.daemon.core.store_name import StoreName
from kvferry.daemon.tiers.base import IN_TIER, Result
from kvferry.testing.tier_subjects import (
    NAMESPACE,
    CallOutcome,
    PoolMemory,
    ProcessSubject,
    content_of,
    key_of,
)
from support.disk_tier_process import BLOCK, disk_process

NAMES = NAMESPACE, "b" * 16
# Keys of a namespace until it is dropped, and of one put.
KEYS, BATCH = 96, 32
# Room for all keys, and for half of them.
ROOMY, SMALL = 32 << 20, 1 << 20


@pytest.fixture
def pool() -> Iterator[PoolMemory]:
    pool = PoolMemory(BLOCK)
    yield pool
    pool.files.close()


class KilledTier:
    """A tier, and the keys that it must have after its process was killed.

    Each drop of a namespace's store begins another epoch, with another store and other keys.
    """

    def __init__(self, tier: ProcessSubject, rng: random.Random) -> None:
        self._tier, self._random = tier, rng
        self._epochs = dict.fromkeys(NAMES, 0)
        # Keys whose last operation was confirmed: a put, or a drop.
        self._stored: dict[str, set[int]] = {name: set() for name in NAMES}
        self._dropped: dict[str, set[int]] = {name: set() for name in NAMES}
        self.counts = Counter[str]()

    def run_until_killed(self) -> None:
        pid = self._tier.client.pid
        assert pid is not None
        kill = threading.Timer(0.2 * self._random.random(), os.kill, (pid, signal.SIGKILL))
        kill.start()
        while self._tier.client.pid == pid and self._tier.client.is_on:
            self._run_step()
        kill.join()
        self._tier.wait_until(lambda: self._tier.client.pid not in (None, pid))
        self._tier.wait_until(lambda: self._tier.client.is_on)

    def check(self, *, roomy: bool) -> None:
        """roomy: so that the tier must have what was put."""
        for name in NAMES:
            keys = self._keys(name)
            results = [result for at in range(0, KEYS, 16) for result in self._fetch(name, at)]
            found = {key for key, result in zip(keys, results, strict=True) if result is Result.OK}
            assert set(results) <= {Result.OK, Result.MISS, Result.CORRUPT}
            assert not found & self._dropped[name], "dropped, and found"
            if self._epochs[name]:
                before = range(keys.start - KEYS, keys.start)
                assert not any(self._tier.contains(before, self._store(name))), "of before"
            missing = self._stored[name] - found
            assert not (roomy and missing), f"stored, and not found: {missing}"
            self.counts["stored"] += len(self._stored[name])
            self.counts["found of them"] += len(self._stored[name] & found)
            self.counts["dropped"] += len(self._dropped[name])

    def _fetch(self, name: str, at: int) -> list[Result]:
        """Also compares the bytes."""
        return self._tier.fetch(self._keys(name)[at : at + 16], self._store(name))

    def _keys(self, name: str) -> range:
        return range(KEYS * self._epochs[name], KEYS * (self._epochs[name] + 1))

    def _store(self, name: str) -> str:
        return str(StoreName(name, "c" * 16, self._epochs[name]))

    def _run_step(self) -> None:
        name, rng = self._random.choice(NAMES), self._random
        numbers = rng.sample(self._keys(name), BATCH)
        match rng.choice(("put", "put", "put", "drop", "drop", "reset")):
            case "put":
                results = self._put(numbers, name)
                self._dropped[name] -= set(numbers)
                self._stored[name] -= set(numbers)
                self._stored[name] |= {number for number in numbers if results[number] in IN_TIER}
            case "drop":
                names = [key_of(number) for number in numbers]
                reply = self._tier.begin_drop(names, self._store(name))
                self._tier.wait_until(reply.done)
                self._stored[name] -= set(numbers)
                # A drop that a kill ends may or may not have happened.
                self._dropped[name] |= set() if reply.exception() else set(numbers)
            case _ if rng.random() < 0.2:
                self._tier.drop(None, self._store(name))
                self._epochs[name] += 1
                self._stored[name].clear()
                self._dropped[name].clear()
        self.counts["steps"] += 1

    def _put(self, numbers: list[int], name: str) -> dict[int, Result]:
        """Put keys in 8 requests at once. Those that a kill ends are misses."""
        tier, puts = self._tier, list[tuple[list[int], CallOutcome]]()
        for place, number in enumerate(numbers):
            tier.pool.block(place)[:] = content_of(number, BLOCK)
        for at in range(0, BATCH, 4):
            part = numbers[at : at + 4]
            keys = [key_of(number) for number in part]
            sums = [tier.pool.checksum(at + n, key) for n, key in enumerate(keys)]
            put = tier.begin_put(tier.blocks(self._store(name), keys, range(at, at + 4)), sums)
            puts.append((part, put))
        tier.wait_until(lambda: all(put.released is not None for _, put in puts))
        return {
            number: result
            for part, put in puts
            for number, result in zip(part, put.results or (), strict=True)
        }


@pytest.mark.parametrize("size", [ROOMY, SMALL], ids=["roomy", "small"])
def test_kills_at_random(
    pool: PoolMemory, tmp_path: Path, long: bool, seed: int, size: int
) -> None:
    """100 kills (6 in the short form)."""
    rounds = 100 if long else 6
    with disk_process(tmp_path / "tier", pool, size) as tier:
        killed = KilledTier(tier, random.Random(seed))
        for _ in range(rounds):
            killed.run_until_killed()
            killed.check(roomy=size == ROOMY)
    print(f"{rounds} kills; {dict(killed.counts)}")
    assert killed.counts["found of them"] > 0
    evicted = killed.counts["stored"] - killed.counts["found of them"]
    assert evicted > 0 or size == ROOMY
