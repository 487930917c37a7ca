"""The pools of siblings as a tier, with siblings that a test controls."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvferry.daemon.tiers.siblings import sibling_link
from kvferry.daemon.tiers.siblings import tier as siblings_tier
from kvferry.daemon.tiers.siblings.key_table import TABLES_BYTES, HeldKeys, KeyTables
from kvferry.daemon.tiers.siblings.tier import SiblingsTier

from kvferry.daemon.tiers.base import Blocks, Result, block_checksum
from kvferry.proto import messages as wire
from kvferry.proto.lending import (
    ABSENT,
    UNCOMMITTED,
    BlocksLocated,
    LocateBlocks,
    ResetLent,
)
from kvferry.shm.memfd import sealed_memfd
from kvferry.testing.engine import until
from support.fake_sibling import CHUNK, FakeSibling
from support.time_limits import TIMEOUT

STORE, BLOCK = "name-00", 4096
KEYS = tuple(number.to_bytes(36, "big") for number in range(8))
CONTENT = bytes((at * 7 + at // 256) % 256 for at in range(CHUNK))
CHUNK_FD, TABLE_FD = 7, 8


class SiblingsTierFixture:
    """A tier, and siblings by name."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self._stack = folder, stack
        tables = sealed_memfd("keys", TABLES_BYTES)
        stack.callback(os.close, tables)
        self.tables = KeyTables(tables)
        self.read_tables = HeldKeys(tables)
        self.own = self._directory("own")
        self.tier = SiblingsTier(self.own, [folder], self.tables)
        stack.callback(self._end)
        self.tier.note_pool({STORE: 1}, ())

    def _end(self) -> None:
        """Unlike the process, which ends with everything in it."""
        links = len(self.tier._links)
        free = len(self.tier._free_tables) + links
        self.tier.note_pool({}, ())
        self.tier.maintain()
        until(lambda: len(self.tier._free_tables) == free)
        self.tier.close()
        self.tier._loop.close()

    def _directory(self, name: str) -> Path:
        path = self.folder / name
        path.mkdir()
        return path

    def sibling(self, name: str, keys: Sequence[bytes]) -> FakeSibling:
        directory = self._directory(name)
        chunk, table = sealed_memfd("chunk", CHUNK), sealed_memfd("table", 4096)
        os.pwrite(chunk, CONTENT, 0)
        made = FakeSibling(directory, {CHUNK_FD: chunk, TABLE_FD: table})
        made.table, made.keys = TABLE_FD, tuple(keys)
        self._stack.callback(os.close, chunk)
        self._stack.callback(os.close, table)
        self._stack.callback(made.close)
        return made

    def wait_until_on(self, *names: str) -> None:
        self.tier.maintain()
        until(lambda: self.states() == dict.fromkeys(names, "on"))

    def states(self) -> dict[str, str]:
        return {Path(each.directory).name: each.state for each in self.tier.siblings()}

    def current_states(self) -> dict[str, str]:
        self.tier.maintain()
        return self.states()

    def places(self, keys: Sequence[bytes]) -> list[list[int]]:
        data = self.tier.locate(STORE, keys)
        rows: list[list[int]] = np.frombuffer(data, np.int64).reshape(-1, 3).tolist()
        return rows

    def fetch(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The bytes of each key; None if it is a miss."""
        memory = ctypes.create_string_buffer(len(keys) * BLOCK)
        addresses = [ctypes.addressof(memory) + at * BLOCK for at in range(len(keys))]
        blocks = Blocks(STORE, keys, addresses, BLOCK)
        found = self.tier.fetch(blocks, time.monotonic() + 10)
        return [
            memory.raw[at * BLOCK : (at + 1) * BLOCK] if each.result is Result.OK else None
            for at, each in enumerate(found)
        ]


@pytest.fixture
def tiers(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SiblingsTierFixture]:
    monkeypatch.setattr(sibling_link, "ASK_EVERY", 0.02)
    # Both cores may be busy. Tests of silence set less.
    monkeypatch.setattr(siblings_tier, "LOCATE_SECONDS", TIMEOUT)
    monkeypatch.setattr(siblings_tier, "PROMPT_SECONDS", TIMEOUT)
    monkeypatch.setattr(sibling_link, "PROMPT_SECONDS", TIMEOUT)
    with ExitStack() as stack:
        yield SiblingsTierFixture(short_path, stack)


def located(sibling: FakeSibling, offsets: dict[bytes, int]) -> None:
    """Have a sibling answer with these offsets. Versions are offsets plus one."""

    def answer(message: wire.ClientMessage) -> Any:
        if not isinstance(message, LocateBlocks):
            return sibling.honest_answer(message)
        found = [offsets[key] for key in message.keys]
        sums = [
            block_checksum(key, memoryview(CONTENT)[at : at + BLOCK]) if at >= 0 else 0
            for key, at in zip(message.keys, found, strict=True)
        ]
        versions = [max(0, at + 1) for at in found]
        return [BlocksLocated(message.request_id, tuple(found), tuple(sums), tuple(versions))]

    sibling.answer = answer


def test_each_sibling_is_asked_for_what_it_has(tiers: SiblingsTierFixture) -> None:
    one, two = tiers.sibling("one", KEYS[:2]), tiers.sibling("two", KEYS[1:4])
    located(one, {KEYS[0]: 0, KEYS[1]: BLOCK})
    located(two, {KEYS[2]: 2 * BLOCK, KEYS[3]: CHUNK})
    tiers.wait_until_on("one", "two")
    assert tiers.tier.contains(STORE, KEYS[:5]) == [True] * 4 + [False]
    assert tiers.tier.contains("other-00", KEYS[:5]) == [False] * 5
    assert tiers.tier.usage().keys == 5
    whole = [CONTENT[at * BLOCK : (at + 1) * BLOCK] for at in range(3)]
    assert tiers.fetch(KEYS[:5]) == [*whole, None, None]
    numbers = {
        Path(each.directory).name: (each.copied, each.missed, each.copied_bytes)
        for each in tiers.tier.siblings()
    }
    assert numbers == {"one": (2, 0, 2 * BLOCK), "two": (1, 1, BLOCK)}


def test_places_are_those_in_windows_that_the_daemon_has_mapped(tiers: SiblingsTierFixture) -> None:
    one, two = tiers.sibling("one", KEYS[:3]), tiers.sibling("two", KEYS[3:])
    located(one, {KEYS[0]: 0, KEYS[1]: ABSENT, KEYS[2]: UNCOMMITTED})
    tiers.wait_until_on("one", "two")
    assert tiers.places(KEYS[:4]) == []
    windows = {Path(files.directory).name: files.window for files in tiers.tier.lent_files()}
    tiers.tier.note_pool({STORE: 1}, [windows["one"]])
    assert tiers.places(KEYS[:4]) == [
        [windows["one"], 0, 1],
        [-1, ABSENT, 0],
        [-1, UNCOMMITTED, 0],
        [-1, -1, -1],
    ]
    assert not [each for each in two.received if isinstance(each, LocateBlocks)]


def test_a_sibling_that_does_not_answer_costs_only_its_own_keys(
    tiers: SiblingsTierFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers.sibling("one", KEYS[:1])
    two = tiers.sibling("two", KEYS[1:2])
    tiers.wait_until_on("one", "two")
    windows = [files.window for files in tiers.tier.lent_files()]
    tiers.tier.note_pool({STORE: 1}, windows)
    two.answer = lambda _: []
    monkeypatch.setattr(siblings_tier, "LOCATE_SECONDS", 2.0)
    places = tiers.places(KEYS[:2])
    assert (places[0][0] in windows, places[1]) == (True, [-1, -1, -1])


def test_a_block_whose_checksum_is_late_is_asked_for_again(
    tiers: SiblingsTierFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(siblings_tier, "COMMIT_SECONDS", 10.0)
    one = tiers.sibling("one", KEYS[:2])
    offsets = {KEYS[0]: UNCOMMITTED, KEYS[1]: BLOCK}
    located(one, offsets)
    tiers.wait_until_on("one")
    asked: list[LocateBlocks] = []
    answer = one.answer

    def commit_later(message: wire.ClientMessage) -> Any:
        replies = answer(message)
        if isinstance(message, LocateBlocks):
            asked.append(message)
            offsets[KEYS[0]] = 0 if len(asked) > 2 else UNCOMMITTED
        return replies

    one.answer = commit_later
    assert tiers.fetch(KEYS[:2]) == [CONTENT[:BLOCK], CONTENT[BLOCK : 2 * BLOCK]]
    assert [each.keys for each in asked] == [KEYS[:2], *[KEYS[:1]] * 3]
    monkeypatch.setattr(siblings_tier, "COMMIT_SECONDS", 0.0)
    offsets[KEYS[0]] = UNCOMMITTED
    one.answer = answer
    assert tiers.fetch(KEYS[:1]) == [None]


def test_keys_with_other_bytes_are_not_found_again(tiers: SiblingsTierFixture) -> None:
    tiers.sibling("one", KEYS[:3])
    tiers.wait_until_on("one")
    assert tiers.read_tables.find(STORE, KEYS) == set(KEYS[:3])
    tiers.tier.drop(STORE, KEYS[1:3])
    until(lambda: tiers.tier.contains(STORE, KEYS[:3]) == [True, False, False])
    assert tiers.read_tables.find(STORE, KEYS) == set(KEYS[:1])


def test_a_reset_reaches_siblings_that_have_just_started(tiers: SiblingsTierFixture) -> None:
    one, two = tiers.sibling("one", KEYS), tiers.sibling("two", KEYS)
    tiers.tier.drop("name")
    assert [len(resets(each)) for each in (one, two)] == [1, 1]
    tiers.tier.drop("nam")
    assert [len(resets(each)) for each in (one, two)] == [1, 1]


def resets(sibling: FakeSibling) -> list[wire.ClientMessage]:
    return [each for each in sibling.received if isinstance(each, ResetLent)]


def test_a_sibling_that_has_left_gives_its_table_to_another(tiers: SiblingsTierFixture) -> None:
    del tiers.tier._free_tables[1:]
    tiers.sibling("one", KEYS)
    tiers.wait_until_on("one")
    (tiers.folder / "one" / "kvferry.sock").unlink()
    tiers.sibling("two", KEYS[:1])
    until(lambda: tiers.current_states() == {"two": "on"})
    assert tiers.read_tables.find(STORE, KEYS) == {KEYS[0]}
    tiers.tier.note_pool({}, ())
    until(lambda: not tiers.current_states())
    assert tiers.read_tables.find(STORE, KEYS) == set()


def test_a_daemon_of_another_user_is_named_and_not_used(
    tiers: SiblingsTierFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = tiers.sibling("one", KEYS)
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    tiers.tier.maintain()
    assert tiers.states() == {"one": f"it runs as user {own}, and this daemon as {own + 1}"}
    monkeypatch.undo()
    assert not one.received


def test_a_sibling_is_not_itself(tiers: SiblingsTierFixture) -> None:
    fake = FakeSibling(tiers.own, {})
    tiers.tier.maintain()
    tiers.sibling("one", KEYS)
    tiers.wait_until_on("one")
    fake.close()
    assert not fake.received


def test_files_that_do_not_fit_an_answer_are_not_lent(
    tiers: SiblingsTierFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two", "three"):
        tiers.sibling(name, KEYS)
    tiers.wait_until_on("one", "two", "three")
    assert len(tiers.tier.lent_files()) == 3
    monkeypatch.setattr(siblings_tier, "MAX_LENT_FILES", 2)
    assert len(tiers.tier.lent_files()) == 2


def test_memory_without_a_block_table_is_not_lent(tiers: SiblingsTierFixture) -> None:
    """Nothing would show whether a block has changed. Its blocks are copied."""
    located(one := tiers.sibling("one", KEYS), {KEYS[0]: 0})
    one.table = None
    tiers.wait_until_on("one")
    assert tiers.tier.lent_files() == ()
    assert tiers.fetch(KEYS[:1]) == [CONTENT[:BLOCK]]


def test_nothing_is_put_into_it(tiers: SiblingsTierFixture) -> None:
    assert tiers.tier.put(Blocks(STORE, KEYS, [0] * 8, BLOCK), [0] * 8) == [Result.FULL] * 8
