"""The table of a sibling's keys after snapshots and key events."""

from __future__ import annotations

import pytest
from kvferry.daemon.tiers.siblings.key_feed import KeyFeed
from kvferry.daemon.tiers.siblings.key_table import KeyTable, hash_keys

from kvferry.proto.keys import EventKind
from kvferry.proto.messages import KeyEvent, KeyEvents, Snapshot

LETTERS = b"abcdefgh"


class KeyFeedFixture:
    """A feed whose keys are letters."""

    def __init__(self) -> None:
        self.table = KeyTable()
        self.feed = KeyFeed("store", self.table)

    @property
    def keys(self) -> bytes:
        found = self.table.contains(hash_keys("store", split(LETTERS))).tolist()
        return bytes(letter for letter, is_held in zip(LETTERS, found, strict=True) if is_held)

    def snapshot(
        self, letters: bytes, part: int = 0, *, last: bool = True, pending: bool = False
    ) -> None:
        self.feed.apply(Snapshot(5, part, pending, split(letters), last, 1))

    def events(self, sequence: int, *events: tuple[EventKind, bytes], generation: int = 1) -> None:
        each = tuple(KeyEvent(kind, split(letters)) for kind, letters in events)
        self.feed.apply(KeyEvents(sequence, each, generation))


def split(letters: bytes) -> tuple[bytes, ...]:
    return tuple(bytes([letter]) for letter in letters)


@pytest.fixture
def feed() -> KeyFeedFixture:
    return KeyFeedFixture()


def test_a_snapshot_replaces_the_keys_once_it_is_complete(feed: KeyFeedFixture) -> None:
    feed.snapshot(b"ab")
    assert (feed.keys, feed.feed.generation, feed.feed.is_incomplete) == (b"ab", 1, False)
    feed.snapshot(b"c", last=False)
    feed.snapshot(b"d", 1, pending=True, last=False)
    assert feed.keys == b"ab"
    feed.snapshot(b"e", 2)
    assert (feed.keys, feed.feed.is_incomplete) == (b"ce", False)
    feed.snapshot(b"f", 3)
    assert (feed.keys, feed.feed.is_incomplete) == (b"ce", True)


def test_a_snapshot_may_begin_again(feed: KeyFeedFixture) -> None:
    feed.snapshot(b"a", last=False)
    feed.snapshot(b"b", last=False)
    feed.snapshot(b"c", 1)
    assert (feed.keys, feed.feed.is_incomplete) == (b"bc", False)


@pytest.mark.parametrize("begun", [False, True])
def test_a_snapshot_without_one_of_its_parts_is_requested_again(
    feed: KeyFeedFixture, begun: bool
) -> None:
    feed.snapshot(b"a")
    if begun:
        feed.snapshot(b"b", last=False)
    feed.snapshot(b"c", 2)
    assert (feed.keys, feed.feed.is_incomplete) == (b"a", True)
    feed.snapshot(b"d", 1)
    assert feed.keys == b"a"


def test_events_change_the_keys_and_an_unfinished_snapshot(feed: KeyFeedFixture) -> None:
    feed.snapshot(b"ab")
    feed.snapshot(b"abc", last=False)
    feed.events(6, (EventKind.REMOVED, b"a"), (EventKind.STORED, b"d"))
    assert feed.keys == b"bd"
    feed.snapshot(b"", 1)
    assert feed.keys == b"bcd"
    feed.events(7, (EventKind.CLEARED, b""), generation=2)
    assert (feed.keys, feed.feed.generation, feed.feed.is_incomplete) == (b"", 2, False)
    feed.events(8, (EventKind.STORED, b"e"), (EventKind.BORROWED, b"e"), generation=2)
    assert feed.keys == b""


@pytest.mark.parametrize(("sequence", "missing"), [(6, False), (7, True), (5, False)])
def test_a_gap_in_the_events_is_noticed(feed: KeyFeedFixture, sequence: int, missing: bool) -> None:
    """The keys stay in use until there is a new snapshot."""
    feed.snapshot(b"a")
    feed.events(sequence, (EventKind.STORED, b"b"))
    assert (feed.keys, feed.feed.is_incomplete) == (b"ab", missing)
    feed.events(sequence + 1, (EventKind.STORED, b"c"))
    assert feed.feed.is_incomplete == missing


def test_events_that_the_sibling_has_left_out_are_noticed(feed: KeyFeedFixture) -> None:
    feed.snapshot(b"a")
    feed.events(6)
    assert feed.feed.is_incomplete


def test_nothing_is_left_of_a_session_that_has_ended(feed: KeyFeedFixture) -> None:
    feed.snapshot(b"a")
    feed.snapshot(b"b", last=False)
    feed.feed.end()
    assert (feed.keys, feed.feed.generation) == (b"", 0)
    feed.snapshot(b"c", 1)
    assert feed.keys == b""
