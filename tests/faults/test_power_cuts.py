"""The disk tier after power cuts: each page that was not synced may be lost, alone.

Never wrong bytes; no key of a namespace whose drop was confirmed; every key that was synced.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from daemon.tiers.disk_fixtures import KillableDisk
from kvferry.daemon.tiers.base import IN_TIER, Result
from kvferry.testing.tier_subjects import NAMESPACE, PoolMemory
from support.power_cuts import PowerCuts

NAMES = NAMESPACE, "b" * 16
# Blocks fill a small tier, so that keys are evicted and slabs given up.
SIZES = 300 << 10, 2 << 20
KEYS, STEPS, CUTS = 48, 20, 4


@pytest.fixture(scope="module")
def pool() -> Iterator[PoolMemory]:
    pool = PoolMemory(4096)
    yield pool
    pool.files.close()


class CutDisk:
    """A tier whose power is cut now and then, and what must be found in it.

    Each drop of a namespace begins another epoch of its keys, so that keys from before are known.
    """

    def __init__(self, disk: KillableDisk, cuts: PowerCuts, rng: random.Random) -> None:
        self.disk, self.cuts, self._random = disk, cuts, rng
        self._epochs = dict.fromkeys(NAMES, 0)
        # Keys that must be found, by namespace: those that were in the tier when it was synced.
        self._synced: dict[str, set[int]] = {name: set() for name in NAMES}
        self.outcomes = Counter[Result]()

    def run_step(self) -> None:
        name, rng = self._random.choice(NAMES), self._random
        numbers = rng.sample(self._keys(name), rng.randrange(1, 6))
        match rng.choice(("put", "put", "put", "fetch", "drop", "sync", "reset")):
            case "put":
                results = self.disk.put(numbers, name)
                written = {n for n, r in zip(numbers, results, strict=True) if r is Result.OK}
                self._synced[name] -= written
                assert set(results) <= {*IN_TIER, Result.FULL}
            case "fetch":
                self.outcomes.update(self.disk.fetch(numbers, name))
            case "drop":
                self.disk.drop(numbers, name)
                self._synced[name] -= set(numbers)
            case "sync":
                self.disk.tier._synced = float("-inf")
                self.disk.tier.maintain()
                self._synced = {name: self._present(name) for name in NAMES}
            case _ if rng.random() < 0.3:
                self.disk.drop(None, name)
                self._epochs[name] += 1
                self._synced[name].clear()

    def cut(self) -> None:
        expected = {name: self._synced[name] & self._present(name) for name in NAMES}
        self.disk.kill()
        self.cuts.cut()
        with self.cuts.recorded():
            self.disk.open()
        for name in NAMES:
            keys = self._keys(name)
            results = dict(zip(keys, self._fetch_all(keys, name), strict=True))
            missing = {n for n in expected[name] if results[n] is not Result.OK}
            assert not missing, f"synced, and not found: {missing}"
            self.outcomes.update(results.values())
            # As the tier's process does.
            self.disk.drop([n for n in keys if results[n] is Result.CORRUPT], name)
            before = range(KEYS * self._epochs[name])
            assert not any(self.disk.contains(before, name)), "dropped, and found"
        self._synced = {name: set() for name in NAMES}

    def _keys(self, name: str) -> range:
        return range(KEYS * self._epochs[name], KEYS * (self._epochs[name] + 1))

    def _present(self, name: str) -> set[int]:
        keys = self._keys(name)
        return {n for n, found in zip(keys, self.disk.contains(keys, name), strict=True) if found}

    def _fetch_all(self, keys: range, name: str) -> list[Result]:
        """Also compares the bytes."""
        batches = [keys[at : at + 16] for at in range(0, len(keys), 16)]
        return [result for batch in batches for result in self.disk.fetch(batch, name)]


@pytest.mark.parametrize("size", SIZES)
def test_power_cuts(pool: PoolMemory, tmp_path: Path, long: bool, seed: int, size: int) -> None:
    """300 runs with four cuts each (20 in the short form)."""
    outcomes, lost, undone, evicted = Counter[Result](), 0, 0, 0
    for number in range(300 if long else 20):
        rng = random.Random(f"{seed} {number}")
        cuts = PowerCuts(rng.getrandbits(32))
        with cuts.recorded():
            disk = KillableDisk(pool, tmp_path / f"{number}", size)
        cut_disk = CutDisk(disk, cuts, rng)
        for _ in range(CUTS):
            with cuts.recorded():
                for _ in range(rng.randrange(STEPS)):
                    cut_disk.run_step()
            evicted += disk.usage().evictions
            cut_disk.cut()
        disk.close()
        outcomes, lost = outcomes + cut_disk.outcomes, lost + cuts.lost
        undone += cuts.undone
    print(f"{lost} pages lost, {undone} renames undone, {evicted} evictions; {dict(outcomes)}")
    assert set(outcomes) <= {Result.OK, Result.MISS, Result.CORRUPT}
    assert lost > 100
    assert outcomes[Result.CORRUPT] > 0
    assert outcomes[Result.OK] > 0
    assert evicted > 0 or size == SIZES[1]
