"""Searches in tiers: which lookups wait for a search, and how long."""

from __future__ import annotations

import time

import pytest

from kvferry.client.session import ClientSession
from kvferry.client.tier_searches import Prefetch, TierSearch, TierSearches
from kvferry.proto import messages as wire
from kvferry.proto.codec import encode
from kvferry.proto.errors import Code, ErrorInfo
from kvferry.proto.keys import EventKind, Lookup
from kvferry.proto.status import Fingerprint

A, B, C = b"a" * 36, b"b" * 36, b"c" * 36
NOW = time.monotonic()
OPENED = wire.Opened(1, "n", 8, 4096, False, "lru", 1, tiers=("disk",))


@pytest.fixture
def session() -> ClientSession:
    session = ClientSession("engine", "client", reconnects=True)
    session.namespace_opened(wire.OpenNamespace(1, Fingerprint("m", 4096)), OPENED)
    session.namespace.ensure_mirror()
    session.receive_message(encode(wire.Snapshot(0, 0, False, (A,), True)))
    return session


def begin(
    session: ClientSession, request_id: int, *keys: bytes, seconds: float = 1.0
) -> TierSearch:
    search = TierSearch(keys, NOW + seconds)
    session.namespace.tier_searches.begin(request_id, search)
    return search


def lookup(session: ClientSession, *keys: bytes, after: float = 0.0) -> list[Lookup]:
    return [session.namespace.lookup(key, NOW + after) for key in keys]


def test_a_searched_key_is_a_retry_until_the_reply(session: ClientSession) -> None:
    search = begin(session, 7, A, B)
    assert lookup(session, A, B, C) == [Lookup.HIT, Lookup.RETRY, Lookup.MISS]
    session.receive_message(encode(wire.KeyEvents(1, (wire.KeyEvent(EventKind.PENDING, (B,)),))))
    session.receive_message(encode(wire.TiersFound(7, 2, 1, 0.1)))
    assert lookup(session, A, B) == [Lookup.HIT, Lookup.HIT_PENDING]
    assert (search.found, search.found_keys) == (2, (A, B))


def test_a_key_that_is_not_found_is_a_miss(session: ClientSession) -> None:
    search = begin(session, 7, B, C)
    session.receive_message(encode(wire.TiersFound(7, 0)))
    assert lookup(session, B, C) == [Lookup.MISS, Lookup.MISS]
    assert search.found_keys == ()


def test_a_refused_search_finds_nothing(session: ClientSession) -> None:
    search = begin(session, 7, B)
    session.receive_message(encode(wire.Error(7, ErrorInfo(Code.BUSY, "later", "1"))))
    assert (search.found, lookup(session, B)) == (0, [Lookup.MISS])


def test_a_search_without_a_reply_ends_at_its_deadline(session: ClientSession) -> None:
    early, late = begin(session, 7, B, seconds=1), begin(session, 8, B, C, seconds=3)
    assert lookup(session, B, C, after=2) == [Lookup.RETRY, Lookup.RETRY]
    assert (early.found, late.found) == (0, None)
    assert lookup(session, B, C, after=4) == [Lookup.MISS, Lookup.MISS]
    session.receive_message(encode(wire.TiersFound(8, 2)))  # too late
    assert late.found == 0


def test_two_searches_of_one_key_must_both_end(session: ClientSession) -> None:
    begin(session, 7, B)
    begin(session, 8, B)
    session.receive_message(encode(wire.TiersFound(7, 0)))
    assert lookup(session, B) == [Lookup.RETRY]
    session.receive_message(encode(wire.TiersFound(8, 0)))
    assert lookup(session, B) == [Lookup.MISS]


def test_a_lost_connection_ends_all_searches(session: ClientSession) -> None:
    search = begin(session, 7, B)
    session.abandon()
    assert (search.found, lookup(session, B)) == (0, [Lookup.MISS])


def test_during_a_reset_a_searched_key_is_a_miss(session: ClientSession) -> None:
    begin(session, 7, B)
    session.reset()
    assert lookup(session, B) == [Lookup.MISS]


def test_a_reply_cannot_find_more_keys_than_were_searched() -> None:
    searches, search = TierSearches(), TierSearch((B,), NOW)
    searches.begin(1, search)
    searches.end(1, found=9)
    assert search.found == 1


def test_a_prefetch_finds_the_keys_that_all_ranks_have() -> None:
    searches = TierSearch((A, B), found=2), TierSearch((A, B), found=1)
    assert (Prefetch(searches).done, Prefetch(searches).found_keys) == (True, (A,))
    assert not Prefetch((TierSearch((A,)),)).done
    assert (Prefetch().done, Prefetch().found_keys) == (True, ())
