"""What is kept for a peer that takes nothing, and how it goes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
import zmq

from kvferry.daemon.transport import outbox as outbox_module
from kvferry.daemon.transport.outbox import Outboxes
from kvferry.daemon.transport.peers import Peer
from kvferry.proto import codec
from kvferry.proto.codec import decode_daemon_message
from kvferry.proto.errors import Code
from kvferry.proto.messages import (
    Done,
    Error,
    Goodbye,
    KeyEvents,
    Opened,
)


class Full:
    """A socket that takes nothing."""

    def send_multipart(self, frames: list[bytes], flags: int) -> None:
        raise zmq.Again


class Socket:
    """A socket that takes what it has room for."""

    def __init__(self, room: int = 100) -> None:
        self.room = room
        self.taken: list[Any] = []

    def send_multipart(self, frames: list[bytes], flags: int) -> None:
        if len(self.taken) >= self.room:
            raise zmq.Again
        self.taken.append(decode_daemon_message(frames[1]))


def desk(socket: Socket) -> tuple[Outboxes, Peer]:
    peer = Peer("s", b"id", 0, 1, -1, 0, "client", "engine")
    peers = SimpleNamespace(by_session={"s": peer})

    def away(gone: Peer, reason: str) -> None:
        del peers.by_session[gone.session]

    return Outboxes(cast(Any, socket), cast(Any, peers), lambda: None, away), peer


async def until(socket: Socket, count: int) -> None:
    async with asyncio.timeout(10):
        while len(socket.taken) < count:
            await asyncio.sleep(0.001)


async def test_who_has_much_to_take_is_told_the_number_of_the_news_that_it_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outbox_module, "MAX_QUEUED_EVENTS", 2)
    socket = Socket(room=0)
    boxes, peer = desk(socket)
    news = [KeyEvents(number, (), 3) for number in range(5)]
    for each in news[:4]:
        boxes.broadcast_events(["s", "another"], each)
    boxes.send_message(peer, Done(9))
    socket.room = 100
    await until(socket, 4)
    assert socket.taken == [*news[:2], Done(9), KeyEvents(3, (), 3)]
    assert (peer.outbox_bytes, peer.missed_events) == (0, None)
    boxes.broadcast_events(["s"], news[4])
    assert socket.taken[4:] == [news[4]]


async def test_the_last_that_one_hears_who_was_sent_away_is_a_goodbye(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outbox_module, "MAX_QUEUED_EVENTS", 1)
    monkeypatch.setattr(outbox_module, "MAX_MESSAGES", 2)
    socket = Socket(room=0)
    boxes, peer = desk(socket)
    for number in range(2):
        boxes.broadcast_events(["s"], KeyEvents(number, ()))
    for number in range(4):
        boxes.send_message(peer, Done(number))
    socket.room = 100
    await until(socket, 1)
    await asyncio.sleep(0.01)
    (goodbye,) = socket.taken
    assert isinstance(goodbye, Goodbye)


async def test_whoever_reads_the_socket_hears_of_every_time_that_it_is_written_to() -> None:
    """Where it is full, too: it has looked for messages then, and taken the wake-up for them."""
    sent: list[None] = []
    peer = Peer("s", b"id", 0, 1, -1, 0, "client", "engine")
    boxes = Outboxes(
        cast(Any, Full()),
        cast(Any, None),
        lambda: sent.append(None),
        lambda gone, reason: pytest.fail(reason),
    )
    boxes.send_message(peer, Done(1))
    assert len(sent) == 1
    async with asyncio.timeout(10):
        while len(sent) < 3:
            await asyncio.sleep(0.001)


async def test_a_stream_goes_on_when_all_before_is_taken_and_ends_the_one_before_it() -> None:
    socket = Socket(room=2)
    boxes, peer = desk(socket)
    boxes.start_stream("s", map(Done, range(10)))
    await asyncio.sleep(0.01)
    assert len(peer.outbox) == 1
    boxes.start_stream("s", map(Done, range(20, 24)))
    socket.room = 100
    await until(socket, 7)
    await asyncio.sleep(0.01)
    assert socket.taken == [Done(number) for number in (0, 1, 2, 20, 21, 22, 23)]
    assert peer.stream is None


async def test_who_asked_for_more_than_a_message_may_have_is_told_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(codec, "MAX_MESSAGE_BYTES", 200)
    peer = Peer("s", b"id", 0, 1, -1, 0, "client", "engine")
    boxes = Outboxes(
        cast(Any, Full()), cast(Any, None), lambda: None, lambda gone, reason: pytest.fail(reason)
    )
    boxes.send_message(peer, Opened(7, "x" * 300, 1, 1, False, "lru", 1))
    (answer,) = map(decode_daemon_message, peer.outbox)
    assert isinstance(answer, Error)
    assert (answer.request_id, answer.error.code) == (7, Code.MESSAGE_TOO_LARGE)


async def test_who_takes_nothing_is_sent_away_once_what_it_said_was_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may be in the middle of that: who is forgotten meanwhile has no session to answer."""
    monkeypatch.setattr(outbox_module, "MAX_MESSAGES", 3)
    away: list[str] = []
    peer = Peer("s", b"id", 0, 1, -1, 0, "client", "engine")
    peers = SimpleNamespace(by_session={"s": peer})
    boxes = Outboxes(
        cast(Any, Full()),
        cast(Any, peers),
        lambda: None,
        lambda gone, reason: away.append(f"{gone.session}: {reason}"),
    )
    for number in range(9):
        boxes.send_message(peer, Done(number))
    assert away == []
    await asyncio.sleep(0)
    assert away == ["s: received none of 4 messages"]
    (last,) = peer.outbox
    assert isinstance(decode_daemon_message(last), Goodbye)
    assert peer.outbox_bytes == len(last)
