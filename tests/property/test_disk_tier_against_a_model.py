"""The disk tier against a dict, with kills and power cuts at any point.

The tier is large enough for all keys, so that none is evicted: what the dict has must be found,
with its bytes. What it does not have must be missing, with one exception: a key that was dropped by
itself may be found again when the index is rebuilt, because its slot is still there; with its
bytes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.tiers.disk_fixtures import KillableDisk
from kvferry.daemon.tiers.base import Result
from kvferry.testing.tier_subjects import PoolMemory

NAMESPACES = ("a" * 16, "b" * 16)
VERBS = (
    *("put", "put", "put", "fetch", "drop", "reset"),
    *("kill", "cut", "close", "maintain", "die", "die-committed"),
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


class Model:
    def __init__(self, disk: KillableDisk) -> None:
        self.disk = disk
        self.stored: dict[str, set[int]] = {name: set() for name in NAMESPACES}
        # Keys that may be found or not.
        self.unsure: dict[str, set[int]] = {name: set() for name in NAMESPACES}
        self.dropped: dict[str, set[int]] = {name: set() for name in NAMESPACES}

    def take(self, step: tuple[str, str, list[int]]) -> None:
        verb, name, some = step
        disk = self.disk
        match verb:
            case "put":
                assert set(disk.put(some, name)) <= {OK, Result.PRESENT}
                self._note_stored(name, some)
            case "fetch":
                self.check(name, some)
            case "drop":
                disk.drop(some, name)
                self.stored[name] -= set(some)
                self.unsure[name] -= set(some)
                self.dropped[name] |= set(some)
            case "reset":
                disk.drop(None, name)
                for keys in (self.stored, self.unsure, self.dropped):
                    keys[name].clear()
            case "kill":
                disk.kill()
                self._open()
            case "cut":
                disk.cut_power()
                self._open()
            case "close":
                disk.close()
                self._open()
            case "maintain":
                disk.tier.maintain()
            case _:
                self._die(name, some, committed=verb == "die-committed")

    def _note_stored(self, name: str, some: list[int]) -> None:
        self.stored[name] |= set(some)
        self.unsure[name] -= set(some)

    def _die(self, name: str, some: list[int], *, committed: bool) -> None:
        disk = self.disk
        disk.put(some[:1], name)  # the store is there
        self._note_stored(name, some[:1])
        store = disk.tier._stores[name]
        commit = store._commit

        def die(written: object) -> bool:
            if committed:
                commit(written)  # type: ignore[arg-type]
            raise Killed

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store, "_commit", die)
            with pytest.raises(Killed):
                disk.put(some, name)
        if committed:
            self._note_stored(name, some)
        else:  # the slots were written: a later rebuild may find them
            self.dropped[name] |= set(some) - self.stored[name]
        disk.kill()
        self._open()

    def _open(self) -> None:
        self.disk.open()
        if self.disk.tier._rebuild:
            for name in NAMESPACES:
                self.unsure[name] |= self.dropped[name] - self.stored[name]

    def check(self, name: str, some: list[int]) -> None:
        found = self.disk.contains(some, name)
        results = self.disk.fetch(some, name)  # compares the bytes
        for number, there, result in zip(some, found, results, strict=True):
            assert (result is OK) is there
            if number not in self.unsure[name]:
                assert there is (number in self.stored[name]), number


@pytest.fixture(scope="module")
def pool() -> Iterator[PoolMemory]:
    pool = PoolMemory(4096)
    yield pool
    pool.files.close()


@given(steps)
@settings(max_examples=150)
def test_the_disk_tier_is_a_dict_that_survives(
    pool: PoolMemory, taken: list[tuple[str, str, list[int]]]
) -> None:
    with tempfile.TemporaryDirectory() as root:
        disk = KillableDisk(pool, Path(root) / "tier")
        model = Model(disk)
        try:
            for step in taken:
                model.take(step)
            for name in NAMESPACES:
                model.check(name, list(range(12)))
            assert disk.usage().used_bytes <= disk.size
        finally:
            disk.kill()
