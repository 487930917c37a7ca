"""Requests of a session and their replies."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.client.session import ClientSession
from kvferry.proto import memory
from kvferry.proto import messages as wire
from kvferry.proto.codec import decode_client_message, encode
from kvferry.proto.errors import Code, Refused
from support.client_session import BUSY


def test_requests_have_unique_numbers(session: ClientSession) -> None:
    requests = [session.jobs.wait([7, 8]) for _ in range(3)]
    assert len({request.request_id for request in requests}) == 3
    data = session.wire.request(requests[0])
    assert decode_client_message(data) == wire.Wait(requests[0].request_id, (7, 8))
    assert decode_client_message(session.jobs.cancel(iter([7]))) == wire.Cancel((7,))


@pytest.mark.parametrize(
    "reply",
    [
        wire.Waited(5),
        wire.Registered(5, memory.HostRegion(1, 1, False)),
        wire.Allocated(5, memory.HostRegion(1, 1, True), (), ()),
        wire.Opened(5, "name", 1, 1, False, "lru", 1),
        wire.Done(5),
        wire.NamespacesReport(5, ()),
    ],
)
def test_a_reply_is_kept_for_its_request(session: ClientSession, reply: Any) -> None:
    pending = session.wire.pending
    with pending.expect_reply(wire.StatusRequest(5)), pending.expect_reply(wire.StatusRequest(4)):
        assert pending.reply(5) is None
        session.receive_message(encode(reply))
        assert pending.reply(4) is None
        assert pending.reply(5) == reply


def test_an_error_is_raised_at_its_request_or_at_once(session: ClientSession) -> None:
    pending = session.wire.pending
    with pending.expect_reply(wire.StatusRequest(5)), pending.expect_reply(wire.StatusRequest(4)):
        session.receive_message(encode(wire.Error(5, BUSY)))
        assert pending.reply(4) is None
        with pytest.raises(Refused, match="later") as caught:
            pending.reply(5)
        assert caught.value.info == BUSY
    session.receive_message(encode(wire.Error(5, BUSY)))  # nobody waits for it any more
    session.receive_message(encode(wire.Waited(4)))
    with pytest.raises(Refused, match="later"):
        session.receive_message(encode(wire.Error(None, BUSY)))


@pytest.mark.parametrize("data", [b"", b"\xc1", encode(wire.StatusRequest(1))])
def test_bytes_that_are_no_message_of_a_daemon_are_refused(
    session: ClientSession, data: bytes
) -> None:
    with pytest.raises(Refused) as caught:
        session.receive_message(data)
    assert caught.value.code == Code.BAD_MESSAGE
