"""The client's mirror of a namespace."""

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


@pytest.mark.parametrize(
    ("kind", "known"),
    [
        (EventKind.STORED, [HIT, HIT, MISS]),
        (EventKind.PENDING, [PENDING, PENDING, MISS]),
        (EventKind.REMOVED, [MISS, MISS, MISS]),
        (EventKind.ABANDONED, [MISS, MISS, MISS]),
    ],
)
def test_events_change_the_state_of_keys(
    mirror: Mirror, kind: EventKind, known: list[Lookup]
) -> None:
    assert answers(mirror, A, B, C) == [HIT, PENDING, MISS]
    assert not mirror.apply_message(key_events(11, kind, A, B))
    assert answers(mirror, A, B, C) == known
    assert (mirror.ready, mirror.pending) == (known.count(HIT), known.count(PENDING))


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


def test_an_incomplete_first_snapshot_returns_retry() -> None:
    mirror = Mirror()
    assert answers(mirror, A, C) == [RETRY, RETRY]
    mirror.apply_message(snapshot(5, A, last=False))
    assert (answers(mirror, A, C), mirror.complete) == ([RETRY, RETRY], False)
    mirror.apply_message(snapshot(5, B, part=1))
    assert (answers(mirror, A, B, C), mirror.complete) == ([HIT, HIT, MISS], True)


def test_the_mirror_of_an_empty_namespace_is_complete() -> None:
    mirror = Mirror()
    assert not mirror.apply_message(snapshot(0))
    assert (mirror.complete, mirror.lookup(A)) == (True, MISS)


def test_a_missing_number_requests_one_snapshot(mirror: Mirror) -> None:
    assert mirror.apply_message(stored(12, C))
    assert not mirror.apply_message(stored(13))
    assert not mirror.apply_message(stored(17))
    assert not mirror.complete


def test_a_number_without_events_shows_that_events_were_omitted(mirror: Mirror) -> None:
    """The daemon sends such a number instead of omitted events, also if it omits only one."""
    assert mirror.apply_message(KeyEvents(11, ()))
    assert not mirror.complete
    assert not mirror.apply_message(snapshot(11, C))
    assert answers(mirror, A, B, C) == [MISS, MISS, HIT]


def test_a_number_without_events_above_a_snapshot_requests_another_one() -> None:
    mirror = Mirror()
    mirror.apply_message(snapshot(10, A, last=False))
    assert not mirror.apply_message(KeyEvents(11, ()))
    assert mirror.apply_message(snapshot(10, B, part=1))
    assert not mirror.complete
    assert not mirror.apply_message(snapshot(11, B))
    assert answers(mirror, A, B, C) == [MISS, HIT, MISS]


def test_an_incomplete_mirror_returns_known_keys_and_retry_for_others(mirror: Mirror) -> None:
    mirror.apply_message(stored(12, C))
    assert answers(mirror, A, B, C, KEYS[4]) == [HIT, PENDING, HIT, RETRY]
    mirror.apply_message(removed(13, A))
    assert mirror.lookup(A) is RETRY
    assert not mirror.apply_message(snapshot(13, B, C))
    assert answers(mirror, A, B, C, KEYS[4]) == [MISS, HIT, HIT, MISS]


def test_events_above_a_snapshot_are_applied_after_it(mirror: Mirror) -> None:
    mirror.apply_message(stored(13, C))
    mirror.apply_message(removed(16, B))  # received before the snapshot, with a higher number
    mirror.apply_message(snapshot(15, A, B, last=False))
    mirror.apply_message(removed(17, A))
    assert not mirror.apply_message(snapshot(15, C, part=1))
    assert (answers(mirror, A, B, C), mirror.complete) == ([MISS, MISS, HIT], True)
    assert not mirror.apply_message(stored(18, A))
    assert mirror.apply_message(stored(20, A))


def test_a_gap_above_a_snapshot_requests_another_one(mirror: Mirror) -> None:
    mirror.apply_message(stored(12))
    mirror.apply_message(snapshot(12, A, last=False))
    assert not mirror.apply_message(stored(14))
    assert mirror.apply_message(snapshot(12, B, part=1))
    assert not mirror.complete
    assert not mirror.apply_message(snapshot(14, A))
    assert mirror.complete


# Snapshots in parts


def test_a_newer_snapshot_replaces_an_unfinished_one() -> None:
    mirror = Mirror()
    mirror.apply_message(snapshot(5, A, last=False))
    mirror.apply_message(snapshot(7, B, last=False))
    assert not mirror.apply_message(snapshot(5, C, part=1))  # a part of the older snapshot
    assert not mirror.complete
    assert not mirror.apply_message(snapshot(7, KEYS[3], part=1))
    assert answers(mirror) == [MISS, HIT, MISS, HIT, MISS, MISS]
    assert not mirror.apply_message(snapshot(5, C, part=1))
    assert mirror.lookup(C) is MISS


def test_a_snapshot_restarts_at_the_same_number() -> None:
    mirror = Mirror()
    mirror.apply_message(snapshot(5, A, last=False))
    mirror.apply_message(snapshot(5, B, last=False))
    mirror.apply_message(snapshot(5, C, part=1))
    assert answers(mirror, A, B, C) == [MISS, HIT, HIT]


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


def test_a_snapshot_without_its_first_part_requests_another_once() -> None:
    mirror = Mirror()
    assert mirror.apply_message(snapshot(5, B, part=1, last=False))
    assert not mirror.apply_message(snapshot(5, C, part=2))
    mirror.apply_message(snapshot(6, A, last=False))
    assert mirror.apply_message(snapshot(8, C, part=1))
    assert not mirror.apply_message(snapshot(8, A))
    assert answers(mirror, A, B, C) == [HIT, MISS, MISS]


def test_a_part_received_twice_counts_once() -> None:
    mirror = Mirror()
    mirror.apply_message(snapshot(5, A, last=False))
    mirror.apply_message(snapshot(5, B, part=1, last=False))
    assert not mirror.apply_message(snapshot(5, B, part=1, last=False))
    assert not mirror.apply_message(snapshot(5, C, part=2))
    assert (answers(mirror, A, B, C), mirror.complete) == ([HIT, HIT, HIT], True)


def test_a_complete_mirror_ignores_snapshots(mirror: Mirror) -> None:
    mirror.apply_message(stored(11, C))
    for message in (snapshot(10), snapshot(12, part=2), snapshot(12, last=False)):
        assert not mirror.apply_message(message)
    assert not mirror.apply_message(stored(12))
    assert answers(mirror, A, B, C) == [HIT, PENDING, HIT]


# Resets


def test_all_keys_are_absent_until_a_reset_is_done(mirror: Mirror) -> None:
    mirror.hide()
    mirror.apply_message(stored(11, B))
    assert answers(mirror) == [MISS] * 6
    mirror.apply_message(cleared(12, epoch=7))
    mirror.apply_message(stored(13, C, epoch=7))
    assert answers(mirror) == [MISS] * 6
    mirror.clear_after_reset(7)
    mirror.reveal()
    assert answers(mirror, A, B, C) == [MISS, MISS, HIT]
    assert mirror.epoch == 7


@pytest.mark.parametrize("epochs", [(7, 9), (9, 7)])
def test_each_reset_clears(mirror: Mirror, epochs: tuple[int, int]) -> None:
    """Epochs are compared for equality only: a clock may have been set back."""
    for number, epoch in zip((11, 13), epochs, strict=True):
        mirror.hide()
        mirror.apply_message(cleared(number, epoch))
        mirror.apply_message(stored(number + 1, C, epoch=epoch))
        mirror.clear_after_reset(epoch)
        mirror.reveal()
        assert answers(mirror, A, C) == [MISS, HIT]
        assert mirror.epoch == epoch


def test_a_reset_that_was_not_done_changes_nothing(mirror: Mirror) -> None:
    mirror.hide()
    mirror.reveal()
    assert answers(mirror, A, B, C) == [HIT, PENDING, MISS]


@pytest.mark.parametrize("epoch", [3, 7])
def test_events_of_another_epoch_clear_the_known_keys(mirror: Mirror, epoch: int) -> None:
    """Those of the reset itself were dropped."""
    mirror.apply_message(cleared(11, epoch=5))
    mirror.apply_message(stored(12, A, epoch=5))
    assert mirror.apply_message(stored(14, C, epoch=epoch))
    assert answers(mirror, A, B, C) == [RETRY, RETRY, HIT]
    assert mirror.epoch == epoch


def test_a_number_without_events_of_another_epoch_clears_the_known_keys(mirror: Mirror) -> None:
    assert mirror.apply_message(KeyEvents(12, (), 7))
    assert answers(mirror, A, B) == [RETRY, RETRY]
    assert mirror.epoch == 7


def test_two_resets_with_the_events_of_the_second_lost(mirror: Mirror) -> None:
    mirror.hide()
    mirror.hide()
    mirror.apply_message(cleared(11, epoch=7))
    mirror.clear_after_reset(7)
    mirror.apply_message(stored(12, C, epoch=7))
    mirror.clear_after_reset(8)
    mirror.reveal()
    assert mirror.lookup(C) is MISS


def test_resets_that_are_adopted_together_clear_once(mirror: Mirror) -> None:
    """Each Done names the epoch of the namespace then, perhaps that of a later reset."""
    mirror.hide()
    mirror.hide()
    mirror.apply_message(cleared(11, epoch=8))
    mirror.apply_message(stored(12, C, epoch=8))
    mirror.clear_after_reset(8)
    mirror.clear_after_reset(8)
    mirror.reveal()
    assert answers(mirror, A, B, C) == [MISS, MISS, HIT]


def test_keys_stored_after_a_later_reset_survive_the_end_of_an_earlier_one(
    mirror: Mirror,
) -> None:
    """With shared tiers, a reset is done much later than its events."""
    mirror.hide()
    mirror.apply_message(cleared(11, epoch=7))
    mirror.apply_message(cleared(12, epoch=8))
    mirror.apply_message(stored(13, C, epoch=8))
    mirror.clear_after_reset(8)
    mirror.reveal()
    assert answers(mirror, A, B, C) == [MISS, MISS, HIT]


def test_a_snapshot_from_after_a_reset_survives_its_end(mirror: Mirror) -> None:
    """With shared tiers, the snapshot may arrive before the reset is done, whose event was lost."""
    mirror.hide()
    assert mirror.apply_message(KeyEvents(12, (), 2))
    assert not mirror.apply_message(snapshot(12, C, epoch=2))
    mirror.clear_after_reset(2)
    mirror.reveal()
    assert answers(mirror, A, B, C) == [MISS, MISS, HIT]


def test_a_snapshot_that_began_before_a_reset_is_cleared_by_its_events() -> None:
    mirror = Mirror()
    mirror.apply_message(snapshot(10, A, last=False, epoch=1))
    mirror.apply_message(cleared(11, epoch=2))
    mirror.apply_message(stored(12, C, epoch=2))
    assert not mirror.apply_message(snapshot(10, B, part=1, epoch=1))
    assert answers(mirror, A, B, C) == [MISS, MISS, HIT]
    assert mirror.epoch == 2


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


def test_a_hidden_mirror_misses_even_if_incomplete() -> None:
    mirror = Mirror()
    mirror.hide()
    assert mirror.lookup(A) is MISS
    mirror.reveal()
    assert mirror.lookup(A) is RETRY


def test_a_reset_whose_events_were_lost_still_clears_the_mirror(mirror: Mirror) -> None:
    mirror.hide()
    mirror.clear_after_reset(7)
    mirror.reveal()
    assert answers(mirror) == [MISS] * 6
    assert mirror.apply_message(stored(12, C, epoch=7))
    assert answers(mirror, A, B, C) == [RETRY, RETRY, HIT]


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
