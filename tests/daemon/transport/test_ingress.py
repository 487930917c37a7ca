"""Ingress: order of messages, fairness between clients, bounded queues, closed connections."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from kvferry.daemon.access.admission import Admission
from kvferry.daemon.access.connections import Connections
from kvferry.daemon.transport.ingress import READ, TURN, Frames, Ingress
from kvferry.daemon.transport.peers import Peer, Peers
from kvferry.proto.protocol import make_hello
from support.time_limits import TIMEOUT

HELLO = make_hello("a client", "an engine")
# Messages arrive at once with inproc, but its connections have no descriptors and no credentials.
INPROC = "inproc://router"
LOOP_RAN = b"the loop ran all other callbacks"
CLOSED = b"connection closed"


class IngressFixture:
    """A ROUTER and its ingress. events: received messages, and reasons of disconnects.

    costs: seconds to serve a message, by the clock of the ingress. unknown: messages from
    connections without a session.
    """

    def __init__(self, path: Path) -> None:
        self.context = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        self.router, self.ipc = self._socket(zmq.ROUTER), f"ipc://{path}"
        self.router.bind(INPROC)
        self.router.bind(self.ipc)
        self.events: list[bytes] = []
        self.unknown: list[bytes] = []
        self.accepted: list[int] = []
        self.costs: dict[bytes, float] = {}
        self.now = 0.0
        self.on_receive: Callable[[bytes], None] = lambda _: None
        self.peers = Peers(self.disconnect_client)
        accept_gate: Any = SimpleNamespace(connection_accepted=self.accepted.append)
        self.ingress = Ingress(
            self.router, self.peers, accept_gate, Connections(Admission()), self, lambda: self.now
        )

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        created = self.context.socket(kind)
        self._sockets.append(created)
        created.setsockopt(zmq.SNDHWM, 0)
        created.setsockopt(zmq.RCVHWM, 0)
        return created

    def client(self, address: str = INPROC, session: str = "s") -> zmq.Socket[bytes]:
        """Connect a peer of this session."""
        dealer = self._socket(zmq.DEALER)
        dealer.connect(address)
        dealer.send(b"hello")
        assert self.router.poll(10_000)
        identity, frame = self.router.recv(), self.router.recv(copy=False)
        if address != INPROC:
            self.peers.add_peer(session, identity, frame, HELLO)
            return dealer
        pidfd = os.pidfd_open(os.getpid())
        peer = Peer(session, identity, 0, os.getpid(), pidfd, -1, HELLO.client, HELLO.engine)
        self.peers.by_session[session] = self.peers.by_identity[identity] = peer
        return dealer

    # MessageHandler

    def receive_message(self, identity: bytes, peer: Peer | None, frames: Frames) -> None:
        data = b"".join(frame.bytes for frame in frames)
        (self.events if peer is not None else self.unknown).append(data)
        self.now += self.costs.get(data, 1e-5)
        self.on_receive(data)

    def disconnect_client(self, peer: Peer, reason: str) -> None:
        self.events.append(reason.encode())
        self.ingress.drop_messages(peer)
        self.peers.remove_peer(peer.session)

    async def until(self, ready: Callable[[], bool]) -> None:
        """Run the loop until ready() is true. Adds LOOP_RAN to `events` after each iteration."""
        async with asyncio.timeout(TIMEOUT):
            while not ready():
                await asyncio.sleep(0)
                self.events.append(LOOP_RAN)

    def received(self) -> list[bytes]:
        return [event for event in self.events if event != LOOP_RAN]

    def longest(self) -> int:
        """The largest number of messages between two LOOP_RAN."""
        return max(len(list(run)) for ran, run in groupby(self.events, LOOP_RAN.__eq__) if not ran)

    def close(self) -> None:
        if not self.router.closed:
            self.ingress.close()
        self.peers.close()
        for opened in self._sockets:
            opened.close(0)
        self.context.term()


@pytest.fixture
async def fixture(tmp_path: Path) -> AsyncIterator[IngressFixture]:
    fixture = IngressFixture(tmp_path / "router.sock")
    yield fixture
    fixture.close()


def count(fixture: IngressFixture, data: bytes) -> int:
    return fixture.events.count(data)


async def test_a_client_that_always_sends_uses_bounded_time_per_loop_iteration(
    fixture: IngressFixture,
) -> None:
    """All messages are read, although the descriptor of the socket signals each change once."""
    client = fixture.client()
    fixture.costs[b"more"] = TURN / 8
    for _ in range(10 * READ):
        client.send(b"more")
    fixture.ingress.start()
    await fixture.until(lambda: count(fixture, b"more") == 10 * READ)
    assert fixture.longest() <= 2 * 9  # a turn by the descriptor, and a turn that was due


async def test_two_clients_get_equal_shares_of_time(
    fixture: IngressFixture,
) -> None:
    """Neither the number of waiting messages nor the order in which they arrived has an effect."""
    slow, quick = fixture.client(session="slow"), fixture.client(session="quick")
    fixture.costs |= {b"slow": 0.3, b"quick": 0.001}
    for _ in range(10):
        slow.send(b"slow")
    for _ in range(1000):
        quick.send(b"quick")
    fixture.ingress.start()
    await fixture.until(lambda: len(fixture.received()) == 1010)
    runs = [(data, len(list(run))) for data, run in groupby(fixture.received())]
    slow_runs = [number for data, number in runs if data == b"slow"]
    quick_runs = [number for data, number in runs if data == b"quick"]
    assert slow_runs == [1, 1, 1, 1, 6]  # no other client sends at the end
    assert all(290 <= number <= 310 for number in quick_runs[-3:-1])


async def test_a_client_with_one_request_at_a_time_waits_for_one_message_at_most(
    fixture: IngressFixture,
) -> None:
    """The other clients always send another expensive message at once."""
    modest = fixture.client(session="modest")
    slow = {b"slow %d" % number: fixture.client(session=str(number)) for number in range(2)}
    fixture.costs |= zip(slow, (0.3, 0.31), strict=True)

    def send_again(data: bytes) -> None:
        slow.get(data, modest).send(data)

    fixture.on_receive = send_again
    for data, client in slow.items():
        client.send(data)
    fixture.ingress.start()
    await fixture.until(lambda: len(fixture.received()) > 4)
    fixture.events.clear()
    modest.send(b"quick")
    await fixture.until(lambda: count(fixture, b"quick") > 100)
    between = [
        len(list(run)) for quick, run in groupby(fixture.received(), b"quick".__eq__) if not quick
    ]
    assert max(between) == 1


async def test_idle_time_gives_no_credit(fixture: IngressFixture) -> None:
    early, late = fixture.client(session="early"), fixture.client(session="late")
    fixture.costs |= {b"early": 0.01, b"late": 0.01}
    late.send(b"late")
    fixture.ingress.start()
    await fixture.until(lambda: count(fixture, b"late") == 1)
    for _ in range(1000):
        early.send(b"early")
    await fixture.until(lambda: count(fixture, b"early") > 500)
    fixture.events.clear()
    for _ in range(100):
        late.send(b"late")
    await fixture.until(lambda: count(fixture, b"late") == 100)
    assert 98 <= count(fixture, b"early") <= 102


@pytest.mark.parametrize(("name", "limit"), [("max_waiting", 10), ("max_waiting_bytes", 1000)])
async def test_waiting_messages_are_bounded(fixture: IngressFixture, name: str, limit: int) -> None:
    setattr(fixture.ingress, name, limit)
    client, waiting = fixture.client(), list[int]()
    fixture.on_receive = lambda _: waiting.append(fixture.ingress._count)
    numbers = [b"%0100d" % number for number in range(500)]
    for number in numbers:
        client.send(number)
    fixture.ingress.start()
    await fixture.until(lambda: len(fixture.received()) == 500)
    assert fixture.received() == numbers
    assert max(waiting) == 9
    assert (fixture.ingress._count, fixture.ingress._nbytes) == (0, 0)


async def test_waiting_messages_of_a_disconnected_client_are_dropped(
    fixture: IngressFixture,
) -> None:
    client = fixture.client()
    (peer,) = fixture.peers.by_session.values()
    fixture.on_receive = lambda _: fixture.disconnect_client(peer, "it died")
    for _ in range(10):
        client.send(b"more")
    fixture.ingress.start()
    await asyncio.sleep(0.01)
    assert (fixture.received(), fixture.unknown) == ([b"more", b"it died"], [])
    assert (fixture.ingress._count, fixture.ingress._nbytes) == (0, 0)


async def test_messages_are_received_before_the_end_of_their_connection(
    fixture: IngressFixture,
) -> None:
    """Otherwise the last messages of a client that closes its socket would be lost."""
    client = fixture.client(fixture.ipc)
    fixture.ingress.handle_connections()
    for _ in range(4 * READ):
        client.send(b"last")
    client.close(10_000)
    assert fixture.ingress._monitor.poll(10_000)  # it is closed
    fixture.ingress.start()
    await fixture.until(lambda: CLOSED in fixture.events)
    assert fixture.received() == [b"last"] * 4 * READ + [CLOSED]


async def test_the_end_of_a_connection_does_not_wait_for_messages_of_another(
    fixture: IngressFixture,
) -> None:
    client, other = fixture.client(session="more"), fixture.client(fixture.ipc, "other")
    fixture.ingress.handle_connections()
    for _ in range(4000):
        client.send(b"more")
    other.send(b"last")
    other.close(10_000)
    assert fixture.ingress._monitor.poll(10_000)
    fixture.ingress.start()
    await fixture.until(lambda: CLOSED in fixture.events)
    received = fixture.received()
    assert received.index(b"last") < received.index(CLOSED) < 100


async def test_the_accept_gate_counts_each_connection_at_once(fixture: IngressFixture) -> None:
    for number in range(3):
        fixture.client(fixture.ipc, str(number))
    fixture.ingress.handle_connections()
    assert len(fixture.accepted) == 3


async def test_a_turn_that_is_due_when_the_socket_is_closed_does_nothing(
    fixture: IngressFixture,
) -> None:
    errors: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: errors.append(context))
    fixture.ingress.drain_soon()
    fixture.ingress.close()
    fixture.router.close(0)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert errors == []
