"""What is kept for a peer that takes nothing, and how it goes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
import zmq

from kvferry.daemon.server import outbox as outbox_module
from kvferry.daemon.server.outbox import Outboxes
from kvferry.daemon.server.peers import Peer
from kvferry.proto import codec
from kvferry.proto.codec import decode_daemon_message
from kvferry.proto.errors import Code
from kvferry.proto.messages import Done, Error, Goodbye, Opened


class Full:
    """A socket that takes nothing."""

    def send_multipart(self, frames: list[bytes], flags: int) -> None:
        raise zmq.Again


async def test_who_asked_for_more_than_a_message_may_have_is_told_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(codec, "MAX_MESSAGE_BYTES", 200)
    peer = Peer("s", b"id", 1, -1, 0, "client", "engine")
    boxes = Outboxes(
        cast(Any, Full()), cast(Any, None), lambda: None, lambda gone, reason: pytest.fail(reason)
    )
    boxes.send(peer, Opened(7, "x" * 300, 1, 1, False, "lru", 1))
    (answer,) = map(decode_daemon_message, peer.outbox)
    assert isinstance(answer, Error)
    assert (answer.request_id, answer.error.code) == (7, Code.MESSAGE_TOO_LARGE)


async def test_who_takes_nothing_is_sent_away_once_what_it_said_was_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may be in the middle of that: who is forgotten meanwhile has no session to answer."""
    monkeypatch.setattr(outbox_module, "MAX_MESSAGES", 3)
    away: list[str] = []
    peer = Peer("s", b"id", 1, -1, 0, "client", "engine")
    peers = SimpleNamespace(by_session={"s": peer})
    boxes = Outboxes(
        cast(Any, Full()),
        cast(Any, peers),
        lambda: None,
        lambda gone, reason: away.append(f"{gone.session}: {reason}"),
    )
    for number in range(9):
        boxes.send(peer, Done(number))
    assert away == []
    await asyncio.sleep(0)
    assert away == ["s: sent away: it took none of 4 messages"]
    (last,) = peer.outbox
    assert isinstance(decode_daemon_message(last), Goodbye)
    assert peer.outbox_bytes == len(last)
