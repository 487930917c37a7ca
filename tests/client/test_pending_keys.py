"""How long a key is waited for."""

from __future__ import annotations

from kvferry.client.pending_keys import PendingKeys


def test_only_so_many_first_lookups_are_remembered() -> None:
    now = 0.0
    pending = PendingKeys(5.0, lambda: now, max_keys=2)
    assert [pending.is_recent(key) for key in (b"a", b"b", b"c")] == [True] * 3
    assert list(pending.since) == [b"b", b"c"]
    now += 5.1
    assert [pending.is_recent(key) for key in (b"b", b"c")] == [False] * 2
    assert pending.is_recent(b"a")


def test_a_forgotten_key_is_recent_again() -> None:
    now = 0.0
    pending = PendingKeys(5.0, lambda: now)
    pending.is_recent(b"a")
    now += 5.1
    pending.forget([b"a", b"b"])
    assert pending.is_recent(b"a")
