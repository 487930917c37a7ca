"""What a client knows, fed with bytes: no socket, no clock."""

from __future__ import annotations

import traceback
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from kvferry.client import steps, verbs
from kvferry.client.conversation import Conversation, Place
from kvferry.client.jobs import TransferResult
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
def talk() -> Conversation:
    talk = Conversation("engine", "client")
    talk.feed(encode(WELCOME))
    return talk


def submit(talk: Conversation, job_id: int, spec: Any = STORE) -> None:
    talk.submit(job_id, spec, 0)
    talk.submitted(job_id, spec)


def finish(talk: Conversation, *job_ids: int, **result: Any) -> None:
    fields = {"direction": Direction.STORE, "outcome": Outcome.DONE} | result
    talk.feed(encode(wire.Finished(tuple(wire.JobResult(job_id, **fields) for job_id in job_ids))))


def outcomes(talk: Conversation) -> list[tuple[int, str]]:
    return [(result.job_id, result.outcome) for result in talk.jobs.results()]


# Greeting


def test_the_first_message_says_who_speaks() -> None:
    assert Conversation("engine", "client").hello() == wire.Hello(1, 1, "client", "engine")


def test_a_client_is_greeted_once_the_welcome_is_there() -> None:
    talk = Conversation("engine", "client")
    assert talk.greeted() is None
    talk.feed(encode(WELCOME))
    assert talk.greeted() == WELCOME


@pytest.mark.parametrize(
    ("code", "kind"), [(Code.PROTOCOL_VERSION, Refused), (Code.SHUTTING_DOWN, Gone)]
)
def test_a_client_that_is_turned_away_learns_why(code: Code, kind: type[KVFerryError]) -> None:
    talk = Conversation("engine", "client")
    talk.feed(encode(wire.Error(None, ErrorInfo(code, "no"))))
    with pytest.raises(kind) as caught:
        talk.greeted()
    assert caught.value.code == code


# Jobs


@pytest.mark.parametrize("spec", [STORE, LOAD, KEYED_STORE, KEYED_LOAD])
def test_a_job_is_sent_as_it_was_given(talk: Conversation, spec: Any) -> None:
    src, dst = spec
    assert decode_client_message(talk.submit(7, spec, 12)) == wire.Submit(7, src, dst, 12)


def test_a_result_comes_once(talk: Conversation) -> None:
    submit(talk, 7)
    finish(talk, 7, nbytes=4096, seconds=0.5)
    done = TransferResult(7, True, 4096, 0.5, ("GPU", "CPU"), Outcome.DONE)
    assert talk.jobs.results() == [done]
    assert (talk.jobs.results(), len(talk.jobs)) == ([], 0)


def test_results_keep_the_order_in_which_they_came(talk: Conversation) -> None:
    for job_id in (1, 2, 3):
        submit(talk, job_id)
    finish(talk, 2, 3)
    finish(talk, 1)
    assert outcomes(talk) == [(2, "done"), (3, "done"), (1, "done")]


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
    talk: Conversation, outcome: Outcome, code: Code, kind: type[KVFerryError]
) -> None:
    submit(talk, 7, LOAD)
    finish(talk, 7, direction=Direction.LOAD, outcome=outcome, error=ErrorInfo(code, "why", "17"))
    (result,) = talk.jobs.results()
    assert (result.success, result.outcome, result.transfer_size) == (False, outcome, 0)
    assert result.transfer_type == ("CPU", "GPU")
    assert type(result.error) is kind
    assert result.error.info == ErrorInfo(code, "why", "17")
    assert not talk.jobs


def test_results_that_nobody_waits_for_are_ignored(talk: Conversation) -> None:
    submit(talk, 1)
    finish(talk, 9)
    finish(talk, 1, 1)
    finish(talk, 1, outcome=Outcome.FAILED)
    assert outcomes(talk) == [(1, "done")]


def test_a_job_id_is_used_once_at_a_time(talk: Conversation) -> None:
    submit(talk, 7)
    with pytest.raises(Refused) as caught:
        talk.submit(7, LOAD, 0)
    assert (caught.value.code, caught.value.value) == (Code.DUPLICATE_JOB, "7")
    finish(talk, 7)
    submit(talk, 7)
    assert talk.under_way([6, 7, 8]) == [7]


def test_credits_are_spent_and_come_back(talk: Conversation) -> None:
    for job_id in range(MAX_JOBS):
        submit(talk, job_id)
    with pytest.raises(Refused) as caught:
        talk.submit(9, STORE, 0)
    assert (caught.value.code, talk.under_way([9])) == (Code.BUSY, [])
    finish(talk, 1)
    submit(talk, 9)
    assert talk.under_way(range(10)) == [0, 2, 9]


def test_a_message_that_was_not_sent_is_no_job(talk: Conversation) -> None:
    talk.submit(7, STORE, 0)
    assert not talk.jobs
    submit(talk, 7)
    assert talk.jobs


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
    talk: Conversation, job_id: int, spec: Any, wait_for: int
) -> None:
    """The daemon could not say whose fault it is: to it these bytes are no message of a job."""
    with pytest.raises(Refused):
        talk.submit(job_id, spec, wait_for)


@pytest.mark.parametrize("sizes", [[2], [1, 1]])
def test_group_sizes_may_be_arrays_or_are_refused(talk: Conversation, sizes: list[int]) -> None:
    array = cast(Any, np.array(sizes))
    try:
        data = talk.submit(1, (GPULoadStoreSpec([1, 2], array, array), STORE[1]), 0)
    except Refused:
        return
    message = decode_client_message(data)
    assert isinstance(message, wire.Submit)
    assert message.src == GPULoadStoreSpec([1, 2], tuple(sizes), tuple(sizes))


@pytest.mark.parametrize("make", ["cancel", "wait"])
@pytest.mark.parametrize("job_ids", [[-1], range(65537)])
def test_job_ids_that_no_daemon_can_read_are_refused_here(
    talk: Conversation, make: str, job_ids: Any
) -> None:
    with pytest.raises(Refused):
        talk.cancel(job_ids) if make == "cancel" else talk.wait(job_ids)


# Requests


def test_requests_have_numbers_of_their_own(talk: Conversation) -> None:
    requests = [talk.wait([7, 8]) for _ in range(3)]
    assert len({request.request_id for request in requests}) == 3
    data = talk.request(requests[0])
    assert decode_client_message(data) == wire.Wait(requests[0].request_id, (7, 8))
    assert decode_client_message(talk.cancel(iter([7]))) == wire.Cancel((7,))


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
def test_a_reply_is_there_once_and_for_its_request(talk: Conversation, reply: Any) -> None:
    with talk.asking(wire.StatusRequest(5)), talk.asking(wire.StatusRequest(4)):
        assert talk.reply(5) is None
        talk.feed(encode(reply))
        assert talk.reply(4) is None
        assert talk.reply(5) == reply
        assert talk.reply(5) is None


def test_a_reply_that_nobody_waits_for_is_not_kept(talk: Conversation) -> None:
    with talk.asking(wire.StatusRequest(5)):
        pass
    talk.feed(encode(wire.Waited(5)))
    talk.feed(encode(wire.Error(5, BUSY)))
    assert talk.reply(5) is None


def test_an_error_is_raised_at_its_request_once(talk: Conversation) -> None:
    with talk.asking(wire.StatusRequest(5)), talk.asking(wire.StatusRequest(4)):
        talk.feed(encode(wire.Error(5, BUSY)))
        assert talk.reply(4) is None
        with pytest.raises(Refused, match="later") as caught:
            talk.reply(5)
        assert caught.value.info == BUSY
        assert talk.reply(5) is None


def test_an_error_that_belongs_to_nothing_is_raised_where_it_arrives(talk: Conversation) -> None:
    with pytest.raises(Refused, match="later"):
        talk.feed(encode(wire.Error(None, BUSY)))


@pytest.mark.parametrize("data", [b"", b"\xc1", encode(wire.StatusRequest(1))])
def test_bytes_that_are_no_daemon_s_message_are_refused(talk: Conversation, data: bytes) -> None:
    with pytest.raises(Refused) as caught:
        talk.feed(data)
    assert caught.value.code == Code.BAD_MESSAGE


# A namespace


FINGERPRINT = told.Fingerprint("llama", 4096, key_bytes=4)
NEWS = wire.KeyEvents(1, (wire.KeyEvent(EventKind.STORED, (b"aaaa",)),))


def enter(talk: Conversation) -> Conversation:
    opening = wire.OpenNamespace(1, FINGERPRINT)
    talk.enter(opening, wire.Opened(1, FINGERPRINT.name, 8, 4096, False, "lru", 1))
    return talk


@pytest.mark.parametrize("message", [NEWS, wire.Snapshot(1, 0, False, (b"aaaa",), True)])
def test_what_is_told_of_a_namespace_needs_a_mirror(talk: Conversation, message: Any) -> None:
    talk.feed(encode(message))
    enter(talk).feed(encode(message))
    assert talk.astray() is None
    talk.namespace.follow()
    talk.feed(encode(message))
    assert talk.astray() is None
    assert talk.mirrored() == isinstance(message, wire.Snapshot)


def test_a_mirror_that_is_astray_is_followed_up_once(talk: Conversation) -> None:
    enter(talk).namespace.follow()
    talk.feed(encode(wire.Snapshot(0, 0, False, (), True)))
    talk.feed(encode(wire.KeyEvents(2, NEWS.events)))
    talk.feed(encode(wire.KeyEvents(4, NEWS.events)))
    follow = talk.astray()
    assert follow is not None
    assert decode_client_message(follow) == wire.Subscribe()
    assert talk.astray() is None


def test_a_mirror_is_not_followed_up_at_a_daemon_that_is_gone(talk: Conversation) -> None:
    enter(talk).namespace.follow()
    talk.feed(encode(wire.Snapshot(0, 0, False, (), True)))
    talk.feed(encode(wire.KeyEvents(2, NEWS.events)))
    talk.lose(Gone(Code.DAEMON_GONE, "killed"))
    assert talk.astray() is None
    with pytest.raises(Gone):
        talk.mirrored()


def test_a_reset_that_nobody_asked_for_changes_nothing(talk: Conversation) -> None:
    mirror = enter(talk).namespace.follow()
    talk.feed(encode(wire.Snapshot(0, 0, False, (b"aaaa",), True)))
    talk.feed(encode(wire.Done(5)))
    assert mirror.lookup(b"aaaa") is Lookup.HIT


def test_a_reset_that_is_waited_for_is_refused_to_who_waits(talk: Conversation) -> None:
    enter(talk)
    reset, unheard = talk.reset(), talk.reset()
    with talk.asking(reset):
        talk.feed(encode(wire.Error(reset.request_id, BUSY)))
        with pytest.raises(Refused, match="later"):
            talk.reply(reset.request_id)
    with pytest.raises(Refused, match="later"):
        talk.feed(encode(wire.Error(unheard.request_id, BUSY)))


@pytest.mark.parametrize("inside", [False, True])
def test_kv_caches_are_registered_with_a_region_or_in_a_namespace(
    talk: Conversation, inside: bool
) -> None:
    layout = KVLayout((TensorLayout(8, 64, 64),), ((TensorRef(0, 64),),))
    if inside:
        enter(talk)
    verb = verbs.allocate(talk, layout, None if inside else 4096, None)
    assert isinstance(next(verb), steps.Until)
    step = verb.send(True)
    assert isinstance(step, steps.Tell)
    assert step.message == wire.AllocateKVCaches(1, layout, None if inside else 4096)


# The end


ENDS = {
    "goodbye": encode(wire.Goodbye("stopping")),
    "restarted": encode(wire.Error(None, ErrorInfo(Code.NO_SESSION, "who are you?"))),
}


@pytest.mark.parametrize("end", ENDS)
def test_jobs_under_way_are_lost_with_the_daemon(talk: Conversation, end: str) -> None:
    for job_id, spec in ((1, STORE), (2, LOAD), (3, STORE)):
        submit(talk, job_id, spec)
    finish(talk, 1)
    talk.feed(ENDS[end])
    one, two, three = talk.jobs.results()
    assert [one.outcome, two.outcome, three.outcome] == ["done", "lost", "lost"]
    assert (two.transfer_type, three.transfer_type) == (("CPU", "GPU"), ("GPU", "CPU"))
    assert not two.success
    assert isinstance(two.error, Gone)
    assert two.error.code == Code.DAEMON_GONE
    assert not talk.jobs
    finish(talk, 2)
    talk.feed(ENDS[end])
    assert talk.jobs.results() == []


@pytest.mark.parametrize("end", ENDS)
def test_nothing_can_be_asked_of_a_daemon_that_is_gone(talk: Conversation, end: str) -> None:
    with talk.asking(wire.StatusRequest(5)):
        talk.feed(encode(wire.Waited(5)))
        talk.feed(ENDS[end])
        for ask in (
            lambda: talk.submit(1, STORE, 0),
            lambda: talk.cancel([1]),
            lambda: talk.request(talk.wait([1])),
            lambda: talk.request(wire.StatusRequest(7)),
            lambda: talk.reply(6),
        ):
            with pytest.raises(Gone) as caught:
                ask()
            assert caught.value.code == Code.DAEMON_GONE
        assert talk.reply(5) == wire.Waited(5)  # it came before the end


def test_the_first_reason_for_the_end_stands(talk: Conversation) -> None:
    first = Gone(Code.TIMEOUT, "no answer")
    talk.lose(first)
    talk.lose(Gone(Code.DAEMON_GONE, "later"))
    assert talk.gone is first


# And another daemon after it

OPENED = wire.Opened(1, FINGERPRINT.name, 8, 4096, False, "lru", 1)
REGION = memory.HostRegion(8, 64, False)
LATER = msgspec.structs.replace(WELCOME, boot_id="later", session_id="s2")
KILLED = Gone(Code.DAEMON_GONE, "killed")


@pytest.fixture
def lasting() -> Conversation:
    """HERE, with a daemon that may be followed by another."""
    talk = Conversation("engine", "client", lasting=True)
    talk.feed(encode(WELCOME))
    talk.joined()
    return talk


def answer(talk: Conversation, verb: Any, step: Any, message: Any) -> Any:
    """Feed what a daemon answers to a step, and go on to the next one."""
    if isinstance(step, steps.Ask):
        with talk.asking(step.request):
            talk.feed(encode(message))
            return verb.send(talk.reply(step.request.request_id))
    if message is not None:
        talk.feed(encode(message))
    assert step.until() is not None
    return verb.send(step.until())


def come_back(talk: Conversation, welcome: wire.Welcome = LATER) -> None:
    """With nothing to be had again."""
    talk.begin()
    verb = verbs.join(talk)
    with pytest.raises(StopIteration):
        answer(talk, verb, next(verb), welcome)


def test_where_a_conversation_stands(lasting: Conversation) -> None:
    assert (lasting.place, lasting.gone, lasting.incarnation) == (Place.HERE, None, 1)
    lasting.lose(KILLED)
    assert (lasting.place, lasting.present()) == (Place.AWAY, None)
    assert "connecting again" in str(lasting.gone)
    lasting.begin()
    assert (lasting.place, lasting.present()) == (Place.COMING, None)
    with pytest.raises(Gone, match="connecting again"):
        lasting.submit(1, STORE, 0)
    lasting.lose(KILLED)
    come_back(lasting)
    assert (lasting.place, lasting.present(), lasting.incarnation) == (Place.HERE, True, 2)
    lasting.lose(KILLED)
    lasting.leave()
    assert lasting.for_good
    with pytest.raises(Gone):
        lasting.present()


def test_all_is_had_again_in_order(lasting: Conversation) -> None:
    opening = wire.OpenNamespace(1, FINGERPRINT, 1 << 20, "arc", 2)
    lasting.enter(opening, OPENED)
    mirror = lasting.namespace.follow()
    lasting.feed(encode(wire.Snapshot(3, 0, False, (b"aaaa",), True)))
    lasting.namespace.pin([b"aaaa", b"bbbb", b"aaaa"])
    lasting.lose(KILLED)
    lasting.begin()
    verb = verbs.join(lasting)
    step: Any = next(verb)
    assert step.message == wire.Hello(1, 1, "client", "engine")
    step = answer(lasting, verb, step, LATER)
    again = step.request
    assert msgspec.structs.replace(again, request_id=1) == opening
    step = answer(lasting, verb, step, msgspec.structs.replace(OPENED, request_id=again.request_id))
    assert step.message == wire.Subscribe()
    assert step.until() is None
    lasting.feed(encode(wire.Snapshot(1, 0, False, (b"bbbb",), True)))
    assert mirror.lookup(b"bbbb") is Lookup.MISS
    step = answer(lasting, verb, step, None)
    assert step.message == wire.Pin((b"aaaa", b"aaaa", b"bbbb"))
    with pytest.raises(StopIteration):
        answer(lasting, verb, step, None)
    assert [mirror.lookup(key) for key in (b"aaaa", b"bbbb")] == [Lookup.MISS, Lookup.HIT]


def test_resets_that_were_not_done_are_done_before_anything_shows(lasting: Conversation) -> None:
    lasting.enter(wire.OpenNamespace(1, FINGERPRINT), OPENED)
    lasting.namespace.follow()
    lasting.reset()
    lasting.lose(KILLED)
    lasting.reset()
    lasting.begin()
    verb = verbs.join(lasting)
    step = answer(lasting, verb, next(verb), WELCOME)
    opened = msgspec.structs.replace(OPENED, request_id=step.request.request_id)
    step = answer(lasting, verb, step, opened)
    lasting.feed(encode(wire.Snapshot(1, 0, False, (b"aaaa",), True)))
    step = answer(lasting, verb, step, None)
    assert isinstance(step.request, wire.Reset)
    with pytest.raises(StopIteration):
        answer(lasting, verb, step, wire.Done(step.request.request_id))
    assert lasting.namespace.mirror.lookup(b"aaaa") is Lookup.MISS
    assert lasting.namespace.undone() == ()


def test_a_host_block_whose_store_was_lost_is_not_loaded_until_it_is_stored_again(
    lasting: Conversation,
) -> None:
    """A daemon that has the blocks of the one before may have what was there before that store."""
    submit(lasting, 1, STORE)
    lasting.lose(KILLED)
    come_back(lasting)
    with pytest.raises(Refused) as caught:
        lasting.submit(2, LOAD, 0)
    assert (caught.value.code, caught.value.value) == (Code.STALE, "3")
    submit(lasting, 3, STORE)
    failed = wire.JobResult(3, Direction.STORE, Outcome.FAILED)
    lasting.feed(encode(wire.Finished((failed,))))
    with pytest.raises(Refused):
        lasting.submit(2, LOAD, 0)
    submit(lasting, 4, STORE)
    lasting.feed(encode(wire.Finished((wire.JobResult(4, Direction.STORE, Outcome.DONE),))))
    lasting.submit(2, LOAD, 0)


def test_who_waits_is_told_once_that_the_daemon_went(lasting: Conversation) -> None:
    with lasting.asking(wire.StatusRequest(5)):
        lasting.lose(KILLED)
        lasting.begin()
        with pytest.raises(Gone, match="killed"):
            lasting.reply(5)
    with lasting.asking(wire.StatusRequest(6)):
        assert lasting.reply(6) is None


def test_a_daemon_that_does_not_take_us_back(lasting: Conversation) -> None:
    full = Refused(Code.POOL_FULL, "no room", 5)
    lasting.lose(KILLED)
    lasting.begin()
    lasting.turned_away(full)
    assert (lasting.place, lasting.refused) == (Place.AWAY, full)
    with pytest.raises(Gone, match="no room") as caught:
        lasting.present()
    assert caught.value.__cause__ is full
    lasting.begin()
    lasting.turned_away(Gone(Code.SHUTTING_DOWN, "stopping"))
    assert lasting.refused is full
    come_back(lasting)
    assert lasting.gone is None


def test_why_the_daemon_is_gone_does_not_grow(lasting: Conversation) -> None:
    """An engine may ask at every step, for hours."""
    lasting.lose(KILLED)
    for _ in range(100):
        with pytest.raises(Gone) as caught:
            lasting.submit(1, STORE, 0)
    assert len(traceback.extract_tb(caught.value.__traceback__)) < 10
