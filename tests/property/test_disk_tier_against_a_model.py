"""The disk tier compared with a dictionary, with kills and lost hints at random points.

The tier is large enough for all keys, so it evicts none. A key of the dictionary must be found with
its bytes. Other keys must be missing, with one exception: a key that was dropped individually may
be found with its bytes after the hints were lost, because its slot still exists.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.tiers.disk_fixtures import KillableDisk
from kvferry.daemon.tiers.base import Result
from kvferry.daemon.tiers.disk.slot_table import Entry
from kvferry.testing.tier_subjects import PoolMemory

NAMESPACES = ("a" * 16, "b" * 16)
VERBS = (
    *("put", "put", "put", "fetch", "drop", "reset"),
    *("kill", "lose", "close", "maintain", "die", "die-inserted"),
)
OK, MISS = Result.OK, Result.MISS


class Killed(BaseException):
    pass


numbers = st.lists(st.integers(0, 11), min_size=1, max_size=6)
steps = st.lists(
    st.tuples(
        st.sampled_from(VERBS),
        st.sampled_from(NAMESPACES),
        numbers,
    ),
    max_size=25,
)


class DiskTierModel:
    def __init__(self, disk: KillableDisk) -> None:
        self.disk = disk
        self.stored: dict[str, set[int]] = {name: set() for name in NAMESPACES}
        # Keys that may be found or missing.
        self.uncertain: dict[str, set[int]] = {name: set() for name in NAMESPACES}
        self.dropped: dict[str, set[int]] = {name: set() for name in NAMESPACES}

    def run_step(self, step: tuple[str, str, list[int]]) -> None:
        verb, name, numbers = step
        disk = self.disk
        match verb:
            case "put":
                assert set(disk.put(numbers, name)) <= {OK, Result.PRESENT}
                self._record_stored(name, numbers)
            case "fetch":
                self.check(name, numbers)
            case "drop":
                disk.drop(numbers, name)
                self.stored[name] -= set(numbers)
                self.uncertain[name] -= set(numbers)
                self.dropped[name] |= set(numbers)
            case "reset":
                disk.drop(None, name)
                for keys in (self.stored, self.uncertain, self.dropped):
                    keys[name].clear()
            case "kill":
                disk.restart()
            case "lose":
                disk.lose_hints()
                for name in NAMESPACES:
                    self.uncertain[name] |= self.dropped[name] - self.stored[name]
                disk.open()
            case "close":
                disk.close()
                disk.open()
            case "maintain":
                disk.tier.maintain()
            case _:
                self._die(name, numbers, inserted=verb == "die-inserted")

    def _record_stored(self, name: str, numbers: list[int]) -> None:
        self.stored[name] |= set(numbers)
        self.uncertain[name] -= set(numbers)

    def _die(self, name: str, numbers: list[int], *, inserted: bool) -> None:
        """Kill it when the first new block is written, before or after that is inserted."""
        disk = self.disk
        disk.put(numbers[:1], name)  # this creates the store
        self._record_stored(name, numbers[:1])
        catalog = disk.tier._stores[name].catalog
        insert = catalog.insert

        def die(entry: Entry) -> None:
            number = int.from_bytes(entry.key[:8], "big")
            if inserted:
                insert(entry)
                self._record_stored(name, [number])
            else:  # its header may be found later
                self.dropped[name].add(number)
            raise Killed

        with pytest.MonkeyPatch.context() as patch, suppress(Killed):
            patch.setattr(catalog, "insert", die)
            disk.put(numbers, name)
        disk.restart()

    def check(self, name: str, numbers: list[int]) -> None:
        found = self.disk.contains(numbers, name)
        results = self.disk.fetch(numbers, name)  # compares the bytes
        for number, present, result in zip(numbers, found, results, strict=True):
            assert (result is OK) is present
            if number not in self.uncertain[name]:
                assert present is (number in self.stored[name]), number


@pytest.fixture(scope="module")
def pool() -> Iterator[PoolMemory]:
    pool = PoolMemory(4096)
    yield pool
    pool.files.close()


@given(steps)
@settings(max_examples=80)
def test_the_disk_tier_equals_the_dictionary(
    pool: PoolMemory, script: list[tuple[str, str, list[int]]]
) -> None:
    with tempfile.TemporaryDirectory() as root:
        disk = KillableDisk(pool, Path(root) / "tier")
        model = DiskTierModel(disk)
        try:
            for step in script:
                model.run_step(step)
            for name in NAMESPACES:
                model.check(name, list(range(12)))
            assert disk.usage().used_bytes <= disk.size
        finally:
            disk.kill()
