"""Outboxes of peers that receive slowly or not at all."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
import zmq

from kvferry.daemon.core.actions import SendMessage
from kvferry.daemon.transport.outbox import Outboxes, OutboxLimits, merge_results
from kvferry.daemon.transport.peers import Peer
from kvferry.proto.codec import MAX_REPLY_BYTES, decode_daemon_message
from kvferry.proto.errors import Code
from kvferry.proto.keys import EventKind
from kvferry.proto.messages import (
    Done,
    Error,
    Finished,
    Goodbye,
    KeyEvent,
    KeyEvents,
    Opened,
    Waited,
)
from kvferry.proto.results import JobResult, Outcome
from kvferry.proto.specs import Direction
from support.eventually import eventually

pytestmark = pytest.mark.virtual_time


class FakeRouter:
    """A socket with room for `room` messages."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.sent: list[Any] = []

    def send_multipart(self, frames: list[bytes], flags: int) -> None:
        if len(self.sent) >= self.room:
            raise zmq.Again
        self.sent.append(decode_daemon_message(frames[1]))


class OutboxFixture:
    """The outboxes of one peer. Its socket has room for `room` messages.

    flushes: number of writes to the socket. overflowed: reasons to disconnect the peer.
    """

    def __init__(self, room: int = 0, **limits: int) -> None:
        self.socket = FakeRouter(room)
        self.peer = Peer("s", b"id", 0, 1, -1, 0, "client", "engine")
        self.by_session = {"s": self.peer}
        self.flushes, self.overflowed = 0, list[str]()
        self.outboxes = Outboxes(
            cast(Any, self.socket),
            cast(Any, SimpleNamespace(by_session=self.by_session)),
            self._flushed,
            self._disconnect,
            OutboxLimits(**limits),
        )

    def _flushed(self) -> None:
        self.flushes += 1

    def _disconnect(self, peer: Peer, reason: str) -> None:
        self.overflowed.append(reason)
        del self.by_session[peer.session]

    async def until_sent(self, count: int) -> None:
        await eventually(lambda: len(self.socket.sent) >= count)


async def test_a_full_outbox_drops_key_events_and_sends_the_last_sequence_number() -> None:
    fixture = OutboxFixture(events=2)
    outboxes, socket, peer = fixture.outboxes, fixture.socket, fixture.peer
    events = [KeyEvents(number, (), 3) for number in range(5)]
    for event in events[:4]:
        outboxes.broadcast_events(["s", "another"], event)
    outboxes.send_message(peer, Done(9))
    socket.room = 100
    await fixture.until_sent(4)
    assert socket.sent == [*events[:2], Done(9), KeyEvents(3, (), 3)]
    assert (peer.outbox_bytes, peer.missed_events) == (0, None)
    outboxes.broadcast_events(["s"], events[4])
    assert socket.sent[4:] == [events[4]]


async def test_large_key_events_are_left_out_before_they_fill_the_outbox() -> None:
    """An idle engine is not disconnected because another one stores much."""
    fixture = OutboxFixture(nbytes=3000, event_bytes=1000)
    outboxes, socket, peer = fixture.outboxes, fixture.socket, fixture.peer
    events = [
        KeyEvents(number, (KeyEvent(EventKind.STORED, (bytes(60),) * 9),)) for number in range(9)
    ]
    for each in events:
        outboxes.broadcast_events(["s"], each)
    await asyncio.sleep(0)
    assert (fixture.overflowed, len(peer.outbox)) == ([], 2)
    socket.room = 100
    await fixture.until_sent(3)
    assert socket.sent == [*events[:2], KeyEvents(8, ())]


async def test_a_peer_that_receives_nothing_is_disconnected_with_a_goodbye() -> None:
    """It is disconnected after its message was handled, because replies need the session."""
    fixture = OutboxFixture(events=1, messages=3)
    fixture.outboxes.broadcast_events(["s"], KeyEvents(1, ()))
    fixture.outboxes.broadcast_events(["s"], KeyEvents(2, ()))
    for number in range(9):
        fixture.outboxes.send_message(fixture.peer, Done(number))
    assert fixture.overflowed == []
    await asyncio.sleep(0)
    assert fixture.overflowed == ["received none of 4 messages"]
    assert fixture.peer.outbox_bytes == len(fixture.peer.outbox[0])
    fixture.socket.room = 100
    await fixture.until_sent(1)
    await asyncio.sleep(1)
    (goodbye,) = fixture.socket.sent
    assert isinstance(goodbye, Goodbye)


async def test_every_write_is_reported_even_if_the_socket_is_full() -> None:
    """Writing consumes the wake-up for received messages."""
    fixture = OutboxFixture()
    fixture.outboxes.send_without_session(b"id", Done(1))
    assert fixture.flushes == 1
    fixture.outboxes.send_message(fixture.peer, Done(1))
    assert fixture.flushes == 2
    await eventually(lambda: fixture.flushes >= 4)


async def test_a_stream_continues_if_the_outbox_is_empty_and_replaces_an_earlier_one() -> None:
    fixture = OutboxFixture(room=2)
    fixture.outboxes.start_stream("s", map(Done, range(10)))
    await asyncio.sleep(1)
    assert len(fixture.peer.outbox) == 1
    fixture.outboxes.start_stream("s", map(Done, range(20, 24)))
    fixture.socket.room = 100
    await fixture.until_sent(7)
    await asyncio.sleep(1)
    assert fixture.socket.sent == [Done(number) for number in (0, 1, 2, 20, 21, 22, 23)]
    assert fixture.peer.stream is None


async def test_a_reply_that_is_too_large_becomes_an_error() -> None:
    fixture = OutboxFixture(room=1)
    reply = Opened(7, "x" * MAX_REPLY_BYTES, 1, 1, False, "lru", 1)
    fixture.outboxes.send_message(fixture.peer, reply)
    (error,) = fixture.socket.sent
    assert isinstance(error, Error)
    assert (error.request_id, error.error.code) == (7, Code.MESSAGE_TOO_LARGE)


def result(job: int) -> JobResult:
    return JobResult(job, Direction.STORE, Outcome.DONE)


def test_results_of_a_session_are_merged_in_order() -> None:
    """Other messages stay behind the results that they follow."""
    actions = [
        SendMessage("a", Done(1)),
        SendMessage("a", Finished((result(1),))),
        SendMessage("b", Finished((result(7),))),
        SendMessage("a", Waited(2)),
        SendMessage("a", Finished((result(2), result(3)))),
        SendMessage("a", Waited(3)),
        SendMessage("b", Finished((result(8),))),
    ]
    assert merge_results([*actions]) == [
        SendMessage("a", Done(1)),
        SendMessage("a", Finished((result(1), result(2), result(3)))),
        SendMessage("b", Finished((result(7), result(8)))),
        SendMessage("a", Waited(2)),
        SendMessage("a", Waited(3)),
    ]
