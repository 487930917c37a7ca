"""The client's mirror of a namespace. tests/property compares it with one, in random sequences."""

from __future__ import annotations

import pytest

from kvferry.client.mirror import Mirror
from kvferry.proto.keys import EventKind, Lookup, OffloadKey
from kvferry.proto.messages import KeyEvent, KeyEvents, Snapshot

KEYS = tuple(bytes([n]) * 4 for n in range(6))
A, B, C, *_ = KEYS
HIT, MISS, PENDING, RETRY = Lookup.HIT, Lookup.MISS, Lookup.HIT_PENDING, Lookup.RETRY


def key_events(sequence: int, kind: EventKind, *keys: OffloadKey, epoch: int = 0) -> KeyEvents:
    return KeyEvents(sequence, (KeyEvent(kind, keys),), epoch)


def stored(sequence: int, *keys: OffloadKey, epoch: int = 0) -> KeyEvents:
    return key_events(sequence, EventKind.STORED, *keys, epoch=epoch)


def cleared(sequence: int, epoch: int) -> KeyEvents:
    """The events of a reset."""
    return key_events(sequence, EventKind.CLEARED, epoch=epoch)


def removed(sequence: int, *keys: OffloadKey) -> KeyEvents:
    return key_events(sequence, EventKind.REMOVED, *keys)


def snapshot(
    sequence: int, *keys: OffloadKey, part: int = 0, last: bool = True, epoch: int = 0
) -> Snapshot:
    return Snapshot(sequence, part, False, keys, last, epoch)


def answers(mirror: Mirror, *keys: OffloadKey) -> list[Lookup]:
    return [mirror.lookup(key) for key in keys or KEYS]


@pytest.fixture
def mirror() -> Mirror:
    """A mirror that is complete at number 10. A is ready, B is pending."""
    mirror = Mirror()
    assert not mirror.apply_message(Snapshot(10, 0, False, (A,)))
    assert not mirror.apply_message(Snapshot(10, 1, True, (B,), True))
    return mirror


# KeyEvents


def test_the_events_of_one_message_are_in_order(mirror: Mirror) -> None:
    kinds = (EventKind.CLEARED, EventKind.PENDING, EventKind.STORED, EventKind.REMOVED)
    events = [KeyEvent(kind, (C,) if kind is not EventKind.CLEARED else ()) for kind in kinds]
    mirror.apply_message(KeyEvents(11, tuple(events[:3])))
    assert answers(mirror, A, B, C) == [MISS, MISS, HIT]
    mirror.apply_message(KeyEvents(12, tuple(events[3:])))
    assert answers(mirror, A, B, C) == [MISS, MISS, MISS]


def test_old_events_change_nothing(mirror: Mirror) -> None:
    mirror.apply_message(stored(11, C))
    for old in (removed(11, A), removed(10, A), removed(1, A)):
        assert not mirror.apply_message(old)
    assert answers(mirror, A, C) == [HIT, HIT]
    assert mirror.complete


# Incomplete mirrors


@pytest.mark.parametrize("message", [stored(12), KeyEvents(11, ())])
def test_missed_events_request_one_snapshot(mirror: Mirror, message: KeyEvents) -> None:
    """The daemon sends a number without events instead of omitted ones, even of only one."""
    assert mirror.apply_message(message)
    assert not mirror.apply_message(stored(13))
    assert not mirror.apply_message(stored(17))
    assert not mirror.complete
    assert not mirror.apply_message(snapshot(17, C))
    assert answers(mirror, A, B, C) == [MISS, MISS, HIT]


def test_an_incomplete_first_snapshot_returns_retry() -> None:
    mirror = Mirror()
    assert answers(mirror, A, C) == [RETRY, RETRY]
    mirror.apply_message(snapshot(5, A, last=False))
    assert (answers(mirror, A, C), mirror.complete) == ([RETRY, RETRY], False)
    mirror.apply_message(snapshot(5, B, part=1))
    assert (answers(mirror, A, B, C), mirror.complete) == ([HIT, HIT, MISS], True)


def test_an_incomplete_mirror_returns_known_keys_and_retry_for_others(mirror: Mirror) -> None:
    mirror.apply_message(stored(12, C))
    assert answers(mirror, A, B, C, KEYS[4]) == [HIT, PENDING, HIT, RETRY]
    mirror.apply_message(removed(13, A))
    assert mirror.lookup(A) is RETRY
    assert not mirror.apply_message(snapshot(13, B, C))
    assert answers(mirror, A, B, C, KEYS[4]) == [MISS, HIT, HIT, MISS]


# Snapshots in parts


def test_a_snapshot_with_a_missing_part_requests_another_once() -> None:
    mirror = Mirror()
    mirror.apply_message(snapshot(5, A, last=False))
    assert mirror.apply_message(snapshot(5, C, part=2, last=False))
    assert not mirror.apply_message(snapshot(5, B, part=3))
    assert not mirror.complete
    mirror.apply_message(snapshot(5, A, last=False))
    mirror.apply_message(snapshot(5, A, last=False))
    mirror.apply_message(snapshot(5, B, part=1))
    assert (answers(mirror, A, B, C), mirror.complete) == ([HIT, HIT, MISS], True)


def test_a_complete_mirror_ignores_snapshots(mirror: Mirror) -> None:
    mirror.apply_message(stored(11, C))
    for message in (snapshot(10), snapshot(12, part=2), snapshot(12, last=False)):
        assert not mirror.apply_message(message)
    assert not mirror.apply_message(stored(12))
    assert answers(mirror, A, B, C) == [HIT, PENDING, HIT]


# Resets


RESETS: dict[str, tuple[list[KeyEvents | Snapshot], list[int], Lookup]] = {
    "done": ([cleared(11, 7), stored(12, C, epoch=7)], [7], HIT),
    "its events were lost": ([], [7], MISS),
    "the events of the second were lost": (
        [cleared(11, 7), stored(12, C, epoch=7)],
        [7, 8],
        MISS,
    ),
    # Each Done names the epoch of the namespace then, perhaps that of a later reset.
    "adopted together": ([cleared(11, 8), stored(12, C, epoch=8)], [8, 8], HIT),
    # With shared tiers, a reset is done much later than its events.
    "done after a later one": (
        [cleared(11, 7), cleared(12, 8), stored(13, C, epoch=8)],
        [8],
        HIT,
    ),
    # With shared tiers, a snapshot may arrive before the reset is done, whose events were lost.
    "done after a snapshot": ([KeyEvents(12, (), 2), snapshot(12, C, epoch=2)], [2], HIT),
}


@pytest.mark.parametrize(("messages", "done", "found"), RESETS.values(), ids=RESETS)
def test_all_keys_are_absent_until_resets_are_done(
    mirror: Mirror, messages: list[KeyEvents | Snapshot], done: list[int], found: Lookup
) -> None:
    for _ in done:
        mirror.hide()
    for message in messages:
        mirror.apply_message(message)
    assert answers(mirror) == [MISS] * 6
    for epoch in done:
        mirror.clear_after_reset(epoch)
    mirror.reveal()
    assert answers(mirror, A, B, C) == [MISS, MISS, found]
    assert mirror.epoch == done[-1]


def test_each_reset_clears(mirror: Mirror) -> None:
    """Epochs are compared for equality only: a clock may have been set back."""
    for number, epoch in ((11, 9), (13, 7), (15, 9)):
        mirror.hide()
        mirror.apply_message(cleared(number, epoch))
        mirror.apply_message(stored(number + 1, C, epoch=epoch))
        mirror.clear_after_reset(epoch)
        mirror.reveal()
        assert answers(mirror, A, C) == [MISS, HIT]


def test_a_reset_that_was_not_done_changes_nothing(mirror: Mirror) -> None:
    incomplete = Mirror()
    for each in (incomplete, mirror):
        each.hide()
        assert each.lookup(A) is MISS
        each.reveal()
    assert answers(mirror, A, B, C) == [HIT, PENDING, MISS]
    assert incomplete.lookup(A) is RETRY


@pytest.mark.parametrize("epoch", [3, 7])
def test_events_of_another_epoch_clear_the_known_keys(mirror: Mirror, epoch: int) -> None:
    """Those of the reset itself were dropped."""
    mirror.apply_message(cleared(11, epoch=5))
    mirror.apply_message(stored(12, A, epoch=5))
    assert mirror.apply_message(stored(14, C, epoch=epoch))
    assert answers(mirror, A, B, C) == [RETRY, RETRY, HIT]
    assert mirror.epoch == epoch


def test_a_snapshot_that_began_before_a_reset_is_of_no_use_without_its_events() -> None:
    mirror = Mirror()
    mirror.apply_message(snapshot(10, A, last=False, epoch=1))
    mirror.hide()
    mirror.clear_after_reset(2)
    mirror.reveal()
    mirror.apply_message(KeyEvents(11, (), 2))  # sent before any later part of a snapshot
    assert mirror.apply_message(snapshot(10, B, part=1, epoch=1))
    assert answers(mirror, A, B) == [RETRY, RETRY]
    assert not mirror.apply_message(snapshot(11, C, epoch=2))
    assert answers(mirror, A, B, C) == [MISS, MISS, HIT]


# Changed keys


def test_the_first_changed_keys_are_all_hits(mirror: Mirror) -> None:
    assert list(mirror.take_changed_keys()) == []
    mirror.track_changes()
    assert list(mirror.take_changed_keys()) == [A]
    assert list(mirror.take_changed_keys()) == []
    mirror.apply_message(stored(11, C, B))
    mirror.apply_message(removed(12, A))
    assert list(mirror.take_changed_keys()) == [C, B, A]
    mirror.apply_message(key_events(13, EventKind.CLEARED))
    assert set(mirror.take_changed_keys()) == {B, C}
