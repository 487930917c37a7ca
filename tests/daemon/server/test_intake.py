"""What is said by socket and on trays is heard in its order, in turns, and before an end is."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from kvferry.daemon.server.admission import Admission
from kvferry.daemon.server.intake import BEFORE, TURN, Frames, Intake
from kvferry.daemon.server.peers import Peer, Peers
from kvferry.daemon.server.trays import AT_ONCE
from kvferry.proto.messages import PROTOCOL, Hello
from kvferry.proto.tray import SLOTS, Tray, new_tray

HELLO = Hello(PROTOCOL, PROTOCOL, "a client", "an engine")
NEAR = "inproc://near"
"""What was sent there has arrived; but connections have no numbers, and nobody knows who it is."""
TURNED = b"the others had their turn"


class House:
    """A ROUTER, and its intake. events: all that was heard, and what became of peers."""

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
        self.on_hearing: Callable[[Peer], None] = lambda _: None
        self.peers = Peers(Admission(), self.part)
        door: Any = SimpleNamespace(came=self.came.append)
        self.intake = Intake(self.router, self.peers, door, self)
        self.bell: socket.socket | None = None

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        one = self.context.socket(kind)
        self._sockets.append(one)
        one.setsockopt(zmq.SNDHWM, 0)
        one.setsockopt(zmq.RCVHWM, 0)
        return one

    def client(self, address: str) -> zmq.Socket[bytes]:
        one = self._socket(zmq.DEALER)
        one.connect(address)
        return one

    def admit(self, client: zmq.Socket[bytes]) -> Peer:
        """A client as the session "s"."""
        client.send(b"hello")
        assert self.router.poll(10_000)
        identity, frame = self.router.recv(), self.router.recv(copy=False)
        if client.getsockopt_string(zmq.LAST_ENDPOINT) != NEAR:
            return self.peers.admit("s", identity, frame, HELLO)
        pidfd = os.pidfd_open(os.getpid())
        peer = Peer("s", identity, os.getpid(), pidfd, -1, HELLO.client, HELLO.engine)
        self.peers.by_session["s"] = self.peers.by_identity[identity] = peer
        return peer

    def tray(self) -> Tray:
        """Its end of a tray whose bell nobody rings."""
        page = new_tray()
        theirs, self.bell = socket.socketpair()
        self.intake.trays.open("s", os.dup(page), theirs.detach())
        try:
            return Tray(page)
        finally:
            os.close(page)

    # What the intake tells

    def receive(self, identity: bytes, peer: Peer | None, frames: Frames) -> None:
        data = b"".join(f if isinstance(f, bytes) else f.bytes for f in frames)
        (self.events if peer is not None else self.unknown).append(data)

    def hear(self, peer: Peer, data: bytes) -> None:
        self.events.append(data)
        self.on_hearing(peer)

    def part(self, peer: Peer, reason: str) -> None:
        self.events.append(reason.encode())
        self.intake.trays.close(peer.session)
        self.peers.dismiss(peer.session)

    async def until(self, ready: Callable[[], bool]) -> None:
        """With a note in `events` whenever the loop came round."""
        async with asyncio.timeout(10):
            while not ready():
                await asyncio.sleep(0)
                self.events.append(TURNED)

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
        if self.bell is not None:
            self.bell.close()


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    one = House(tmp_path / "far")
    yield one
    one.close()


async def test_who_sends_without_end_has_one_turn_of_two(house: House) -> None:
    """And nothing stays behind: the descriptor tells once of all that there is."""
    client = house.client(NEAR)
    house.admit(client)
    house.intake.start()
    for _ in range(10 * TURN):
        client.send(b"more")
    await house.until(lambda: house.events.count(b"more") == 10 * TURN)
    assert house.longest() <= 2 * TURN  # one by the descriptor, and one that was due


async def test_what_a_tray_brings_between_counts_for_the_turn(house: House) -> None:
    """A client that lays another message whenever one is heard."""
    client = house.client(NEAR)
    house.admit(client)
    house.intake.start()
    tray = house.tray()
    for _ in range(SLOTS):
        tray.lay(b"laid", 0)

    def another(_: Peer) -> None:
        tray.lay(b"laid", 0)

    house.on_hearing = another
    for _ in range(TURN):
        client.send(b"sent")
    await house.until(lambda: house.events.count(b"sent") == TURN)
    assert house.longest() <= 2 * (SLOTS + 1 + AT_ONCE) + 2 * AT_ONCE
    house.intake.trays.close("s")
    tray.close()


async def test_what_was_laid_before_is_heard_before(house: House) -> None:
    client = house.client(NEAR)
    house.admit(client)
    tray = house.tray()
    tray.lay(b"first", 0)
    client.send(b"second")
    tray.lay(b"third", 1)
    house.intake.start()
    assert house.events == [b"first", b"second", b"third"]
    tray.close()


async def test_who_left_with_what_lay_there_says_nothing_more(house: House) -> None:
    client = house.client(NEAR)
    house.admit(client)
    tray = house.tray()
    tray.lay(b"goodbye", 0)
    house.on_hearing = lambda peer: house.part(peer, "it said goodbye")
    client.send(b"more")
    house.intake.start()
    assert (house.events, house.unknown) == ([b"goodbye", b"it said goodbye"], [b"more"])
    tray.close()


async def test_a_tray_that_makes_no_sense_is_its_client_s_end(house: House) -> None:
    client = house.client(NEAR)
    house.admit(client)
    tray = house.tray()
    tray._laid.value = 3
    client.send(b"heard all the same")
    house.intake.start()
    assert house.events == [b"what lies on the tray makes no sense"]
    assert house.unknown == [b"heard all the same"]
    tray.close()


async def test_what_came_before_an_end_is_heard_before_it(house: House) -> None:
    """Of many messages, too: else the last of who goes without a word were lost."""
    client = house.client(house.far)
    house.admit(client)
    house.intake.hear_of_connections()
    for _ in range(4 * TURN):
        client.send(b"last")
    client.close(10_000)
    assert house.intake._monitor.poll(10_000)  # it is closed
    house.intake.start()
    assert house.events == [b"last"] * 4 * TURN + [b"its connection closed"]


async def test_an_end_does_not_wait_for_who_sends_without_one(house: House) -> None:
    client = house.client(NEAR)
    house.admit(client)
    for _ in range(2 * BEFORE):
        client.send(b"more")
    house.intake.start()
    assert len(house.events) == BEFORE


async def test_the_door_knows_at_once_who_came(house: House) -> None:
    clients = [house.client(house.far) for _ in range(3)]
    for client in clients:
        client.send(b"hello")
    for _ in clients:
        assert house.router.poll(10_000)
        house.router.recv_multipart()
    house.intake.hear_of_connections()
    assert len(house.came) == 3


async def test_a_turn_that_was_due_finds_the_socket_closed(house: House) -> None:
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
