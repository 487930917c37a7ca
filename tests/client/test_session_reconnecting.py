"""ClientSession: the loss of a daemon, and reconnecting to the next one."""

from __future__ import annotations

import traceback
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import msgspec
import numpy as np
import pytest

from kvferry.client.restoring import share_timeline
from kvferry.client.session import ClientSession
from kvferry.client.session_state import RegistrationState, SessionState
from kvferry.client.timeline import Timeline
from kvferry.client.wire import ConnectionState
from kvferry.proto import memory
from kvferry.proto import messages as wire
from kvferry.proto.codec import encode
from kvferry.proto.errors import Code, Gone, Refused
from kvferry.proto.fingerprint import Fingerprint
from kvferry.proto.keys import Lookup
from kvferry.proto.protocol import make_hello
from kvferry.proto.results import JobResult, Outcome
from kvferry.proto.specs import (
    CPULoadStoreSpec,
    Direction,
    GPULoadStoreSpec,
    KVLayout,
    TensorLayout,
    TensorRef,
)
from support.client_session import LOAD, STORE, WELCOME, SteppedAttempt, finish, outcomes, submit

FINGERPRINT = Fingerprint("llama", 4096, key_bytes=4)
OPENED = wire.Opened(1, FINGERPRINT.name, 8, 4096, False, "lru", 1)
HALVES = KVLayout((TensorLayout(8, 64, 64),), ((TensorRef(0, 64),),), block_size_factor=2)
REGION = memory.HostRegion(8, 64, False)
LATER = msgspec.structs.replace(WELCOME, boot_id="later", session_id="s2")
KILLED = Gone(Code.DAEMON_GONE, "killed")


@pytest.fixture
def reconnecting() -> ClientSession:
    """A session in the state CONNECTED that reconnects."""
    session = ClientSession("engine", "client", reconnects=True)
    session.receive_message(encode(WELCOME))
    session.mark_connected()
    return session


def reconnect(session: ClientSession) -> None:
    """Reconnect a session that has no namespace and no tensors to restore."""
    attempt = SteppedAttempt(session)
    attempt.receive(LATER)
    assert attempt.done


def opened_for(attempt: SteppedAttempt) -> wire.Opened:
    """The reply to the OpenNamespace that was sent."""
    (opening,) = attempt.sent
    return msgspec.structs.replace(OPENED, request_id=opening.request_id)


def states_of(session: ClientSession) -> tuple[ConnectionState, bool | None]:
    return session.wire.state, session.wire.check_connected()


def test_the_states_of_a_session(reconnecting: ClientSession) -> None:
    assert reconnecting.wire.state is ConnectionState.CONNECTED
    assert (reconnecting.wire.gone, reconnecting.wire.incarnation) == (None, 1)
    reconnecting.connection_lost(KILLED)
    assert states_of(reconnecting) == (ConnectionState.DISCONNECTED, None)
    assert "reconnecting" in str(reconnecting.wire.gone)
    reconnecting.wire.socket_opened()
    assert states_of(reconnecting) == (ConnectionState.CONNECTING, None)
    with pytest.raises(Gone, match="reconnecting"):
        reconnecting.jobs.submit(1, STORE, 0)
    reconnecting.connection_lost(KILLED)
    reconnect(reconnecting)
    assert states_of(reconnecting) == (ConnectionState.CONNECTED, True)
    assert reconnecting.wire.incarnation == 2
    reconnecting.connection_lost(KILLED)
    reconnecting.stop_reconnecting()
    assert reconnecting.wire.closed
    with pytest.raises(Gone):
        reconnecting.wire.check_connected()


def test_reconnecting_restores_namespace_mirror_and_pins_in_order(
    reconnecting: ClientSession,
) -> None:
    opening = wire.OpenNamespace(1, FINGERPRINT, 1 << 20, "arc", 2)
    reconnecting.opened.daemon_opened(opening, OPENED)
    mirror = reconnecting.namespace.ensure_mirror()
    reconnecting.receive_message(encode(wire.Snapshot(3, 0, False, (b"aaaa",), True)))
    reconnecting.namespace.pin([b"aaaa", b"bbbb", b"aaaa"])
    reconnecting.connection_lost(KILLED)
    attempt = SteppedAttempt(reconnecting)
    assert attempt.sent == [make_hello("client", "engine")]
    attempt.receive(LATER)
    assert msgspec.structs.replace(attempt.sent[0], request_id=1) == opening
    attempt.receive(opened_for(attempt))
    assert attempt.sent == [wire.Subscribe()]
    reconnecting.receive_message(encode(wire.Snapshot(1, 0, False, (b"bbbb",), True)))
    assert mirror.lookup(b"bbbb") is Lookup.MISS
    attempt.receive()
    assert attempt.sent == [wire.Pin((b"aaaa", b"aaaa", b"bbbb"))]
    assert attempt.done
    assert [mirror.lookup(key) for key in (b"aaaa", b"bbbb")] == [Lookup.MISS, Lookup.HIT]


def test_pending_resets_are_done_once_for_each_label_before_the_mirror_is_shown(
    reconnecting: ClientSession,
) -> None:
    reconnecting.opened.daemon_opened(wire.OpenNamespace(1, FINGERPRINT), OPENED)
    reconnecting.namespace.ensure_mirror()
    reconnecting.opened.reset("weights 2")
    reconnecting.connection_lost(KILLED)
    for label in ("weights 2", "weights 3", "weights 3"):
        reconnecting.opened.reset(label)
    attempt = SteppedAttempt(reconnecting)
    attempt.receive(WELCOME)
    attempt.receive(opened_for(attempt))
    attempt.receive(wire.Snapshot(1, 0, False, (b"aaaa",), True))
    for epoch, label in ((7, "weights 2"), (8, "weights 3")):
        (reset,) = attempt.sent
        assert isinstance(reset, wire.Reset)
        assert reset.label == label
        attempt.receive(wire.Done(reset.request_id, epoch))
    assert attempt.done
    assert reconnecting.namespace.mirror.lookup(b"aaaa") is Lookup.MISS
    assert reconnecting.namespace.pending_resets() == {}
    assert reconnecting.namespace.reset_epoch == 8


def test_a_host_block_whose_store_was_lost_loads_only_after_another_store(
    reconnecting: ClientSession,
) -> None:
    """The next daemon may have the bytes of an older store in that block."""
    hosts = np.array([3])
    submit(reconnecting, 1, (STORE[0], CPULoadStoreSpec(hosts)))
    hosts[0] = 4  # the caller uses its array again
    reconnecting.connection_lost(KILLED)
    reconnect(reconnecting)
    with pytest.raises(Refused) as caught:
        reconnecting.jobs.submit(2, LOAD, 0)
    assert (caught.value.code, caught.value.value) == (Code.STALE, "3")
    submit(reconnecting, 3, STORE)
    failed = JobResult(3, Direction.STORE, Outcome.FAILED)
    reconnecting.receive_message(encode(wire.Finished((failed,))))
    with pytest.raises(Refused):
        reconnecting.jobs.submit(2, LOAD, 0)
    submit(reconnecting, 4, STORE)
    reconnecting.receive_message(
        encode(wire.Finished((JobResult(4, Direction.STORE, Outcome.DONE),)))
    )
    reconnecting.jobs.submit(2, LOAD, 0)


def test_a_lost_sub_block_loads_only_after_another_store_of_it(reconnecting: ClientSession) -> None:
    """A store of the other half of its host block is not enough."""
    caches: Any = SimpleNamespace(layout=HALVES)
    reconnecting.kv_caches_registered(RegistrationState(caches, None, None), REGION)

    def half(index: int) -> tuple[GPULoadStoreSpec, CPULoadStoreSpec]:
        return GPULoadStoreSpec([0], (1,), (index,)), CPULoadStoreSpec([3])

    submit(reconnecting, 1, half(1))
    reconnecting.connection_lost(KILLED)
    reconnecting.wire.socket_opened()
    reconnecting.receive_message(encode(LATER))
    reconnecting.mark_connected()
    submit(reconnecting, 2, half(0))
    finish(reconnecting, 2)
    reconnecting.jobs.submit(3, half(0)[::-1], 0)
    for refused in (half(1), half(7), STORE):
        with pytest.raises(Refused) as caught:
            reconnecting.jobs.submit(3, refused[::-1], 0)
        assert (caught.value.code, caught.value.value) == (Code.STALE, "3")
    submit(reconnecting, 4, half(1))
    finish(reconnecting, 4)
    for accepted in (half(1), STORE):
        reconnecting.jobs.submit(3, accepted[::-1], 0)


def test_a_lost_daemon_ends_pending_requests_once(reconnecting: ClientSession) -> None:
    pending = reconnecting.wire.pending
    with pending.expect_reply(wire.StatusRequest(5)), pending.expect_reply(wire.Wait(4, (1,))):
        reconnecting.receive_message(encode(wire.Waited(4)))
        reconnecting.connection_lost(KILLED)
        assert pending.reply(4) == wire.Waited(4)  # it arrived before
        reconnecting.wire.socket_opened()
        with pytest.raises(Gone, match="killed"):
            pending.reply(5)
    with pending.expect_reply(wire.StatusRequest(6)):
        assert pending.reply(6) is None


def test_a_daemon_that_refuses_to_reconnect(reconnecting: ClientSession) -> None:
    full = Refused(Code.POOL_FULL, "no room", 5)
    reconnecting.connection_lost(KILLED)
    reconnecting.wire.socket_opened()
    reconnecting.reconnect_failed(full)
    assert reconnecting.wire.state is ConnectionState.DISCONNECTED
    assert reconnecting.wire.refused is full
    with pytest.raises(Gone, match="no room") as caught:
        reconnecting.wire.check_connected()
    assert caught.value.__cause__ is full
    reconnecting.wire.socket_opened()
    reconnecting.reconnect_failed(Gone(Code.SHUTTING_DOWN, "stopping"))
    assert reconnecting.wire.refused is full
    reconnect(reconnecting)
    assert reconnecting.wire.gone is None


def test_an_unfinished_last_session_does_not_end_the_wait(reconnecting: ClientSession) -> None:
    registered = Refused(Code.ALREADY_REGISTERED, "another process has registered", "engine")
    reconnecting.connection_lost(KILLED)
    reconnecting.wire.socket_opened()
    reconnecting.reconnect_failed(registered)
    assert reconnecting.wire.check_connected() is None
    assert reconnecting.wire.gone is not None
    assert reconnecting.wire.gone.__cause__ is registered
    reconnect(reconnecting)
    assert reconnecting.wire.check_connected()


def test_the_traceback_of_gone_does_not_grow(reconnecting: ClientSession) -> None:
    """An engine may submit a job at every step, for hours."""
    reconnecting.connection_lost(KILLED)
    for _ in range(100):
        with pytest.raises(Gone) as caught:
            reconnecting.jobs.submit(1, STORE, 0)
    assert len(traceback.extract_tb(caught.value.__traceback__)) < 10


def test_an_abandoned_session_revokes_its_timeline_and_loses_its_jobs_once(
    reconnecting: ClientSession,
) -> None:
    timeline = Timeline.create()
    caches: Any = SimpleNamespace(layout=HALVES)
    reconnecting.kv_caches_registered(RegistrationState(caches, None, timeline), REGION)
    submit(reconnecting, 7)
    reconnecting.abandon()
    assert timeline.revoked
    assert outcomes(reconnecting) == [(7, "lost")]
    reconnecting.abandon()
    assert outcomes(reconnecting) == []
    assert states_of(reconnecting) == (ConnectionState.DISCONNECTED, None)
    timeline.close()


def test_a_session_with_a_state_to_restore_begins_disconnected() -> None:
    state = SessionState.of_namespace(FINGERPRINT)
    session = ClientSession("engine", "client", reconnects=True, restore=state)
    assert states_of(session) == (ConnectionState.DISCONNECTED, None)
    assert session.namespace.mirror.lookup(b"aaaa") is Lookup.MISS
    with pytest.raises(Gone, match="not connected"):
        submit(session, 1)
    options: tuple[dict[str, Any], ...] = {"cpu_bytes_to_use": -1}, {"store_threshold": 0}
    for wrong in options:
        with pytest.raises(Refused):
            SessionState.of_namespace(FINGERPRINT, **wrong)


async def test_a_timeline_is_shared_in_a_page_that_is_not_revoked() -> None:
    timeline, call = Timeline.create(), AsyncMock()
    call.pass_fds.return_value = (7,)
    revoked = timeline.descriptor
    timeline.revoke()
    assert await share_timeline(call, timeline) == 7
    call.pass_fds.assert_awaited_once_with((timeline.descriptor,))
    assert timeline.descriptor != revoked
    assert not timeline.revoked
    timeline.close()
    with pytest.raises(Refused, match="timeline is closed"):
        await share_timeline(call, timeline)
