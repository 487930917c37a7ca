"""Jobs of a session: what is sent, results, credits."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import numpy as np
import pytest

from kvferry.client.jobs import TransferResult
from kvferry.client.session import ClientSession
from kvferry.client.session_state import RegistrationState
from kvferry.client.tensors.canonical import CanonicalKVCaches
from kvferry.proto import messages as wire
from kvferry.proto.codec import decode_client_message, encode
from kvferry.proto.errors import Code, ErrorInfo, Failed, Gone, KVFerryError, Refused
from kvferry.proto.memory import HostRegion
from kvferry.proto.results import Outcome
from kvferry.proto.specs import (
    MAX_MESSAGE_IDS,
    CPULoadStoreSpec,
    Direction,
    GPULoadStoreSpec,
    KeyLoadStoreSpec,
    KVLayout,
    TensorLayout,
    TensorRef,
)
from support.client_session import (
    KEYED_LOAD,
    KEYED_STORE,
    LOAD,
    MAX_JOBS,
    STORE,
    WELCOME,
    finish,
    outcomes,
    submit,
)


@pytest.mark.parametrize("spec", [STORE, LOAD, KEYED_STORE, KEYED_LOAD])
def test_a_job_is_sent_unchanged(session: ClientSession, spec: Any) -> None:
    src, dst = spec
    (data,) = session.jobs.submit(7, spec, 12)
    assert decode_client_message(data) == wire.Submit(7, src, dst, 12)


def test_a_result_is_returned_once_and_in_order(session: ClientSession) -> None:
    for job_id in (1, 2, 3):
        submit(session, job_id)
    finish(session, 2, nbytes=4096, seconds=0.5)
    finish(session, 3, 1)
    first, *others = session.jobs.take_results()
    assert first == TransferResult(2, True, 4096, 0.5, ("GPU", "CPU"), Outcome.DONE)
    assert [result.job_id for result in others] == [3, 1]
    assert (session.jobs.take_results(), session.jobs.in_flight([1, 2, 3])) == ([], [])


@pytest.mark.parametrize(
    ("outcome", "code", "kind"),
    [
        (Outcome.FAILED, Code.COPY_FAILED, Failed),
        (Outcome.FAILED, Code.ENGINE_GONE, Gone),
        (Outcome.CANCELLED, Code.CANCELLED, Gone),
        (Outcome.REFUSED, Code.BUSY, Refused),
    ],
)
def test_an_unsuccessful_job_has_its_error(
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
    assert session.jobs.in_flight([7]) == []


def test_results_of_unknown_jobs_are_ignored(session: ClientSession) -> None:
    submit(session, 1)
    finish(session, 9)
    finish(session, 1, 1)
    finish(session, 1, outcome=Outcome.FAILED)
    assert outcomes(session) == [(1, "done")]


def test_a_job_id_is_used_once_at_a_time(session: ClientSession) -> None:
    session.jobs.submit(7, STORE, 0)
    assert session.jobs.in_flight([7]) == []  # the message was not sent
    submit(session, 7)
    with pytest.raises(Refused) as caught:
        session.jobs.submit(7, LOAD, 0)
    assert (caught.value.code, caught.value.value) == (Code.DUPLICATE_JOB, "7")
    finish(session, 7)
    submit(session, 7)
    assert session.jobs.in_flight([6, 7, 8]) == [7]


def test_credits_are_spent_and_returned(session: ClientSession) -> None:
    for job_id in range(MAX_JOBS):
        submit(session, job_id)
    with pytest.raises(Refused) as caught:
        session.jobs.submit(9, STORE, 0)
    assert (caught.value.code, session.jobs.in_flight([9])) == (Code.BUSY, [])
    finish(session, 1)
    submit(session, 9)
    assert session.jobs.in_flight(range(10)) == [0, 2, 9]


# Jobs in parts


MANY = MAX_MESSAGE_IDS + 10


@pytest.fixture
def large(session: ClientSession) -> ClientSession:
    """A session with room for large jobs, and with KV caches of one GPU block per host block."""
    limits = msgspec.structs.replace(WELCOME.limits, max_gpu_blocks=1 << 20)
    session.receive_message(encode(msgspec.structs.replace(WELCOME, limits=limits)))
    layout = KVLayout((TensorLayout(MANY, 1, 1),), ((TensorRef(0, 1),),))
    caches = CanonicalKVCaches(layout, ())
    session.kv_caches_registered(RegistrationState(caches, None, None), HostRegion(MANY, 1, False))
    return session


def submit_many(session: ClientSession, job_id: int) -> list[wire.ClientMessage]:
    """Submit a store of two parts."""
    spec = GPULoadStoreSpec(range(MANY)), CPULoadStoreSpec(range(MANY))
    messages = session.jobs.submit(job_id, spec, 12)
    session.jobs.submitted(job_id, spec, len(messages))
    return [decode_client_message(data) for data in messages]


def test_a_large_job_is_sent_in_parts(large: ClientSession) -> None:
    tail = np.arange(MAX_MESSAGE_IDS, MANY)
    head = np.arange(MAX_MESSAGE_IDS)
    assert submit_many(large, 7) == [
        wire.Submit(7, GPULoadStoreSpec(ids, (ids.size,), (ids[0],)), CPULoadStoreSpec(ids), 12, n)
        for n, ids in enumerate([tail, head])
    ]


def test_a_job_in_parts_has_one_result(large: ClientSession) -> None:
    submit_many(large, 7)
    finish(large, 7, nbytes=4096, seconds=0.5)
    assert (large.jobs.take_results(), large.jobs.in_flight([7])) == ([], [7])
    finish(large, 7, nbytes=1024, seconds=0.25)
    done = TransferResult(7, True, 5120, 0.75, ("GPU", "CPU"), Outcome.DONE)
    assert (large.jobs.take_results(), large.jobs.in_flight([7])) == ([done], [])


@pytest.mark.parametrize(
    "codes", [(None, Code.BUSY), (Code.BUSY, None), (Code.BUSY, Code.CACHE_FULL)]
)
def test_the_first_part_that_is_not_done_is_the_result(
    large: ClientSession, codes: tuple[Code | None, Code | None]
) -> None:
    submit_many(large, 7)
    for code in codes:
        if code is None:
            finish(large, 7, nbytes=4096)
        else:
            finish(large, 7, outcome=Outcome.REFUSED, error=ErrorInfo(code, "no", "1"))
    (result,) = large.jobs.take_results()
    assert (result.outcome, result.transfer_size) == ("refused", 0)
    assert result.error is not None
    assert result.error.code == Code.BUSY


def test_each_part_uses_a_credit(large: ClientSession) -> None:
    submit_many(large, 1)
    with pytest.raises(Refused) as caught:
        submit_many(large, 2)
    assert (caught.value.code, caught.value.value) == (Code.BUSY, "2")
    assert large.jobs.in_flight([2]) == []
    finish(large, 1)
    submit_many(large, 2)
    assert large.jobs.in_flight([1, 2]) == [1, 2]


def test_gpu_blocks_in_flight_are_bounded(session: ClientSession) -> None:
    large = GPULoadStoreSpec(range(7)), CPULoadStoreSpec(range(7))
    submit(session, 1, large)
    with pytest.raises(Refused) as caught:
        session.jobs.submit(2, (large[1], large[0]), 0)
    assert (caught.value.code, caught.value.value) == (Code.BUSY, "14")
    submit(session, 2)
    finish(session, 1)
    submit(session, 3, large)


def test_a_large_job_needs_the_size_of_a_host_block(session: ClientSession) -> None:
    spec = GPULoadStoreSpec(range(MANY)), CPULoadStoreSpec(range(MANY))
    with pytest.raises(Refused) as caught:
        session.jobs.submit(1, spec, 0)
    assert caught.value.code == Code.NOT_REGISTERED


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
        (1, STORE[0], 0),
        (1, None, 0),
    ],
)
def test_a_job_that_no_daemon_can_decode_is_refused_by_the_client(
    session: ClientSession, job_id: int, spec: Any, wait_for: int
) -> None:
    """The daemon could not report the job id, because it could not decode the message."""
    with pytest.raises(Refused):
        session.jobs.submit(job_id, spec, wait_for)


@pytest.mark.parametrize("sizes", [[2], [1, 1]])
def test_group_sizes_may_be_arrays_or_are_refused(session: ClientSession, sizes: list[int]) -> None:
    array = cast(Any, np.array(sizes))
    try:
        (data,) = session.jobs.submit(1, (GPULoadStoreSpec([1, 2], array, array), STORE[1]), 0)
    except Refused:
        return
    message = decode_client_message(data)
    assert isinstance(message, wire.Submit)
    assert message.src == GPULoadStoreSpec([1, 2], tuple(sizes), tuple(sizes))


@pytest.mark.parametrize("method", ["cancel", "wait"])
@pytest.mark.parametrize("job_ids", [[-1], range(65537), 5, None])
def test_job_ids_that_no_daemon_can_decode_are_refused_by_the_client(
    session: ClientSession, method: str, job_ids: Any
) -> None:
    with pytest.raises(Refused):
        session.jobs.cancel(job_ids) if method == "cancel" else session.jobs.wait(job_ids)
