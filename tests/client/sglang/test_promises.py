"""Promises to requests, with a real client and manager. No SGLang needed."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from kvferry.client import OffloadClient
from kvferry.client.sglang.promises import (
    HOLD_SECONDS,
    PROMISE_SECONDS,
    SILENT_SECONDS,
    PageKeys,
    Promises,
)
from kvferry.proto import messages as wire
from kvferry.proto.errors import Code, ErrorInfo
from kvferry.proto.keys import EventKind
from support.client_keys import A, B, C, D, Start, open_manager
from support.fake_daemon import FakeDaemon

E, F = b"eeee", b"ffff"
PAGES = [(A,), (B,), (C,)]


class Lookups:
    """The promises of a server of one rank, at a time that the test sets."""

    def __init__(self, daemon: FakeDaemon) -> None:
        self.daemon = daemon
        self.manager = open_manager(daemon)
        (client,) = self.manager.clients
        assert isinstance(client, OffloadClient)
        self.client, self.now = client, 100.0
        self.promises = Promises(client, self.manager, lambda: self.now)

    def find(
        self,
        rid: str,
        pages: Sequence[PageKeys] = PAGES,
        *windows: tuple[Sequence[PageKeys], int],
    ) -> list[int]:
        return self.promises.lookup(rid, pages, windows)

    def sent(self) -> list[wire.Pin | wire.Unpin]:
        """The pins, with an answer or without, and unpins since the last call."""
        messages = [
            each for each in self.daemon.received if isinstance(each, wire.Pin | wire.Unpin)
        ]
        self.daemon.received.clear()
        return messages

    def held(self) -> list[tuple[bytes, ...]]:
        """What was held since the last call; nothing was released."""
        messages = self.sent()
        assert all(isinstance(each, wire.Pin) for each in messages)
        return [each.keys for each in messages]

    def released(self) -> list[tuple[bytes, ...]]:
        messages = self.sent()
        return [each.keys for each in messages if isinstance(each, wire.Unpin)]

    @property
    def pinned(self) -> int:
        return self.client.namespace.pinned

    def reconnect(self) -> None:
        self.daemon.disconnected = True
        self.client.poll()
        assert self.client.gone is not None
        self.daemon.disconnected = False
        self.client.wait_connected()
        self.client.poll()


@pytest.fixture
def lookups(fake_daemon: FakeDaemon) -> Lookups:
    """Keys A and B are ready."""
    fake_daemon.store(A, B)
    return Lookups(fake_daemon)


# Lookups


def test_a_lookup_holds_what_it_returns(lookups: Lookups) -> None:
    assert lookups.find("r") == [1, 2]
    assert lookups.held() == [(A, B)]
    for _ in range(3):
        assert lookups.find("r") == [1, 2]
    assert lookups.sent() == []
    lookups.daemon.store(C)
    assert lookups.find("r") == [1, 2, 3]
    unpin, pin = lookups.sent()
    assert isinstance(unpin, wire.Unpin)
    assert isinstance(pin, wire.Pin)
    assert (unpin.keys, pin.keys) == ((A, B), (A, B, C))
    assert lookups.pinned == 3
    lookups.daemon.store(D)
    lookups.daemon.refusal = ErrorInfo(Code.BUSY, "too many pins")
    assert lookups.find("r", [*PAGES, (D,)]) == []
    assert lookups.pinned == 0
    assert not lookups.promises.claim("r")


def test_nothing_found_holds_nothing(lookups: Lookups) -> None:
    assert lookups.find("r", [(C,), (A,)]) == lookups.find("r", []) == []
    assert lookups.sent() == []
    assert not lookups.promises.claim("r")


def test_a_page_of_several_keys_counts_only_whole(lookups: Lookups) -> None:
    lookups.daemon.store(C)
    assert lookups.find("r", [(A, B), (C, D)]) == [1]
    assert lookups.held() == [(A, B)]
    lookups.daemon.store(D)
    assert lookups.find("r", [(A, B), (C, D)]) == [1, 2]


def test_requests_hold_their_keys_by_themselves(lookups: Lookups) -> None:
    lookups.find("one")
    lookups.find("two", [(A,)])
    lookups.promises.claim("one")
    lookups.promises.done("one")
    assert lookups.pinned == 1
    assert lookups.promises.claim("two")
    lookups.promises.done("two")
    assert lookups.pinned == 0


# Keys that the daemon has evicted


@pytest.mark.parametrize(
    ("stored", "evicted", "pages", "windows", "promised"),
    [
        ((C,), B, PAGES, (), [1]),
        ((C, D), D, [(A, B), (C, D)], (), [1]),
        ((), A, PAGES, (), []),
        ((D,), D, [(A,), (B,)], [([(E,), (D,)], 1)], []),
    ],
)
def test_an_evicted_key_shortens_what_is_promised(
    lookups: Lookups,
    stored: tuple[bytes, ...],
    evicted: bytes,
    pages: list[PageKeys],
    windows: list[tuple[list[PageKeys], int]],
    promised: list[int],
) -> None:
    """The mirror still has it."""
    lookups.daemon.store(*stored)
    lookups.manager.poll()
    lookups.daemon.lossy = True
    lookups.daemon.evict(evicted)
    lookups.daemon.lossy = False
    assert lookups.find("r", pages, *windows) == promised
    assert lookups.promises.claim("r") == bool(promised)
    lookups.promises.done("r")
    assert lookups.pinned == 0


# Windows


def test_only_lengths_that_end_with_a_state_are_promised(lookups: Lookups) -> None:
    states = [(D,), (E,), (F,)]
    assert lookups.find("r", PAGES, (states, 1)) == []
    assert lookups.sent() == []
    lookups.daemon.store(C, E)
    assert lookups.find("r", PAGES, (states, 1)) == [2]
    assert lookups.held() == [(A, B, E)]


def test_a_sliding_window_needs_its_last_pages(lookups: Lookups) -> None:
    lookups.daemon.store(C, E, F)
    window = [(D,), (E,), (F,)]
    assert lookups.find("r", PAGES, (window, 2)) == [3]
    assert lookups.held() == [(A, B, C, E, F)]
    lookups.daemon.store(D)
    assert lookups.find("r", PAGES, (window, 2)) == [1, 2, 3]
    assert lookups.released() == [(A, B, C, E, F)]
    assert lookups.pinned == 6


# Daemons that do not answer


def test_a_daemon_that_does_not_answer_costs_one_wait(lookups: Lookups) -> None:
    lookups.daemon.silent = True
    began = time.monotonic()
    assert lookups.find("r") == []
    assert time.monotonic() - began >= HOLD_SECONDS
    lookups.sent()
    lookups.now += SILENT_SECONDS - 0.1
    assert lookups.find("r") == lookups.find("other") == []
    assert lookups.sent() == []
    assert not lookups.promises.claim("r")
    assert lookups.pinned == 0
    lookups.daemon.silent = False
    lookups.now += 0.2
    assert lookups.find("r") == [1, 2]


def test_a_refused_hold_is_a_miss(lookups: Lookups) -> None:
    lookups.daemon.refusal = ErrorInfo(Code.BUSY, "too many pins")
    assert lookups.find("r") == []
    lookups.daemon.refusal = None
    assert lookups.find("r") == []
    lookups.now += SILENT_SECONDS
    assert lookups.find("r") == [1, 2]


# The end of promises


def test_a_claimed_promise_is_held_until_its_load_has_ended(lookups: Lookups) -> None:
    lookups.find("r")
    lookups.sent()
    assert lookups.promises.claim("r")
    assert not lookups.promises.claim("r")
    lookups.now += 2 * PROMISE_SECONDS
    lookups.promises.expire(lookups.now)
    assert lookups.sent() == []
    lookups.promises.done("r")
    lookups.promises.done("r")
    assert lookups.released() == [(A, B)]


def test_a_promise_ends_if_its_request_is_not_looked_up_again(lookups: Lookups) -> None:
    lookups.find("waits", [(A,)])
    lookups.find("leaves")
    lookups.now += 0.75 * PROMISE_SECONDS
    lookups.find("waits", [(A,)])
    lookups.sent()
    lookups.now += 0.5 * PROMISE_SECONDS
    lookups.find("another", [(D,)])
    assert lookups.released() == [(A, B)]
    assert not lookups.promises.claim("leaves")
    assert lookups.promises.claim("waits")


@pytest.mark.parametrize("how", ["reconnected", "reset", "disconnected"])
def test_a_promise_that_does_not_hold(lookups: Lookups, how: str) -> None:
    lookups.find("r")
    if how == "reconnected":
        lookups.reconnect()
    elif how == "reset":
        lookups.daemon.send_events((EventKind.CLEARED,))
        lookups.daemon.store(A, B)
    else:
        lookups.daemon.disconnected = True
    lookups.manager.poll()
    assert not lookups.promises.claim("r")
    assert lookups.pinned == 0
    lookups.sent()
    assert lookups.find("r") == ([] if how == "disconnected" else [1, 2])
    assert lookups.promises.claim("r") == (how != "disconnected")


def test_a_promise_of_another_session_is_renewed(lookups: Lookups) -> None:
    lookups.find("waits", [(A,)])
    lookups.find("r")
    lookups.reconnect()
    lookups.sent()
    assert lookups.find("r") == [1, 2]
    assert len(lookups.sent()) == 2
    assert lookups.promises.claim("r")
    lookups.promises.end_all()
    assert lookups.pinned == 0
    assert not lookups.promises.claim("waits")


# Counts and tiers


def test_a_lookup_is_counted_once(lookups: Lookups) -> None:
    for _ in range(3):
        lookups.find("r", [(A, B), (C, D)])
    assert (lookups.manager.hits, lookups.manager.misses) == (2, 2)
    lookups.find("r", [(A, B), (C, D), (E, F)])  # it has grown
    assert (lookups.manager.hits, lookups.manager.misses) == (4, 6)
    lookups.manager.flush()
    (touch,) = lookups.daemon.received_of(wire.Touch)
    assert touch.keys == (A, B, C, D, E, F)


def test_what_the_pool_lacks_is_searched_once(start_fake_daemon: Start) -> None:
    daemon = start_fake_daemon()
    daemon.stores_once = True
    daemon.store(A)
    lookups = Lookups(daemon)
    assert lookups.find("r") == lookups.find("r") == [1]  # no answer in time
    (search,) = daemon.received_of(wire.FindInTiers)
    assert search.keys == (B, C)
    daemon.send_events((EventKind.STORED, B))
    daemon.send_to_client(wire.TiersFound(search.request_id, 1))
    assert lookups.find("r") == [1, 2]
    assert len(daemon.received_of(wire.FindInTiers)) == 1
    lookups.find("other", [(D,)], ([(E,)], 1))
    assert daemon.received_of(wire.FindInTiers)[-1].keys == (D, E)


def test_an_answer_in_time_is_promised_at_once(
    start_fake_daemon: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = start_fake_daemon()
    daemon.stores_once = True
    reply = daemon._reply

    def answer(message: wire.ClientMessage) -> None:
        reply(message)
        if isinstance(message, wire.FindInTiers):
            daemon.send_events((EventKind.STORED, *message.keys))
            daemon.send_to_client(wire.TiersFound(message.request_id, len(message.keys)))

    monkeypatch.setattr(daemon, "_reply", answer)
    assert Lookups(daemon).find("r") == [1, 2, 3]
