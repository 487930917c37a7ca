"""Retaining and releasing keys, by a client and by a manager."""

from __future__ import annotations

import math

import pytest

from kvferry.client import Code, OffloadClient, Refused
from kvferry.client.retentions import Retention
from kvferry.proto import messages as wire
from kvferry.proto.errors import ErrorInfo
from kvferry.proto.hints import Release, Retain
from kvferry.proto.specs import MAX_KEYS
from support.client_keys import A, B, C, Start, open_manager
from support.fake_daemon import FakeDaemon


def numbers(retention: Retention) -> tuple[int, ...]:
    return retention.kept, retention.missing, retention.clipped, retention.refused


def test_the_answer_arrives_while_the_client_is_polled(
    fake_daemon: FakeDaemon, tenant: OffloadClient
) -> None:
    fake_daemon.store(A, B)
    retention = tenant.retain([A, C, A], 60, "agent")
    assert (retention.done, retention.unanswered) == (False, 2)
    tenant.poll()
    assert (retention.done, numbers(retention)) == (True, (1, 1, 0, 0))
    (sent,) = fake_daemon.received_of(Retain)
    assert (sent.keys, sent.seconds, sent.label) == ((A, C), 60.0, "agent")
    tenant.release([A, B], "agent")
    assert fake_daemon.received_of(Release) == [Release((A, B), "agent")]


def test_many_keys_are_sent_in_prefix_order_and_released_from_the_end(
    fake_daemon: FakeDaemon, tenant: OffloadClient
) -> None:
    keys = [number.to_bytes(len(A), "big") for number in range(MAX_KEYS + 1)]
    retention = tenant.retain(keys, 1.0)
    tenant.release(keys)
    tenant.poll()
    assert numbers(retention) == (0, MAX_KEYS + 1, 0, 0)
    first, second = fake_daemon.received_of(Retain)
    assert (first.keys[0], second.keys) == (keys[0], (keys[-1],))
    assert [len(message.keys) for message in fake_daemon.received_of(Release)] == [1, MAX_KEYS]


def test_without_a_daemon_or_if_it_refuses_nothing_is_retained(
    fake_daemon: FakeDaemon, tenant: OffloadClient
) -> None:
    fake_daemon.store(A)
    fake_daemon.refusal = ErrorInfo(Code.BUSY, "later")
    refused = tenant.retain([A, B], 1.0)
    tenant.poll()
    assert numbers(refused) == (0, 0, 0, 2)
    fake_daemon.silent = True
    sent = tenant.retain([A], 1.0)
    fake_daemon.disconnected = True
    tenant.poll()
    later = tenant.retain([A, B], 1.0)
    tenant.release([A])
    assert [numbers(sent), numbers(later)] == [(0, 1, 0, 0), (0, 2, 0, 0)]
    assert sent.done
    assert later.done


@pytest.mark.parametrize("seconds", [0, -1.0, 3601, math.nan, math.inf, "60", None])
def test_wrong_times_are_refused(
    fake_daemon: FakeDaemon, tenant: OffloadClient, seconds: float
) -> None:
    with pytest.raises(Refused, match="seconds must be a number"):
        tenant.retain([A], seconds)
    with pytest.raises(Refused, match="label must be a text of 0 to 256 characters"):
        tenant.release([A], "x" * 257)
    with pytest.raises(Refused, match="keys of this namespace"):
        tenant.retain([b"short"], 1.0)
    assert not fake_daemon.received_of(Retain) + fake_daemon.received_of(Release)


def test_a_manager_asks_all_ranks(start_fake_daemon: Start) -> None:
    daemons = start_fake_daemon(), start_fake_daemon()
    manager = open_manager(*daemons)
    daemons[0].store(A)
    retentions = manager.retain([A, B], 5.0, "x")
    manager.poll()
    assert [*map(numbers, retentions)] == [(1, 1, 0, 0), (0, 2, 0, 0)]
    manager.close()


def test_touched_keys_are_sent_before_they_are_released(fake_daemon: FakeDaemon) -> None:
    manager = open_manager(fake_daemon)
    manager.touch([A])
    manager.release([A, B])
    assert [type(message) for message in fake_daemon.received[-2:]] == [wire.Touch, Release]
    manager.close()


def test_a_manager_knows_what_is_being_stored(fake_daemon: FakeDaemon) -> None:
    manager = open_manager(fake_daemon)
    manager.prepare_store([A])
    assert (manager.is_storing([B, A]), manager.is_storing([B])) == (True, False)
    manager.complete_store([A])
    assert not manager.is_storing([A])
    manager.close()
