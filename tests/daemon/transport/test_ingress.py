"""Messages are served in order, in turns bounded in time, before the end of their connection."""

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
from kvferry.daemon.transport import ingress as intake_module
from kvferry.daemon.transport.ingress import READ, TURN, Frames, Ingress
from kvferry.daemon.transport.peers import Peer, Peers
from kvferry.proto.messages import PROTOCOL, Hello

HELLO = Hello(PROTOCOL, PROTOCOL, "a client", "an engine")
NEAR = "inproc://near"
"""What was sent there has arrived; but connections have no numbers, and nobody knows who it is."""
TURNED = b"the others had their turn"
CLOSED = b"connection closed"


class IngressFixture:
    """A ROUTER, and its intake. events: all that was heard, and what became of peers.

    costs: seconds that a message takes to serve, by the clock of the intake.
    """

    def __init__(self, place: Path) -> None:
        self.context = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        self.router, self.far = self._socket(zmq.ROUTER), f"ipc://{place}"
        self.router.bind(NEAR)
        self.router.bind(self.far)
        self.events: list[bytes] = []
        self.unknown: list[bytes] = []
        """What was heard of those who are no peers."""
        self.came: list[int] = []
        self.costs: dict[bytes, float] = {}
        self.now = 0.0
        self.on_hearing: Callable[[bytes], None] = lambda _: None
        self.peers = Peers(self.disconnect_client)
        door: Any = SimpleNamespace(connection_accepted=self.came.append)
        self.intake = Ingress(
            self.router, self.peers, door, Connections(Admission()), self, lambda: self.now
        )

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        one = self.context.socket(kind)
        self._sockets.append(one)
        one.setsockopt(zmq.SNDHWM, 0)
        one.setsockopt(zmq.RCVHWM, 0)
        return one

    def client(self, address: str = NEAR, session: str = "s") -> zmq.Socket[bytes]:
        """A peer of this session."""
        one = self._socket(zmq.DEALER)
        one.connect(address)
        one.send(b"hello")
        assert self.router.poll(10_000)
        identity, frame = self.router.recv(), self.router.recv(copy=False)
        if address != NEAR:
            self.peers.add_peer(session, identity, frame, HELLO)
            return one
        pidfd = os.pidfd_open(os.getpid())
        peer = Peer(session, identity, 0, os.getpid(), pidfd, -1, HELLO.client, HELLO.engine)
        self.peers.by_session[session] = self.peers.by_identity[identity] = peer
        return one

    # What the intake tells

    def receive_message(self, identity: bytes, peer: Peer | None, frames: Frames) -> None:
        data = b"".join(f if isinstance(f, bytes) else f.bytes for f in frames)
        (self.events if peer is not None else self.unknown).append(data)
        self.now += self.costs.get(data, 1e-5)
        self.on_hearing(data)

    def disconnect_client(self, peer: Peer, reason: str) -> None:
        self.events.append(reason.encode())
        self.intake.drop_messages(peer)
        self.peers.remove_peer(peer.session)

    async def until(self, ready: Callable[[], bool]) -> None:
        """With a note in `events` whenever the loop came round."""
        async with asyncio.timeout(10):
            while not ready():
                await asyncio.sleep(0)
                self.events.append(TURNED)

    def heard(self) -> list[bytes]:
        return [event for event in self.events if event != TURNED]

    def longest(self) -> int:
        """How much was heard, at most, while nobody else had a turn."""
        return max(len(list(run)) for turn, run in groupby(self.events, TURNED.__eq__) if not turn)

    def close(self) -> None:
        if not self.router.closed:
            self.intake.close()
        self.peers.close()
        for one in self._sockets:
            one.close(0)
        self.context.term()


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[IngressFixture]:
    one = IngressFixture(tmp_path / "far")
    yield one
    one.close()


def count(house: IngressFixture, data: bytes) -> int:
    return house.events.count(data)


async def test_who_sends_without_end_has_one_turn_of_two(house: IngressFixture) -> None:
    """And nothing stays behind: the descriptor tells once of all that there is."""
    client = house.client()
    house.costs[b"more"] = TURN / 8
    for _ in range(10 * READ):
        client.send(b"more")
    house.intake.start()
    await house.until(lambda: count(house, b"more") == 10 * READ)
    assert house.longest() <= 2 * 9  # one by the descriptor, and one that was due


async def test_who_takes_long_waits_until_the_other_has_had_as_much(house: IngressFixture) -> None:
    """However many of its messages wait, and whichever were read first."""
    slow, quick = house.client(session="slow"), house.client(session="quick")
    house.costs |= {b"slow": 0.3, b"quick": 0.001}
    for _ in range(10):
        slow.send(b"slow")
    for _ in range(1000):
        quick.send(b"quick")
    house.intake.start()
    await house.until(lambda: len(house.heard()) == 1010)
    runs = [(data, len(list(run))) for data, run in groupby(house.heard())]
    slow_runs = [number for data, number in runs if data == b"slow"]
    quick_runs = [number for data, number in runs if data == b"quick"]
    assert slow_runs == [1, 1, 1, 1, 6]  # alone at last, it need not wait
    assert all(290 <= number <= 310 for number in quick_runs[-3:-1])


async def test_who_asks_one_thing_at_a_time_waits_for_one_message_at_most(
    house: IngressFixture,
) -> None:
    """Beside clients that send the next expensive one as soon as they can."""
    honest = house.client(session="honest")
    slow = {b"slow %d" % number: house.client(session=str(number)) for number in range(2)}
    house.costs |= zip(slow, (0.3, 0.31), strict=True)

    def next_one(data: bytes) -> None:
        slow.get(data, honest).send(data)

    house.on_hearing = next_one
    for data, client in slow.items():
        client.send(data)
    house.intake.start()
    await house.until(lambda: len(house.heard()) > 4)
    house.events.clear()
    honest.send(b"quick")
    await house.until(lambda: count(house, b"quick") > 100)
    between = [
        len(list(run)) for quick, run in groupby(house.heard(), b"quick".__eq__) if not quick
    ]
    assert max(between) == 1


async def test_idle_time_is_not_saved_up(house: IngressFixture) -> None:
    early, late = house.client(session="early"), house.client(session="late")
    house.costs |= {b"early": 0.01, b"late": 0.01}
    late.send(b"late")
    house.intake.start()
    await house.until(lambda: count(house, b"late") == 1)
    for _ in range(1000):
        early.send(b"early")
    await house.until(lambda: count(house, b"early") > 500)
    house.events.clear()
    for _ in range(100):
        late.send(b"late")
    await house.until(lambda: count(house, b"late") == 100)
    assert 98 <= count(house, b"early") <= 102


@pytest.mark.parametrize(("name", "most"), [("MAX_WAITING", 10), ("MAX_WAITING_BYTES", 1000)])
async def test_what_waits_is_bounded(
    house: IngressFixture, monkeypatch: pytest.MonkeyPatch, name: str, most: int
) -> None:
    monkeypatch.setattr(intake_module, name, most)
    client, waiting = house.client(), list[int]()
    house.on_hearing = lambda _: waiting.append(house.intake._count)
    numbers = [b"%0100d" % number for number in range(500)]
    for number in numbers:
        client.send(number)
    house.intake.start()
    await house.until(lambda: len(house.heard()) == 500)
    assert house.heard() == numbers
    assert max(waiting) == 9
    assert (house.intake._count, house.intake._nbytes) == (0, 0)


async def test_what_waits_of_one_that_left_is_dropped(house: IngressFixture) -> None:
    client = house.client()
    (peer,) = house.peers.by_session.values()
    house.on_hearing = lambda _: house.disconnect_client(peer, "it died")
    for _ in range(10):
        client.send(b"more")
    house.intake.start()
    await asyncio.sleep(0.01)
    assert (house.heard(), house.unknown) == ([b"more", b"it died"], [])
    assert (house.intake._count, house.intake._nbytes) == (0, 0)


async def test_a_second_hello_behind_a_goodbye_tells_where_it_came_from(
    house: IngressFixture,
) -> None:
    """As the first does: it is read while its sender is still a peer."""
    client, kinds = house.client(), list[type]()

    def receive(identity: bytes, peer: Peer | None, frames: Frames) -> None:
        kinds.append(type(frames[0]))
        if peer is not None:
            house.peers.remove_peer(peer.session)

    house.receive_message = receive  # type: ignore[method-assign]
    for data in (b"goodbye", b"hello"):
        client.send(data)
    house.intake.start()
    await house.until(lambda: len(kinds) == 2)
    assert kinds == [bytes, zmq.Frame]
    assert not house.intake._queues


async def test_what_came_before_an_end_is_heard_before_it(house: IngressFixture) -> None:
    """Of many messages, too: else the last of who goes without a word were lost."""
    client = house.client(house.far)
    house.intake.handle_connections()
    for _ in range(4 * READ):
        client.send(b"last")
    client.close(10_000)
    assert house.intake._monitor.poll(10_000)  # it is closed
    house.intake.start()
    await house.until(lambda: CLOSED in house.events)
    assert house.heard() == [b"last"] * 4 * READ + [CLOSED]


async def test_an_end_does_not_wait_for_who_sends_without_one(house: IngressFixture) -> None:
    client, other = house.client(session="more"), house.client(house.far, "other")
    house.intake.handle_connections()
    for _ in range(4000):
        client.send(b"more")
    other.send(b"last")
    other.close(10_000)
    assert house.intake._monitor.poll(10_000)
    house.intake.start()
    await house.until(lambda: CLOSED in house.events)
    heard = house.heard()
    assert heard.index(b"last") < heard.index(CLOSED) < 100


async def test_the_door_knows_at_once_who_came(house: IngressFixture) -> None:
    for number in range(3):
        house.client(house.far, str(number))
    house.intake.handle_connections()
    assert len(house.came) == 3


async def test_a_turn_that_was_due_finds_the_socket_closed(house: IngressFixture) -> None:
    """It leaves it alone."""
    mistakes: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: mistakes.append(context))
    house.intake.drain_soon()
    house.intake.close()
    house.router.close(0)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert mistakes == []
