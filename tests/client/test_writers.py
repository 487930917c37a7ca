"""Ranks with the same bytes whose daemons are siblings: one rank stores each key."""

from __future__ import annotations

from collections import Counter
from functools import partial
from hashlib import sha256
from typing import TypeAlias

import pytest

from kvferry.client import OffloadingManager
from kvferry.client.writers import RETRY_SECONDS, writer_of
from kvferry.proto import messages as wire
from support import client_keys
from support.client_keys import (
    FINGERPRINT,
    HIT,
    MISS,
    PENDING,
    RETRY,
    A,
    B,
    C,
    D,
    Start,
    answers,
    removed,
    stored,
)
from support.fake_daemon import FakeDaemon

# Rank 0 writes C and D, rank 1 writes A and B.


Ranks: TypeAlias = tuple[FakeDaemon, FakeDaemon]


@pytest.fixture
def ranks(start_fake_daemon: Start) -> Ranks:
    one, two = start_fake_daemon(), start_fake_daemon()
    one.stores_once = two.stores_once = True
    return one, two


open_manager = partial(client_keys.open_manager, events=True, replicated=True)


def searched(daemon: FakeDaemon) -> list[tuple[tuple[bytes, ...], float]]:
    found = daemon.received_of(wire.FindInTiers)
    return [(message.keys, message.compute_seconds) for message in found]


def reply_found(daemon: FakeDaemon, prefix: int) -> None:
    request = daemon.received_of(wire.FindInTiers)[-1].request_id
    daemon.send_to_client(wire.TiersFound(request, prefix))


def test_all_processes_choose_the_same_writer() -> None:
    keys = [sha256(bytes([number])).digest() + bytes(4) for number in range(4)]
    assert [writer_of(key, 2) for key in keys] == [0, 1, 1, 0]
    assert [writer_of(key, 4) for key in keys] == [2, 3, 1, 2]
    assert [writer_of(key, 8) for key in keys] == [2, 3, 1, 6]
    assert [writer_of(key, 2) for key in (A, B, C, D)] == [1, 1, 0, 0]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_writers_store_equal_shares(ranks: int) -> None:
    keys = [sha256(number.to_bytes(4, "big")).digest() for number in range(8000)]
    shares = Counter(writer_of(key, ranks) for key in keys)
    assert len(shares) == ranks
    assert max(shares.values()) < 1.2 * min(shares.values())


def test_a_key_is_stored_if_its_writer_has_it(ranks: Ranks) -> None:
    one, two = ranks
    two.store(A, C)
    two.reserve(B)
    manager = open_manager(*ranks)
    output = manager.prepare_store([A, B, C, D])
    assert output is not None
    assert (output.keys_to_store, output.writers) == ((C, D), 2)
    assert [spec.keys for spec in output.store_specs] == [(C, D), ()]
    assert [spec.keep for spec in output.store_specs] == [(A, B)] * 2
    assert answers(manager, B, C) == [PENDING, PENDING]
    one.store(C)
    assert answers(manager, C) == [HIT]


def test_a_key_that_only_its_writer_has_is_found(ranks: Ranks) -> None:
    one, two = ranks
    two.store(A)
    one.store(B)
    manager = open_manager(*ranks)
    assert answers(manager, A, B, C) == [MISS] * 3
    assert [manager.writers.is_at_writer(key) for key in (A, B, C)] == [True, False, False]
    manager.writers.search_writers([A, C], 0.5)
    assert [searched(daemon) for daemon in ranks] == [[((A, C), 0.5)]] * 2
    assert answers(manager, C) == [RETRY]
    assert manager.lookup(A) is not HIT
    one.reserve(A)
    for daemon in ranks:
        reply_found(daemon, 1)
    assert answers(manager, A, C) == [PENDING, MISS]
    one.store(A)
    assert answers(manager, A) == [HIT]


def test_what_no_writer_has_is_searched_below_by_its_writer(ranks: Ranks) -> None:
    one, two = ranks
    two.store(A)
    manager = open_manager(*ranks)
    assert manager.prefetch([A], 0.5).searches == ()
    prefetch = manager.prefetch([A, C, B, D], 0.5)
    assert [searched(daemon) for daemon in ranks] == [[((C, D), 1.0)], [((B,), 1.0)]]
    reply_found(one, 1)
    reply_found(two, 1)
    manager.poll()
    assert set(prefetch.found_keys) == {C, B}


def test_keys_are_not_divided_if_a_daemon_stores_what_siblings_have(ranks: Ranks) -> None:
    """The ranks have one namespace nevertheless."""
    ranks[1].stores_once = False
    ranks[1].store(A)
    manager = OffloadingManager.connect(
        [daemon.directory for daemon in ranks],
        engine="engine",
        fingerprint=FINGERPRINT,
        replicated=True,
    )
    opened = [daemon.received_of(wire.OpenNamespace)[0].fingerprint for daemon in ranks]
    assert opened == [FINGERPRINT] * 2
    output = manager.prepare_store([A, C])
    assert output is not None
    assert (output.keys_to_store, output.writers) == ((A, C), 1)
    assert not manager.writers.is_at_writer(A)


def test_only_the_writer_is_told_that_a_key_was_used(ranks: Ranks) -> None:
    manager = open_manager(*ranks)
    manager.touch([A, C, B, D])
    manager.flush()
    touched = [daemon.received_of(wire.Touch)[0].keys for daemon in ranks]
    assert touched == [(C, D), (A, B)]


def test_events_report_the_keys_of_the_writers(ranks: Ranks) -> None:
    one, two = ranks
    two.store(A)
    manager = open_manager(*ranks)
    assert manager.take_events() == [stored(A)]
    one.store(A, B)
    assert manager.take_events() == []
    one.evict(A)
    assert manager.take_events() == []
    two.evict(A)
    assert manager.take_events() == [removed(A)]


def test_if_a_rank_does_not_find_keys_all_ranks_store_all_keys_for_a_minute(ranks: Ranks) -> None:
    _, two = ranks
    two.store(A)
    now = 0.0
    manager = open_manager(*ranks)
    manager.writers._clock = lambda: now
    for found in (False, False, True, False, False):
        manager.writers.end_search(found=found)
    assert manager.writers.is_at_writer(A)
    manager.writers.end_search(found=False)
    assert not manager.writers.is_at_writer(A)
    output = manager.prepare_store([A, C])
    assert output is not None
    assert output.writers == 1
    assert [spec.keys for spec in output.store_specs] == [(A, C)] * 2
    now = RETRY_SECONDS
    assert manager.writers.is_at_writer(A)


def test_no_writer_is_searched_without_the_daemon_of_a_rank(ranks: Ranks) -> None:
    one, two = ranks
    two.store(A)
    manager = open_manager(*ranks)
    one.disconnected = True
    assert answers(manager, A) == [MISS]
    assert not manager.writers.is_at_writer(A)
