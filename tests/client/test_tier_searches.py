"""Searches in tiers: which lookups wait for a search, and how long."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from kvferry.client.session import ClientSession
from kvferry.client.tier_searches import SEARCH_TIMEOUT, Prefetch, TierSearch
from kvferry.proto import messages as wire
from kvferry.proto.codec import decode_client_message, encode
from kvferry.proto.errors import Code, ErrorInfo, Gone
from kvferry.proto.fingerprint import Fingerprint
from kvferry.proto.keys import EventKind, Lookup
from kvferry.proto.specs import MAX_KEYS

A, B, C = b"a" * 36, b"b" * 36, b"c" * 36
NOW = time.monotonic()
OPENED = wire.Opened(1, "n", 8, 4096, False, "lru", 1, tiers=("disk",))


@pytest.fixture
def session() -> ClientSession:
    session = ClientSession("engine", "client", reconnects=True)
    session.opened.daemon_opened(wire.OpenNamespace(1, Fingerprint("m", 4096)), OPENED)
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
    session.receive_message(encode(wire.TiersFound(7, 9, 1)))  # more than were searched
    assert lookup(session, A, B) == [Lookup.HIT, Lookup.HIT_PENDING]
    assert (search.found, search.found_keys) == (2, (A, B))
    assert Prefetch((search,)).promotes


def test_keys_in_the_memory_of_a_sibling_are_not_read_from_a_tier(session: ClientSession) -> None:
    search = begin(session, 7, B)
    session.receive_message(encode(wire.KeyEvents(1, (wire.KeyEvent(EventKind.BORROWED, (B,)),))))
    session.receive_message(encode(wire.TiersFound(7, 1)))
    assert lookup(session, B) == [Lookup.HIT]
    assert (search.found_keys, Prefetch((search,)).promotes) == ((B,), False)


REFUSED = ErrorInfo(Code.BUSY, "later", "1")


@pytest.mark.parametrize(
    "end",
    [
        lambda session: session.receive_message(encode(wire.TiersFound(7, 0))),
        lambda session: session.receive_message(encode(wire.Error(7, REFUSED))),
        lambda session: session.abandon(),
    ],
)
def test_a_search_that_finds_nothing(
    session: ClientSession, end: Callable[[ClientSession], None]
) -> None:
    search = begin(session, 7, B, C)
    end(session)
    assert lookup(session, B, C) == [Lookup.MISS, Lookup.MISS]
    assert (search.found, search.found_keys) == (0, ())


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
    begin(session, 9, C)
    session.opened.reset()
    assert lookup(session, C) == [Lookup.MISS]  # while all keys are hidden


MANY = tuple(n.to_bytes(36) for n in range(2 * MAX_KEYS + 10))


def send_next(session: ClientSession, search: TierSearch, now: float = NOW) -> wire.FindInTiers:
    """The one message that follows from those that were received."""
    (data,) = session.opened.follow_ups(now)
    message = decode_client_message(data)
    assert isinstance(message, wire.FindInTiers)
    assert (search.found, message.compute_seconds) == (None, search.compute_seconds)
    return message


def test_many_keys_are_searched_in_parts(session: ClientSession) -> None:
    """One after the other. All keys are a RETRY until the last reply."""
    search = TierSearch(MANY, compute_seconds=0.5)
    first = decode_client_message(session.opened.find_in_tiers(search, NOW))
    assert isinstance(first, wire.FindInTiers)
    assert (first.keys, first.compute_seconds) == (MANY[:MAX_KEYS], 0.5)
    assert session.opened.follow_ups(NOW) == []
    session.receive_message(encode(wire.TiersFound(first.request_id, MAX_KEYS)))
    second = send_next(session, search)
    assert second.keys == MANY[MAX_KEYS : 2 * MAX_KEYS]
    session.receive_message(encode(wire.TiersFound(second.request_id, MAX_KEYS)))
    third = send_next(session, search)
    assert third.keys == MANY[2 * MAX_KEYS :]
    assert lookup(session, MANY[0], MANY[-1]) == [Lookup.RETRY, Lookup.RETRY]
    session.receive_message(encode(wire.TiersFound(third.request_id, 3)))
    assert (session.opened.follow_ups(NOW), search.found) == ([], 2 * MAX_KEYS + 3)
    assert lookup(session, MANY[0], MANY[-1]) == [Lookup.MISS, Lookup.MISS]
    search = TierSearch(MANY)
    session.opened.find_in_tiers(search, NOW)
    session.receive_message(encode(wire.TiersFound(third.request_id + 1, MAX_KEYS - 1)))
    # The keys behind the first that is absent are useless.
    assert (session.opened.follow_ups(NOW), search.found) == ([], MAX_KEYS - 1)


def test_a_search_that_ends_between_two_parts_has_found_the_first(session: ClientSession) -> None:
    ended, refused = TierSearch(MANY), TierSearch(MANY)
    session.opened.find_in_tiers(ended, NOW)
    session.receive_message(encode(wire.TiersFound(1, MAX_KEYS)))
    session.connection_lost(Gone(Code.DAEMON_GONE, "killed"))
    assert (session.opened.follow_ups(NOW), ended.found) == ([], MAX_KEYS)
    session.wire.gone = None
    session.opened.find_in_tiers(refused, NOW)
    session.receive_message(encode(wire.TiersFound(2, MAX_KEYS)))
    error = ErrorInfo(Code.BUSY, "too many searches")
    session.receive_message(encode(wire.Error(send_next(session, refused).request_id, error)))
    assert refused.found == MAX_KEYS


def test_each_part_has_a_deadline(session: ClientSession) -> None:
    session.opened.find_in_tiers(TierSearch(MANY), NOW)
    session.receive_message(encode(wire.TiersFound(1, MAX_KEYS)))
    session.opened.follow_ups(NOW + 0.9 * SEARCH_TIMEOUT)
    assert lookup(session, MANY[0], after=1.8 * SEARCH_TIMEOUT) == [Lookup.RETRY]
    assert lookup(session, MANY[0], after=2 * SEARCH_TIMEOUT) == [Lookup.MISS]


def test_a_prefetch_finds_the_keys_that_all_ranks_have() -> None:
    searches = TierSearch((A, B), found=2), TierSearch((A, B), found=1)
    assert (Prefetch(searches).done, Prefetch(searches).found_keys) == (True, (A,))
    assert not Prefetch((TierSearch((A,)),)).done
    assert (Prefetch().done, Prefetch().found_keys) == (True, ())
