"""Searches are asked in parts; sessions take turns, and have bounds."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.daemon.core.search_queue import (
    MAX_PARTS,
    MAX_SEARCHED_KEYS,
    MAX_SEARCHES,
    KeySearch,
    SearchQueue,
)
from kvferry.daemon.core.tier_actions import MAX_TIER_KEYS, FindKeys, KeysFound
from kvferry.proto.errors import Code, Refused
from kvferry.proto.messages import FindInTiers

NAMESPACE: Any = None


def search_of(session: str, keys: int) -> KeySearch:
    names = tuple(f"{session}{number}".encode() for number in range(keys))
    message = FindInTiers(1, names)
    return KeySearch(session, message, NAMESPACE, "store", names)


class TierOfAllKeys:
    """A queue over a tier that has all keys but `missing`. asked: session and number of keys."""

    def __init__(self) -> None:
        self.queue = SearchQueue()
        self.parts: list[FindKeys] = []
        self.asked: list[tuple[str, int]] = []
        self.missing: bytes | None = None

    def add(self, session: str, keys: int) -> KeySearch:
        search = search_of(session, keys)
        self.queue.add(search)
        self.send()
        return search

    def send(self) -> None:
        for part in self.queue.next_parts():
            self.parts.append(part)
            self.asked.append((part.keys[0][:1].decode(), len(part.keys)))

    def answer(self, place: int = 0) -> KeySearch | None:
        part = self.parts.pop(place)
        tier_of = tuple(-1 if key == self.missing else 0 for key in part.keys)
        search = self.queue.end_part(KeysFound(part.search, tier_of, (), (), ()))
        self.send()
        return search


def test_a_large_search_is_asked_in_parts_of_which_two_are_in_flight() -> None:
    tier = TierOfAllKeys()
    search = tier.add("a", 2 * MAX_TIER_KEYS + 5)
    assert tier.asked == [("a", MAX_TIER_KEYS)] * MAX_PARTS
    assert tier.answer(1) is None
    assert tier.asked[-1] == ("a", 5)
    assert tier.answer(1) is None
    assert tier.answer() is search
    assert search.tier_of == [0] * len(search.keys)


def test_sessions_take_turns() -> None:
    tier = TierOfAllKeys()
    for _ in range(3):
        tier.add("a", 4 * MAX_TIER_KEYS)
    honest = tier.add("b", MAX_TIER_KEYS + 1)
    ended = [tier.answer() for _ in range(6)]
    assert [session for session, _ in tier.asked] == [*"aaababaa"]
    assert honest in ended


def test_a_search_ends_with_the_part_that_has_a_missing_key() -> None:
    tier = TierOfAllKeys()
    tier.missing = b"a7"
    search, following = tier.add("a", 5 * MAX_TIER_KEYS), tier.add("a", 1)
    assert tier.answer() is None  # another part is in flight
    assert tier.answer() is search
    assert search.tier_of[:9] == [0] * 7 + [-1, 0]
    assert search.tier_of[2 * MAX_TIER_KEYS :] == [-1] * 3 * MAX_TIER_KEYS
    assert tier.answer() is following


def test_the_parts_of_a_closed_session_are_not_sent() -> None:
    tier = TierOfAllKeys()
    tier.add("a", 5 * MAX_TIER_KEYS)
    tier.queue.close_session("a")
    other = tier.add("b", 1)
    assert tier.answer() is None
    assert tier.answer() is None
    assert tier.answer() is other
    assert len(tier.asked) == MAX_PARTS + 1


def test_the_keys_in_the_searches_of_a_session_are_bounded() -> None:
    tier = TierOfAllKeys()
    first = tier.add("a", MAX_SEARCHED_KEYS)
    with pytest.raises(Refused) as error:
        tier.add("a", 1)
    assert (error.value.code, error.value.value) == (Code.BUSY, str(MAX_SEARCHED_KEYS + 1))
    tier.add("b", 1)
    while tier.answer() is not first:
        pass
    tier.add("a", MAX_SEARCHED_KEYS)


def test_the_searches_of_a_session_are_bounded() -> None:
    tier = TierOfAllKeys()
    for _ in range(MAX_SEARCHES):
        tier.add("a", 1)
    with pytest.raises(Refused) as error:
        tier.add("a", 1)
    assert (error.value.code, error.value.value) == (Code.BUSY, str(MAX_SEARCHES))
    tier.answer()
    tier.add("a", 1)
