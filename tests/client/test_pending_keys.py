"""PendingKeys: how long a scheduler waits for a pending key."""

from __future__ import annotations

from kvferry.client.pending_keys import PendingKeys


def test_the_number_of_remembered_keys_is_bounded() -> None:
    now = 0.0
    pending = PendingKeys(5.0, lambda: now, max_keys=2)
    assert [pending.is_recent(key) for key in (b"a", b"b", b"c")] == [True] * 3
    assert list(pending.since) == [b"b", b"c"]
    now += 5.1
    assert [pending.is_recent(key) for key in (b"b", b"c")] == [False] * 2
    assert pending.is_recent(b"a")
