"""The scheduler's side over a fake daemon, without vLLM."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from kvferry.client import Code
from kvferry.client.vllm import request_state
from kvferry.client.vllm.scheduler_side import (
    MAX_LOADS,
    KeysSpec,
    SchedulerSide,
    StoreOutput,
)
from kvferry.proto import messages as wire
from kvferry.proto.errors import ErrorInfo, Refused
from kvferry.proto.keys import EventKind
from support.fake_daemon import FakeDaemon
from support.scheduler_helpers import LOOKUP_CODES, A, B, C, D, answers, open_side, until
from support.time_limits import TIMEOUT
from support.vllm_stand_ins import engine_config_at, request


@pytest.fixture
def side(fake_daemon: FakeDaemon) -> SchedulerSide:
    """Over a daemon that has A, and stores B."""
    fake_daemon.store(A)
    fake_daemon.reserve(B)
    opened = open_side(fake_daemon)
    fake_daemon.received.clear()
    return opened


# Lookups


def test_lookups_return_the_codes_of_vllm(fake_daemon: FakeDaemon, side: SchedulerSide) -> None:
    assert answers(side, A, B, C, A) == ["hit", "pending", "miss", "hit"]


def test_the_first_lookup_of_a_step_receives_events(
    fake_daemon: FakeDaemon, side: SchedulerSide
) -> None:
    assert answers(side, A) == ["hit"]
    fake_daemon.evict(A)
    side.on_schedule_end()
    assert answers(side, A) == ["miss"]


def test_lookups_are_counted(fake_daemon: FakeDaemon, side: SchedulerSide) -> None:
    answers(side, A, A, A, C)
    side.on_schedule_end()
    assert fake_daemon.received == [wire.Touch((), 3, 1)]


@pytest.mark.parametrize(
    ("seconds", "waited", "answer"),
    [
        (0.0, 1.9, "pending"),
        (0.0, 2.1, "miss"),
        (0.1, 0.15, "pending"),
        (0.1, 0.35, "miss"),
        (0.3, 0.5, "pending"),
        (0.3, 0.7, "miss"),
        (9.0, 1.9, "pending"),
        (9.0, 2.1, "miss"),
    ],
)
def test_a_request_waits_no_longer_than_computing_its_keys_takes(
    side: SchedulerSide, seconds: float, waited: float, answer: str
) -> None:
    """seconds: of each of two keys."""
    side.request_arrived("request", [B, D], seconds)
    assert answers(side, B) == ["pending"]
    side._request.since -= waited
    assert answers(side, B) == [answer]


def test_a_request_that_loaded_max_loads_times_computes(side: SchedulerSide) -> None:
    for _ in range(MAX_LOADS):
        assert answers(side, A) == ["hit"]
        side.prepare_load([A], request())
        side.complete_load({A}, request())
        side.on_schedule_end()
    assert answers(side, A, name="another") == ["hit"]
    assert answers(side, A) == ["miss"]
    side.on_request_finished(request())
    assert answers(side, A) == ["hit"]


def test_a_waiting_request_touches_its_keys_once_per_interval(
    fake_daemon: FakeDaemon, side: SchedulerSide
) -> None:
    def step() -> list[tuple[bytes, ...]]:
        """The keys that a step touches, of two groups."""
        fake_daemon.received.clear()
        answers(side, A)
        side.touch([A, B], request())
        side.touch([C], request())
        side.on_schedule_end()
        return [touch.keys for touch in fake_daemon.received_of(wire.Touch) if touch.keys]

    assert step() == [(C, A, B)]
    assert step() == []
    side.touch([A, B, D], request())  # it grew
    assert step() == [(A, B, D)]
    side.begin_lookups("another")
    side.touch([A, B], request("another"))
    assert step() == [(A, B)]
    side._touch_interval = 0.0
    assert step() == [(C, A, B)]


# Loads


def test_keys_of_a_load_are_pinned_until_the_step_after_it(
    fake_daemon: FakeDaemon, side: SchedulerSide
) -> None:
    fake_daemon.store(C)
    answers(side, A, C)
    side.touch([A, C], request())
    assert side.prepare_load([A, C], request()) == KeysSpec((A, C))
    side.on_schedule_end()
    assert fake_daemon.received == [
        wire.Pin((A, C))
    ]  # touches are sent later: nobody waits for them
    side.on_schedule_end()
    assert fake_daemon.received[1:] == [wire.Touch((A, C), 2, 0)]
    side.complete_load({C, A}, request())
    assert side.has_pending_work()
    side.on_schedule_end()
    assert len(fake_daemon.received) == 2
    side.on_schedule_end()
    assert fake_daemon.received[2:] == [wire.Unpin((A, C))]
    assert not side.has_pending_work()


def test_keys_are_unpinned_although_every_step_loads(
    fake_daemon: FakeDaemon, side: SchedulerSide
) -> None:
    for number in range(6):
        name = str(number)
        side.prepare_load([A], request(name))
        side.on_schedule_end()
        side.complete_load({A}, request(name))
    assert len(fake_daemon.received_of(wire.Unpin)) >= 4


def test_a_load_of_an_absent_key_pins_nothing(fake_daemon: FakeDaemon, side: SchedulerSide) -> None:
    assert side.prepare_load([A, D], request()) == KeysSpec((A, D))
    side.complete_load({A, D}, request())
    side.on_schedule_end()
    side.on_schedule_end()
    assert not fake_daemon.received_of(wire.Pin)
    assert not fake_daemon.received_of(wire.Unpin)
    assert side._manager.gone is None


def test_a_reset_unpins_loads_that_are_not_completed(
    fake_daemon: FakeDaemon, side: SchedulerSide
) -> None:
    fake_daemon.store(C)
    answers(side, A, C)
    side.prepare_load([C], request("completed"))
    side.complete_load({C}, request("completed"))
    side.prepare_load([A], request())
    for _ in range(2):
        side.reset_cache()
        assert answers(side, A) == ["miss"]
        for _ in range(3):
            side.on_schedule_end()
    assert fake_daemon.received_of(wire.Unpin) == [wire.Unpin((C,)), wire.Unpin((A,))]
    assert side._manager.gone is None


def reconnect(fake_daemon: FakeDaemon, side: SchedulerSide) -> None:
    """Disconnect the daemon, and let it return with all its keys."""
    fake_daemon.disconnected = True
    assert answers(side, A) == ["miss"]
    side.on_schedule_end()
    fake_daemon.disconnected = fake_daemon.closed = False
    fake_daemon.received.clear()


def test_a_reset_without_a_daemon_is_sent_after_reconnecting(
    fake_daemon: FakeDaemon, side: SchedulerSide
) -> None:
    """Its pool has blocks of the weights before the reset."""
    fake_daemon.disconnected = True
    assert answers(side, A) == ["miss"]
    side.reset_cache()
    assert not side.is_resetting()  # a lost daemon is not waited for
    reconnect(fake_daemon, side)
    until(lambda: "hit" in answers(side, A) or bool(fake_daemon.received_of(wire.Reset)), side)
    assert answers(side, A) == ["miss"]
    until(lambda: not fake_daemon.ready, side)
    fake_daemon.store(A)
    until(lambda: answers(side, A) == ["hit"], side)
    assert len(fake_daemon.received_of(wire.Reset)) == 1


# Stores


def test_nothing_is_offered_until_a_reset_is_done(
    fake_daemon: FakeDaemon, side: SchedulerSide
) -> None:
    assert not side.is_resetting()
    fake_daemon.slow = True
    side.reset_cache()
    assert side.is_resetting()
    assert side.prepare_store([C], request()) == StoreOutput([], KeysSpec(()), [])
    assert side.is_resetting(ended={"ended"})
    assert side.prepare_store([D], request("ended")).keys_to_store == [D]
    side._reset_due = 0.0  # the daemon hangs
    assert not side.is_resetting()
    assert not side.prepare_store([C], request()).keys_to_store
    fake_daemon.finish_resets()
    assert not side.is_resetting()
    assert side.prepare_store([C], request()).keys_to_store == [C]


def test_stores_name_the_epoch_of_each_rank(side: SchedulerSide) -> None:
    output = side.prepare_store([A, C, D], request())
    assert output.keys_to_store == [C, D]
    assert output.store_spec == KeysSpec((C, D), (0,), (A,))
    assert output.store_spec.epoch(0) == 0
    assert answers(side, C) == ["pending"]
    side.complete_store({C, D}, request())
    assert answers(side, C) == ["miss"]


def test_a_store_without_room_or_daemon_is_an_empty_store(
    fake_daemon: FakeDaemon, side: SchedulerSide
) -> None:
    """If the output is None, vLLM warns and offers the same keys in every step."""
    nothing = StoreOutput([], KeysSpec(()), [])
    assert side.prepare_store([bytes([n]) * 8 for n in range(9)], request()) == nothing
    assert side.prepare_store([C], request()).keys_to_store == [C]
    fake_daemon.disconnected = True
    assert side.prepare_store([D], request()).keys_to_store == []
    assert side.prepare_store([D], request()) == nothing
    side.handle_error(Refused(Code.BAD_KEY, "not as long"))
    assert side.prepare_store([D], request()) == nothing


# Ranks


def test_a_key_is_a_hit_if_every_rank_has_it(
    start_fake_daemon: Callable[..., FakeDaemon],
) -> None:
    one, two = start_fake_daemon(), start_fake_daemon()
    folders = str(one.directory), str(two.directory)
    place = replace(engine_config_at(one.directory), world_size=2, directories=folders)
    side = SchedulerSide(place, LOOKUP_CODES, events=False)
    one.store(A, B)
    two.store(B)
    two.send_events((EventKind.CLEARED,))
    two.store(A)
    side.request_arrived(request().req_id, [A, B], 0.0)
    assert answers(side, A, B, A) == ["hit", "miss", "hit"]
    output = side.prepare_store([A, B], request())
    assert output.keys_to_store == [B]
    assert [output.store_spec.epoch(rank) for rank in (0, 1)] == [0, 1]
    side.prepare_load([A], request())
    assert one.received_of(wire.Pin) == two.received_of(wire.Pin) == [wire.Pin((A,))]
    two.evict(A)
    side.on_schedule_end()
    assert answers(side, A) == ["miss"]


def test_a_key_that_only_its_writer_has_is_searched_when_a_request_looks_it_up(
    start_fake_daemon: Callable[..., FakeDaemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a rank does not find a key for three requests, all ranks store all keys. Rank 0 writes A.

    A request may look it up in many steps, while it waits for another key.
    """
    one, two = start_fake_daemon(), start_fake_daemon()
    one.stores_once = two.stores_once = True
    monkeypatch.setattr(request_state, "SEARCH_SECONDS", TIMEOUT)
    folders = str(one.directory), str(two.directory)
    config = replace(
        engine_config_at(one.directory), world_size=2, directories=folders, replicated=True
    )
    side = SchedulerSide(config, LOOKUP_CODES, events=False)
    one.store(A)
    assert side.prepare_store([A, B, D], request()).store_spec == KeysSpec((B, D), (0, 0), (A,), 2)
    side.request_arrived("request", [A, C], 0.5)
    assert [len(daemon.received_of(wire.FindInTiers)) for daemon in (one, two)] == [1, 0]
    assert answers(side, A) == ["retry"]
    (search,) = two.received_of(wire.FindInTiers)
    assert (search.keys, search.compute_seconds) == ((A, C), 0.5)
    two.store(A)
    two.send_to_client(wire.TiersFound(search.request_id, 1))
    side.on_schedule_end()
    assert answers(side, A) == ["hit"]
    two.evict(A)
    side.on_schedule_end()
    assert answers(side, A) == ["retry"]
    monkeypatch.setattr(request_state, "SEARCH_SECONDS", 0.0)
    for name in ("request", "second", "third"):
        assert not side.prepare_store([A], request()).keys_to_store
        if name != "request":
            assert answers(side, A, name=name) == ["retry"]
        search = two.received_of(wire.FindInTiers)[-1]
        two.send_to_client(wire.TiersFound(search.request_id, 0))
        for _ in range(3):
            side.on_schedule_end()
            assert answers(side, A, name=name) == ["miss"]
    assert side.prepare_store([A], request()).store_spec == KeysSpec((A,), (0, 0), (), 1)
    side.shutdown()


# Events


def events_of(side: SchedulerSide) -> list[tuple[set[bytes], bool]]:
    return [(set(event.keys), event.removed) for event in side.events() or ()]


def test_all_keys_are_removed_once_the_daemon_is_lost(fake_daemon: FakeDaemon) -> None:
    fake_daemon.store(A, B)
    side = open_side(fake_daemon, events=True)
    assert events_of(side) == [({A, B}, False)]
    fake_daemon.disconnected = True
    assert answers(side, A) == ["miss"]
    side.on_schedule_end()
    assert answers(side, A) == ["miss"]
    assert events_of(side) == [({A, B}, True)]
    assert events_of(side) == []


def test_after_reconnecting_events_are_the_differences(fake_daemon: FakeDaemon) -> None:
    fake_daemon.store(A, B)
    side = open_side(fake_daemon, events=True)
    assert events_of(side) == [({A, B}, False)]
    reconnect(fake_daemon, side)
    fake_daemon.evict(A)
    fake_daemon.store(C)
    until(lambda: answers(side, C) == ["hit"], side)
    assert events_of(side) == [({A}, True), ({C}, False)]
    fake_daemon.evict(B)
    assert events_of(side) == [({B}, True)]


# Errors


@pytest.mark.parametrize("verb", ["prepare_store", "prepare_load", "touch"])
def test_keys_of_another_length_turn_offloading_off(
    side: SchedulerSide, verb: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "kvferry"):
        getattr(side, verb)([b"too short"], request())
        getattr(side, verb)([b"too short"], request())
    assert len(caplog.records) == 1
    assert "offloading is off" in caplog.text
    assert answers(side, A) == ["miss"]
    assert not side.prepare_store([C], request()).keys_to_store
    side.complete_load({A}, request())
    side.complete_store({A}, request())
    side.on_schedule_end()
    side.reset_cache()
    assert side.events() == []
    side.shutdown()


def test_an_unrequested_error_ends_only_the_connection(
    fake_daemon: FakeDaemon, side: SchedulerSide
) -> None:
    fake_daemon.send_to_client(wire.Error(None, ErrorInfo(Code.NO_SESSION, "who are you?")))
    assert answers(side, A) == ["miss"]
    deadline = time.monotonic() + TIMEOUT
    while answers(side, A) != ["hit"] and time.monotonic() < deadline:
        side.on_schedule_end()
        fake_daemon.closed = False
    assert answers(side, A) == ["hit"]
