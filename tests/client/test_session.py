"""ClientSession: connecting, namespaces, and the end of a daemon."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest

from kvferry.client.session import ClientSession
from kvferry.proto import messages as wire
from kvferry.proto.codec import decode_client_message, encode
from kvferry.proto.errors import Code, ErrorInfo, Gone, KVFerryError, Refused
from kvferry.proto.fingerprint import Fingerprint
from kvferry.proto.keys import EventKind, Lookup
from support.client_session import BUSY, LOAD, STORE, finish, submit

# Connecting


@pytest.mark.parametrize(
    ("code", "kind"), [(Code.PROTOCOL_VERSION, Refused), (Code.SHUTTING_DOWN, Gone)]
)
def test_a_refused_hello_raises_the_reason(code: Code, kind: type[KVFerryError]) -> None:
    session = ClientSession("engine", "client")
    assert session.wire.read_welcome() is None
    session.receive_message(encode(wire.Error(None, ErrorInfo(code, "no"))))
    with pytest.raises(kind) as caught:
        session.wire.read_welcome()
    assert caught.value.code == code


# A namespace


FINGERPRINT = Fingerprint("llama", 4096, key_bytes=4)
KEY_EVENTS = wire.KeyEvents(1, (wire.KeyEvent(EventKind.STORED, (b"aaaa",)),))


def open_namespace(session: ClientSession) -> ClientSession:
    opening = wire.OpenNamespace(1, FINGERPRINT)
    opened = wire.Opened(1, FINGERPRINT.name, 8, 4096, False, "lru", 1)
    session.opened.daemon_opened(opening, opened)
    return session


@pytest.mark.parametrize("message", [KEY_EVENTS, wire.Snapshot(1, 0, False, (b"aaaa",), True)])
def test_key_events_need_a_mirror(session: ClientSession, message: Any) -> None:
    session.receive_message(encode(message))
    open_namespace(session).receive_message(encode(message))
    assert session.opened.follow_ups(0.0) == []
    session.namespace.ensure_mirror()
    session.receive_message(encode(message))
    assert session.opened.follow_ups(0.0) == []
    assert session.opened.mirror_complete() == isinstance(message, wire.Snapshot)


def test_an_incomplete_mirror_requests_one_snapshot(session: ClientSession) -> None:
    open_namespace(session).namespace.ensure_mirror()
    session.receive_message(encode(wire.Snapshot(0, 0, False, (), True)))
    session.receive_message(encode(wire.KeyEvents(2, KEY_EVENTS.events)))
    session.receive_message(encode(wire.KeyEvents(4, KEY_EVENTS.events)))
    (subscription,) = session.opened.follow_ups(0.0)
    assert decode_client_message(subscription) == wire.Subscribe()
    assert session.opened.follow_ups(0.0) == []
    session.receive_message(encode(wire.Snapshot(4, 0, False, (), True)))
    session.receive_message(encode(wire.KeyEvents(6, KEY_EVENTS.events)))
    session.connection_lost(Gone(Code.DAEMON_GONE, "killed"))
    assert session.opened.follow_ups(0.0) == []
    with pytest.raises(Gone):
        session.opened.mirror_complete()


def test_an_unrequested_reset_reply_changes_nothing(session: ClientSession) -> None:
    mirror = open_namespace(session).namespace.ensure_mirror()
    session.receive_message(encode(wire.Snapshot(0, 0, False, (b"aaaa",), True)))
    session.receive_message(encode(wire.Done(5)))
    assert mirror.lookup(b"aaaa") is Lookup.HIT


# The daemon ends


ENDS = {
    "goodbye": encode(wire.Goodbye("stopping")),
    "restarted": encode(wire.Error(None, ErrorInfo(Code.NO_SESSION, "unknown session"))),
}


@pytest.mark.parametrize("end", ENDS)
def test_jobs_in_flight_are_lost_with_the_daemon(session: ClientSession, end: str) -> None:
    for job_id, spec in ((1, STORE), (2, LOAD), (3, STORE)):
        submit(session, job_id, spec)
    finish(session, 1)
    session.receive_message(ENDS[end])
    first, second, third = session.jobs.take_results()
    assert [first.outcome, second.outcome, third.outcome] == ["done", "lost", "lost"]
    assert (second.transfer_type, third.transfer_type) == (("CPU", "GPU"), ("GPU", "CPU"))
    assert not second.success
    assert isinstance(second.error, Gone)
    assert second.error.code == Code.DAEMON_GONE
    assert session.jobs.in_flight([1, 2, 3]) == []
    finish(session, 2)
    session.receive_message(ENDS[end])
    assert session.jobs.take_results() == []


@pytest.mark.parametrize("end", ENDS)
def test_requests_to_a_lost_daemon_raise_gone(session: ClientSession, end: str) -> None:
    pending = session.wire.pending
    with pending.expect_reply(wire.StatusRequest(5)):
        session.receive_message(encode(wire.Waited(5)))
        session.receive_message(ENDS[end])
        for call in (
            lambda: session.jobs.submit(1, STORE, 0),
            lambda: session.jobs.cancel([1]),
            lambda: session.wire.request(session.jobs.wait([1])),
            lambda: session.wire.request(wire.StatusRequest(7)),
        ):
            with pytest.raises(Gone) as caught:
                call()
            assert caught.value.code == Code.DAEMON_GONE
        assert pending.reply(5) == wire.Waited(5)  # it arrived before the end


def test_the_first_reason_for_the_end_is_kept(session: ClientSession) -> None:
    first = Gone(Code.TIMEOUT, "no answer")
    session.connection_lost(first)
    session.connection_lost(Gone(Code.DAEMON_GONE, "later"))
    assert session.wire.gone is first


# Requests and replies


def test_a_reply_or_an_error_is_kept_for_its_request(session: ClientSession) -> None:
    first, second, third = [session.jobs.wait([7, 8]) for _ in range(3)]
    data = session.wire.request(second)
    assert decode_client_message(data) == wire.Wait(second.request_id, (7, 8))
    pending = session.wire.pending
    with ExitStack() as requests:
        for request in (first, second, third):
            requests.enter_context(pending.expect_reply(request))
        session.receive_message(encode(wire.Waited(second.request_id)))
        session.receive_message(encode(wire.Error(third.request_id, BUSY)))
        assert pending.reply(first.request_id) is None
        assert pending.reply(second.request_id) == wire.Waited(second.request_id)
        with pytest.raises(Refused, match="later") as caught:
            pending.reply(third.request_id)
        assert caught.value.info == BUSY
    session.receive_message(encode(wire.Waited(first.request_id)))  # its caller has ended
    session.receive_message(encode(wire.Error(first.request_id, BUSY)))
    with pytest.raises(Refused, match="later"):
        session.receive_message(encode(wire.Error(None, BUSY)))


@pytest.mark.parametrize("data", [b"", b"\xc1", encode(wire.StatusRequest(1))])
def test_bytes_that_are_no_message_of_a_daemon_are_refused(
    session: ClientSession, data: bytes
) -> None:
    with pytest.raises(Refused) as caught:
        session.receive_message(data)
    assert caught.value.code == Code.BAD_MESSAGE
