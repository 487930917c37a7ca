"""Quotas for live and new connections, per user and in total."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kvferry.daemon.access import connections as module
from kvferry.daemon.access.admission import Admission, Credentials
from kvferry.daemon.access.connections import ALL_USERS, PER_USER, Connections, Decision, Quota
from kvferry.proto.errors import Code, Refused

OWN = os.geteuid(), os.getegid(), os.getpid()
SMALL_QUOTA = Quota(live=3, per_second=0.5, burst=2)


class ManualClock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def sockets() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def connect(sockets: ExitStack) -> tuple[socket.socket, int]:
    """A connection of this process: the client's socket and the daemon's descriptor."""
    server, client = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    sockets.enter_context(server)
    sockets.enter_context(client)
    return client, server.fileno()


@pytest.mark.parametrize(("quota", "days"), [(PER_USER, 90), (ALL_USERS, 21)])
def test_a_collision_of_routing_ids_takes_weeks(quota: Quota, days: int) -> None:
    """On average, if an attacker uses the whole quota. An id has 32 bits."""
    assert 2**32 / (2 * quota.live * quota.per_second) / 86_400 > days


def test_new_connections_wait_after_the_burst() -> None:
    clock = ManualClock()
    connections = Connections(Admission(), SMALL_QUOTA, Quota(9, 9.0, 9), clock)
    decisions = [connections.decide_admission(*OWN) for _ in range(3)]
    assert decisions == [Decision.ADMIT, Decision.ADMIT, Decision.LATER]
    clock.now = 1.9
    assert connections.decide_admission(*OWN) is Decision.LATER
    clock.now = 2.1
    assert connections.decide_admission(*OWN) is Decision.ADMIT


def test_connection_bursts_are_bounded_per_user_and_in_total() -> None:
    connections = Connections(
        Admission(str(os.getegid())), SMALL_QUOTA, Quota(9, 1.0, 3), ManualClock()
    )
    gid = os.getegid()
    decisions = [connections.decide_admission(uid, gid, 1) for uid in (501, 501, 501, 502, 502)]
    admit, later = Decision.ADMIT, Decision.LATER
    assert decisions == [admit, admit, later, admit, later]


def test_a_connection_above_the_quota_is_closed(sockets: ExitStack) -> None:
    connections = Connections(Admission(), Quota(2, 9.0, 9), Quota(9, 9.0, 9), ManualClock())
    ends = [connect(sockets) for _ in range(3)]
    for _, descriptor in ends:
        connections.add_connection(descriptor)
    assert ends[2][0].recv(1) == b""
    assert connections.decide_admission(*OWN) is Decision.LATER
    connections.remove_connection(ends[2][1])
    assert connections.decide_admission(*OWN) is Decision.ADMIT


def test_a_descriptor_that_is_added_again_counts_once(sockets: ExitStack) -> None:
    connections = Connections(Admission(), Quota(1, 9.0, 9), Quota(9, 9.0, 9), ManualClock())
    _, descriptor = connect(sockets)
    for _ in range(3):
        connections.add_connection(descriptor)
    assert connections.decide_admission(*OWN) is Decision.ADMIT


def test_a_forbidden_user_does_not_use_up_the_quota() -> None:
    connections = Connections(Admission(), SMALL_QUOTA, SMALL_QUOTA, ManualClock())
    for _ in range(5):
        with pytest.raises(Refused) as caught:
            connections.decide_admission(4711, 4711, 1)
        assert (caught.value.code, caught.value.value) == (Code.FORBIDDEN, "4711")
    assert connections.decide_admission(*OWN) is Decision.ADMIT


def test_processes_that_look_alike_are_admitted_if_all_are_in_the_group(
    sockets: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In other PID namespaces, all processes of a user have pid 0."""
    connections = Connections(Admission("64240"), SMALL_QUOTA, SMALL_QUOTA, ManualClock())
    member = Credentials(501, 501, 0, frozenset({64240, 7}))
    stranger = Credentials(501, 501, 0, frozenset({7}))
    found = iter([member, member, stranger])
    monkeypatch.setattr(module, "credentials_of", lambda _: next(found))
    descriptors = [connect(sockets)[1] for _ in range(3)]
    for descriptor in descriptors[:2]:
        connections.add_connection(descriptor)
    assert connections.decide_admission(501, 501, 0) is Decision.ADMIT
    connections.add_connection(descriptors[2])
    with pytest.raises(Refused) as caught:
        connections.decide_admission(501, 501, 0)
    assert caught.value.code == Code.FORBIDDEN
    connections.remove_connection(descriptors[2])
    assert connections.decide_admission(501, 501, 0) is Decision.ADMIT
