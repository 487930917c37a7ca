"""What a client knows, fed with bytes: no socket, no clock."""

from __future__ import annotations

import traceback
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from kvferry.client import effects, operations
from kvferry.client.jobs import TransferResult
from kvferry.client.session import ClientSession, ConnectionState
from kvferry.client.session_state import RegistrationState, SessionState
from kvferry.client.timeline import Timeline
from kvferry.proto import memory
from kvferry.proto import messages as wire
from kvferry.proto import status as told
from kvferry.proto.codec import decode_client_message, encode
from kvferry.proto.errors import Code, ErrorInfo, Failed, Gone, KVFerryError, Refused
from kvferry.proto.keys import EventKind, Lookup
from kvferry.proto.messages import Outcome
from kvferry.proto.specs import (
    CPULoadStoreSpec,
    Direction,
    GPULoadStoreSpec,
    KeyLoadStoreSpec,
    KVLayout,
    TensorLayout,
    TensorRef,
)

STORE = GPULoadStoreSpec([1, 2]), CPULoadStoreSpec([3])
LOAD = CPULoadStoreSpec([3]), GPULoadStoreSpec([1, 2])
KEYED_STORE = GPULoadStoreSpec([1, 2]), KeyLoadStoreSpec((b"a", b"b"))
KEYED_LOAD = KEYED_STORE[1], KEYED_STORE[0]
MAX_JOBS = 3
WELCOME = wire.Welcome(
    1, "boot", "s1", "0.1", 1, told.DeviceInfo("cpu", "cpu", "host"), told.Limits(9, 9, MAX_JOBS)
)
BUSY = ErrorInfo(Code.BUSY, "later", "3")


@pytest.fixture
def session() -> ClientSession:
    session = ClientSession("engine", "client")
    session.receive_message(encode(WELCOME))
    return session


def submit(session: ClientSession, job_id: int, spec: Any = STORE) -> None:
    session.submit(job_id, spec, 0)
    session.submitted(job_id, spec)


def finish(session: ClientSession, *job_ids: int, **result: Any) -> None:
    fields = {"direction": Direction.STORE, "outcome": Outcome.DONE} | result
    session.receive_message(
        encode(wire.Finished(tuple(wire.JobResult(job_id, **fields) for job_id in job_ids)))
    )


def outcomes(session: ClientSession) -> list[tuple[int, str]]:
    return [(result.job_id, result.outcome) for result in session.jobs.take_results()]


# Greeting


def test_the_first_message_says_who_speaks() -> None:
    assert ClientSession("engine", "client").hello() == wire.Hello(1, 1, "client", "engine")


def test_a_client_is_greeted_once_the_welcome_is_there() -> None:
    session = ClientSession("engine", "client")
    assert session.read_welcome() is None
    session.receive_message(encode(WELCOME))
    assert session.read_welcome() == WELCOME


@pytest.mark.parametrize(
    ("code", "kind"), [(Code.PROTOCOL_VERSION, Refused), (Code.SHUTTING_DOWN, Gone)]
)
def test_a_client_that_is_turned_away_learns_why(code: Code, kind: type[KVFerryError]) -> None:
    session = ClientSession("engine", "client")
    session.receive_message(encode(wire.Error(None, ErrorInfo(code, "no"))))
    with pytest.raises(kind) as caught:
        session.read_welcome()
    assert caught.value.code == code


# Jobs


@pytest.mark.parametrize("spec", [STORE, LOAD, KEYED_STORE, KEYED_LOAD])
def test_a_job_is_sent_as_it_was_given(session: ClientSession, spec: Any) -> None:
    src, dst = spec
    assert decode_client_message(session.submit(7, spec, 12)) == wire.Submit(7, src, dst, 12)


def test_a_result_comes_once(session: ClientSession) -> None:
    submit(session, 7)
    finish(session, 7, nbytes=4096, seconds=0.5)
    done = TransferResult(7, True, 4096, 0.5, ("GPU", "CPU"), Outcome.DONE)
    assert session.jobs.take_results() == [done]
    assert (session.jobs.take_results(), len(session.jobs)) == ([], 0)


def test_results_keep_the_order_in_which_they_came(session: ClientSession) -> None:
    for job_id in (1, 2, 3):
        submit(session, job_id)
    finish(session, 2, 3)
    finish(session, 1)
    assert outcomes(session) == [(2, "done"), (3, "done"), (1, "done")]


@pytest.mark.parametrize(
    ("outcome", "code", "kind"),
    [
        (Outcome.FAILED, Code.COPY_FAILED, Failed),
        (Outcome.FAILED, Code.ENGINE_GONE, Gone),
        (Outcome.CANCELLED, Code.CANCELLED, Gone),
        (Outcome.REFUSED, Code.BUSY, Refused),
    ],
)
def test_a_job_without_success_says_why(
    session: ClientSession, outcome: Outcome, code: Code, kind: type[KVFerryError]
) -> None:
    submit(session, 7, LOAD)
    finish(
        session, 7, direction=Direction.LOAD, outcome=outcome, error=ErrorInfo(code, "why", "17")
    )
    (result,) = session.jobs.take_results()
    assert (result.success, result.outcome, result.transfer_size) == (False, outcome, 0)
    assert result.transfer_type == ("CPU", "GPU")
    assert type(result.error) is kind
    assert result.error.info == ErrorInfo(code, "why", "17")
    assert not session.jobs


def test_results_that_nobody_waits_for_are_ignored(session: ClientSession) -> None:
    submit(session, 1)
    finish(session, 9)
    finish(session, 1, 1)
    finish(session, 1, outcome=Outcome.FAILED)
    assert outcomes(session) == [(1, "done")]


def test_a_job_id_is_used_once_at_a_time(session: ClientSession) -> None:
    submit(session, 7)
    with pytest.raises(Refused) as caught:
        session.submit(7, LOAD, 0)
    assert (caught.value.code, caught.value.value) == (Code.DUPLICATE_JOB, "7")
    finish(session, 7)
    submit(session, 7)
    assert session.in_flight([6, 7, 8]) == [7]


def test_credits_are_spent_and_come_back(session: ClientSession) -> None:
    for job_id in range(MAX_JOBS):
        submit(session, job_id)
    with pytest.raises(Refused) as caught:
        session.submit(9, STORE, 0)
    assert (caught.value.code, session.in_flight([9])) == (Code.BUSY, [])
    finish(session, 1)
    submit(session, 9)
    assert session.in_flight(range(10)) == [0, 2, 9]


def test_a_message_that_was_not_sent_is_no_job(session: ClientSession) -> None:
    session.submit(7, STORE, 0)
    assert not session.jobs
    submit(session, 7)
    assert session.jobs


@pytest.mark.parametrize(
    ("job_id", "spec", "wait_for"),
    [
        (-1, STORE, 0),
        (1 << 63, STORE, 0),
        (1, STORE, -1),
        (1, (GPULoadStoreSpec([1, 2], (3, -1), (0, 0)), STORE[1]), 0),
        (1, (GPULoadStoreSpec([1, 2], (2,), (-1,)), STORE[1]), 0),
        (1, (GPULoadStoreSpec([1, 2], (2,), (1 << 48,)), STORE[1]), 0),
        (1, (GPULoadStoreSpec([1, 2], cast(Any, (2.0,)), (0,)), STORE[1]), 0),
        (1, (GPULoadStoreSpec([1, 2], (0,) * 256 + (2,), (0,) * 257), STORE[1]), 0),
        (1, (STORE[0], KeyLoadStoreSpec((b"",))), 0),
        (1, (STORE[0], KeyLoadStoreSpec((b"k" * 65,))), 0),
        (1, (KeyLoadStoreSpec(cast(Any, ("key",))), STORE[0]), 0),
        (1, (STORE[0], [b"key"]), 0),
    ],
)
def test_a_job_that_no_daemon_can_read_is_refused_here(
    session: ClientSession, job_id: int, spec: Any, wait_for: int
) -> None:
    """The daemon could not say whose fault it is: to it these bytes are no message of a job."""
    with pytest.raises(Refused):
        session.submit(job_id, spec, wait_for)


@pytest.mark.parametrize("sizes", [[2], [1, 1]])
def test_group_sizes_may_be_arrays_or_are_refused(session: ClientSession, sizes: list[int]) -> None:
    array = cast(Any, np.array(sizes))
    try:
        data = session.submit(1, (GPULoadStoreSpec([1, 2], array, array), STORE[1]), 0)
    except Refused:
        return
    message = decode_client_message(data)
    assert isinstance(message, wire.Submit)
    assert message.src == GPULoadStoreSpec([1, 2], tuple(sizes), tuple(sizes))


@pytest.mark.parametrize("make", ["cancel", "wait"])
@pytest.mark.parametrize("job_ids", [[-1], range(65537)])
def test_job_ids_that_no_daemon_can_read_are_refused_here(
    session: ClientSession, make: str, job_ids: Any
) -> None:
    with pytest.raises(Refused):
        session.cancel(job_ids) if make == "cancel" else session.wait(job_ids)


# Requests


def test_requests_have_numbers_of_their_own(session: ClientSession) -> None:
    requests = [session.wait([7, 8]) for _ in range(3)]
    assert len({request.request_id for request in requests}) == 3
    data = session.request(requests[0])
    assert decode_client_message(data) == wire.Wait(requests[0].request_id, (7, 8))
    assert decode_client_message(session.cancel(iter([7]))) == wire.Cancel((7,))


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
def test_a_reply_is_there_once_and_for_its_request(session: ClientSession, reply: Any) -> None:
    with session.expect_reply(wire.StatusRequest(5)), session.expect_reply(wire.StatusRequest(4)):
        assert session.reply(5) is None
        session.receive_message(encode(reply))
        assert session.reply(4) is None
        assert session.reply(5) == reply
        assert session.reply(5) is None


def test_a_reply_that_nobody_waits_for_is_not_kept(session: ClientSession) -> None:
    with session.expect_reply(wire.StatusRequest(5)):
        pass
    session.receive_message(encode(wire.Waited(5)))
    session.receive_message(encode(wire.Error(5, BUSY)))
    assert session.reply(5) is None


def test_an_error_is_raised_at_its_request_once(session: ClientSession) -> None:
    with session.expect_reply(wire.StatusRequest(5)), session.expect_reply(wire.StatusRequest(4)):
        session.receive_message(encode(wire.Error(5, BUSY)))
        assert session.reply(4) is None
        with pytest.raises(Refused, match="later") as caught:
            session.reply(5)
        assert caught.value.info == BUSY
        assert session.reply(5) is None


def test_an_error_that_belongs_to_nothing_is_raised_where_it_arrives(
    session: ClientSession,
) -> None:
    with pytest.raises(Refused, match="later"):
        session.receive_message(encode(wire.Error(None, BUSY)))


@pytest.mark.parametrize("data", [b"", b"\xc1", encode(wire.StatusRequest(1))])
def test_bytes_that_are_no_daemon_s_message_are_refused(
    session: ClientSession, data: bytes
) -> None:
    with pytest.raises(Refused) as caught:
        session.receive_message(data)
    assert caught.value.code == Code.BAD_MESSAGE


# A namespace


FINGERPRINT = told.Fingerprint("llama", 4096, key_bytes=4)
NEWS = wire.KeyEvents(1, (wire.KeyEvent(EventKind.STORED, (b"aaaa",)),))


def enter(session: ClientSession) -> ClientSession:
    opening = wire.OpenNamespace(1, FINGERPRINT)
    session.namespace_opened(opening, wire.Opened(1, FINGERPRINT.name, 8, 4096, False, "lru", 1))
    return session


@pytest.mark.parametrize("message", [NEWS, wire.Snapshot(1, 0, False, (b"aaaa",), True)])
def test_what_is_told_of_a_namespace_needs_a_mirror(session: ClientSession, message: Any) -> None:
    session.receive_message(encode(message))
    enter(session).receive_message(encode(message))
    assert session.snapshot_request() is None
    session.namespace.ensure_mirror()
    session.receive_message(encode(message))
    assert session.snapshot_request() is None
    assert session.mirror_complete() == isinstance(message, wire.Snapshot)


def test_a_mirror_that_is_astray_is_followed_up_once(session: ClientSession) -> None:
    enter(session).namespace.ensure_mirror()
    session.receive_message(encode(wire.Snapshot(0, 0, False, (), True)))
    session.receive_message(encode(wire.KeyEvents(2, NEWS.events)))
    session.receive_message(encode(wire.KeyEvents(4, NEWS.events)))
    follow = session.snapshot_request()
    assert follow is not None
    assert decode_client_message(follow) == wire.Subscribe()
    assert session.snapshot_request() is None


def test_a_mirror_is_not_followed_up_at_a_daemon_that_is_gone(session: ClientSession) -> None:
    enter(session).namespace.ensure_mirror()
    session.receive_message(encode(wire.Snapshot(0, 0, False, (), True)))
    session.receive_message(encode(wire.KeyEvents(2, NEWS.events)))
    session.connection_lost(Gone(Code.DAEMON_GONE, "killed"))
    assert session.snapshot_request() is None
    with pytest.raises(Gone):
        session.mirror_complete()


def test_a_reset_that_nobody_asked_for_changes_nothing(session: ClientSession) -> None:
    mirror = enter(session).namespace.ensure_mirror()
    session.receive_message(encode(wire.Snapshot(0, 0, False, (b"aaaa",), True)))
    session.receive_message(encode(wire.Done(5)))
    assert mirror.lookup(b"aaaa") is Lookup.HIT


def test_a_reset_that_is_waited_for_is_refused_to_who_waits(session: ClientSession) -> None:
    enter(session)
    reset, unheard = session.reset(), session.reset()
    with session.expect_reply(reset):
        session.receive_message(encode(wire.Error(reset.request_id, BUSY)))
        with pytest.raises(Refused, match="later"):
            session.reply(reset.request_id)
    with pytest.raises(Refused, match="later"):
        session.receive_message(encode(wire.Error(unheard.request_id, BUSY)))


@pytest.mark.parametrize("inside", [False, True])
def test_kv_caches_are_registered_with_a_region_or_in_a_namespace(
    session: ClientSession, inside: bool
) -> None:
    layout = KVLayout((TensorLayout(8, 64, 64),), ((TensorRef(0, 64),),))
    if inside:
        enter(session)
    operation = operations.allocate_kv_caches(session, layout, None if inside else 4096, None)
    assert isinstance(next(operation), effects.WaitFor)
    effect = operation.send(True)
    assert isinstance(effect, effects.SendOneWay)
    assert effect.message == wire.AllocateKVCaches(1, layout, None if inside else 4096)


# The end


ENDS = {
    "goodbye": encode(wire.Goodbye("stopping")),
    "restarted": encode(wire.Error(None, ErrorInfo(Code.NO_SESSION, "who are you?"))),
}


@pytest.mark.parametrize("end", ENDS)
def test_jobs_under_way_are_lost_with_the_daemon(session: ClientSession, end: str) -> None:
    for job_id, spec in ((1, STORE), (2, LOAD), (3, STORE)):
        submit(session, job_id, spec)
    finish(session, 1)
    session.receive_message(ENDS[end])
    one, two, three = session.jobs.take_results()
    assert [one.outcome, two.outcome, three.outcome] == ["done", "lost", "lost"]
    assert (two.transfer_type, three.transfer_type) == (("CPU", "GPU"), ("GPU", "CPU"))
    assert not two.success
    assert isinstance(two.error, Gone)
    assert two.error.code == Code.DAEMON_GONE
    assert not session.jobs
    finish(session, 2)
    session.receive_message(ENDS[end])
    assert session.jobs.take_results() == []


@pytest.mark.parametrize("end", ENDS)
def test_nothing_can_be_asked_of_a_daemon_that_is_gone(session: ClientSession, end: str) -> None:
    with session.expect_reply(wire.StatusRequest(5)):
        session.receive_message(encode(wire.Waited(5)))
        session.receive_message(ENDS[end])
        for ask in (
            lambda: session.submit(1, STORE, 0),
            lambda: session.cancel([1]),
            lambda: session.request(session.wait([1])),
            lambda: session.request(wire.StatusRequest(7)),
            lambda: session.reply(6),
        ):
            with pytest.raises(Gone) as caught:
                ask()
            assert caught.value.code == Code.DAEMON_GONE
        assert session.reply(5) == wire.Waited(5)  # it came before the end


def test_the_first_reason_for_the_end_stands(session: ClientSession) -> None:
    first = Gone(Code.TIMEOUT, "no answer")
    session.connection_lost(first)
    session.connection_lost(Gone(Code.DAEMON_GONE, "later"))
    assert session.gone is first


# And another daemon after it

OPENED = wire.Opened(1, FINGERPRINT.name, 8, 4096, False, "lru", 1)
REGION = memory.HostRegion(8, 64, False)
LATER = msgspec.structs.replace(WELCOME, boot_id="later", session_id="s2")
KILLED = Gone(Code.DAEMON_GONE, "killed")


@pytest.fixture
def reconnecting() -> ClientSession:
    """CONNECTED, with a daemon that may be followed by another."""
    session = ClientSession("engine", "client", reconnects=True)
    session.receive_message(encode(WELCOME))
    session.mark_connected()
    return session


def answer(session: ClientSession, operation: Any, effect: Any, message: Any) -> Any:
    """Feed what a daemon answers to an effect, and go on to the next one."""
    if isinstance(effect, effects.SendRequest):
        with session.expect_reply(effect.message):
            session.receive_message(encode(message))
            return operation.send(session.reply(effect.message.request_id))
    if message is not None:
        session.receive_message(encode(message))
    assert effect.until() is not None
    return operation.send(effect.until())


def come_back(session: ClientSession, welcome: wire.Welcome = LATER) -> None:
    """With nothing to be had again."""
    session.socket_opened()
    operation = operations.connect(session)
    with pytest.raises(StopIteration):
        answer(session, operation, next(operation), welcome)


def test_the_states_of_a_session(reconnecting: ClientSession) -> None:
    assert (reconnecting.state, reconnecting.gone, reconnecting.incarnation) == (
        ConnectionState.CONNECTED,
        None,
        1,
    )
    reconnecting.connection_lost(KILLED)
    assert (reconnecting.state, reconnecting.check_connected()) == (
        ConnectionState.DISCONNECTED,
        None,
    )
    assert "reconnecting" in str(reconnecting.gone)
    reconnecting.socket_opened()
    assert (reconnecting.state, reconnecting.check_connected()) == (
        ConnectionState.CONNECTING,
        None,
    )
    with pytest.raises(Gone, match="reconnecting"):
        reconnecting.submit(1, STORE, 0)
    reconnecting.connection_lost(KILLED)
    come_back(reconnecting)
    assert (reconnecting.state, reconnecting.check_connected(), reconnecting.incarnation) == (
        ConnectionState.CONNECTED,
        True,
        2,
    )
    reconnecting.connection_lost(KILLED)
    reconnecting.stop_reconnecting()
    assert reconnecting.closed
    with pytest.raises(Gone):
        reconnecting.check_connected()


def test_all_is_had_again_in_order(reconnecting: ClientSession) -> None:
    opening = wire.OpenNamespace(1, FINGERPRINT, 1 << 20, "arc", 2)
    reconnecting.namespace_opened(opening, OPENED)
    mirror = reconnecting.namespace.ensure_mirror()
    reconnecting.receive_message(encode(wire.Snapshot(3, 0, False, (b"aaaa",), True)))
    reconnecting.namespace.pin([b"aaaa", b"bbbb", b"aaaa"])
    reconnecting.connection_lost(KILLED)
    reconnecting.socket_opened()
    operation = operations.connect(reconnecting)
    effect: Any = next(operation)
    assert effect.message == wire.Hello(1, 1, "client", "engine")
    effect = answer(reconnecting, operation, effect, LATER)
    again = effect.message
    assert msgspec.structs.replace(again, request_id=1) == opening
    effect = answer(
        reconnecting,
        operation,
        effect,
        msgspec.structs.replace(OPENED, request_id=again.request_id),
    )
    assert effect.message == wire.Subscribe()
    assert effect.until() is None
    reconnecting.receive_message(encode(wire.Snapshot(1, 0, False, (b"bbbb",), True)))
    assert mirror.lookup(b"bbbb") is Lookup.MISS
    effect = answer(reconnecting, operation, effect, None)
    assert effect.message == wire.Pin((b"aaaa", b"aaaa", b"bbbb"))
    with pytest.raises(StopIteration):
        answer(reconnecting, operation, effect, None)
    assert [mirror.lookup(key) for key in (b"aaaa", b"bbbb")] == [Lookup.MISS, Lookup.HIT]


def test_resets_that_were_not_done_are_done_before_anything_shows(
    reconnecting: ClientSession,
) -> None:
    reconnecting.namespace_opened(wire.OpenNamespace(1, FINGERPRINT), OPENED)
    reconnecting.namespace.ensure_mirror()
    reconnecting.reset()
    reconnecting.connection_lost(KILLED)
    reconnecting.reset()
    reconnecting.socket_opened()
    operation = operations.connect(reconnecting)
    effect = answer(reconnecting, operation, next(operation), WELCOME)
    opened = msgspec.structs.replace(OPENED, request_id=effect.message.request_id)
    effect = answer(reconnecting, operation, effect, opened)
    reconnecting.receive_message(encode(wire.Snapshot(1, 0, False, (b"aaaa",), True)))
    effect = answer(reconnecting, operation, effect, None)
    assert isinstance(effect.message, wire.Reset)
    with pytest.raises(StopIteration):
        answer(reconnecting, operation, effect, wire.Done(effect.message.request_id))
    assert reconnecting.namespace.mirror.lookup(b"aaaa") is Lookup.MISS
    assert reconnecting.namespace.pending_resets() == ()


def test_a_host_block_whose_store_was_lost_is_not_loaded_until_it_is_stored_again(
    reconnecting: ClientSession,
) -> None:
    """A daemon that has the blocks of the one before may have what was there before that store."""
    submit(reconnecting, 1, STORE)
    reconnecting.connection_lost(KILLED)
    come_back(reconnecting)
    with pytest.raises(Refused) as caught:
        reconnecting.submit(2, LOAD, 0)
    assert (caught.value.code, caught.value.value) == (Code.STALE, "3")
    submit(reconnecting, 3, STORE)
    failed = wire.JobResult(3, Direction.STORE, Outcome.FAILED)
    reconnecting.receive_message(encode(wire.Finished((failed,))))
    with pytest.raises(Refused):
        reconnecting.submit(2, LOAD, 0)
    submit(reconnecting, 4, STORE)
    reconnecting.receive_message(
        encode(wire.Finished((wire.JobResult(4, Direction.STORE, Outcome.DONE),)))
    )
    reconnecting.submit(2, LOAD, 0)


def test_who_waits_is_told_once_that_the_daemon_went(reconnecting: ClientSession) -> None:
    with reconnecting.expect_reply(wire.StatusRequest(5)):
        reconnecting.connection_lost(KILLED)
        reconnecting.socket_opened()
        with pytest.raises(Gone, match="killed"):
            reconnecting.reply(5)
    with reconnecting.expect_reply(wire.StatusRequest(6)):
        assert reconnecting.reply(6) is None


def test_a_daemon_that_does_not_take_us_back(reconnecting: ClientSession) -> None:
    full = Refused(Code.POOL_FULL, "no room", 5)
    reconnecting.connection_lost(KILLED)
    reconnecting.socket_opened()
    reconnecting.reconnect_failed(full)
    assert (reconnecting.state, reconnecting.refused) == (ConnectionState.DISCONNECTED, full)
    with pytest.raises(Gone, match="no room") as caught:
        reconnecting.check_connected()
    assert caught.value.__cause__ is full
    reconnecting.socket_opened()
    reconnecting.reconnect_failed(Gone(Code.SHUTTING_DOWN, "stopping"))
    assert reconnecting.refused is full
    come_back(reconnecting)
    assert reconnecting.gone is None


def test_why_the_daemon_is_gone_does_not_grow(reconnecting: ClientSession) -> None:
    """An engine may ask at every effect, for hours."""
    reconnecting.connection_lost(KILLED)
    for _ in range(100):
        with pytest.raises(Gone) as caught:
            reconnecting.submit(1, STORE, 0)
    assert len(traceback.extract_tb(caught.value.__traceback__)) < 10


def test_a_session_that_is_abandoned_revokes_its_timeline_and_loses_its_jobs_once(
    reconnecting: ClientSession,
) -> None:
    timeline = Timeline.create()
    caches: Any = None
    reconnecting.kv_caches_registered(RegistrationState(caches, None, timeline), REGION)
    submit(reconnecting, 7)
    reconnecting.abandon()
    assert timeline.revoked
    assert outcomes(reconnecting) == [(7, "lost")]
    reconnecting.abandon()
    assert outcomes(reconnecting) == []
    assert (reconnecting.state, reconnecting.check_connected()) == (
        ConnectionState.DISCONNECTED,
        None,
    )
    revoked = timeline.descriptor
    sending = operations._send_timeline(timeline)  # as registering again does
    assert next(sending) == effects.PassFds((timeline.descriptor,))
    assert timeline.descriptor != revoked
    assert not timeline.revoked
    sending.close()
    timeline.close()


def test_a_session_with_a_state_to_restore_begins_disconnected() -> None:
    state = SessionState.of_namespace(FINGERPRINT, eviction_policy="arc")
    session = ClientSession("engine", "client", reconnects=True, restore=state)
    assert (session.state, session.check_connected()) == (ConnectionState.DISCONNECTED, None)
    assert session.namespace.mirror.lookup(b"aaaa") is Lookup.MISS
    with pytest.raises(Gone, match="not connected"):
        submit(session, 1)
    session.socket_opened()
    connecting = operations.connect(session)
    effect = answer(session, connecting, next(connecting), WELCOME)
    assert isinstance(effect, effects.SendRequest)
    opening = effect.message
    assert isinstance(opening, wire.OpenNamespace)
    assert (opening.fingerprint, opening.policy) == (FINGERPRINT, "arc")
    opened = msgspec.structs.replace(OPENED, request_id=opening.request_id)
    effect = answer(session, connecting, effect, opened)
    assert isinstance(effect, effects.SendOneWay)
    session.receive_message(encode(wire.Snapshot(0, 0, False, (b"aaaa",), True)))
    with pytest.raises(StopIteration):
        connecting.send(effect.until())
    assert session.namespace.mirror.lookup(b"aaaa") is Lookup.HIT
    assert session.namespace.opened.num_blocks == 8


@pytest.mark.parametrize("wrong", [{"cpu_bytes_to_use": -1}, {"store_threshold": 0}])
def test_a_state_that_no_daemon_could_restore_is_refused(wrong: Any) -> None:
    with pytest.raises(Refused):
        SessionState.of_namespace(FINGERPRINT, **wrong).check()
