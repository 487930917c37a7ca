"""The jobs of a session: checks of their arguments, those in flight, and results until they are
fetched."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import SupportsIndex

import msgspec

from kvferry.client.lost_stores import LostStores
from kvferry.client.namespace import ClientNamespace, OpenedNamespace
from kvferry.client.session_state import SessionState
from kvferry.client.splitting import split_transfer
from kvferry.client.wire import Wire
from kvferry.proto.errors import Code, Gone, KVFerryError, Refused, error_of
from kvferry.proto.messages import MAX_JOB_IDS, Cancel, Finished, Submit, Wait
from kvferry.proto.results import JobResult, Outcome
from kvferry.proto.specs import (
    MAX_INT,
    CPULoadStoreSpec,
    Direction,
    GPULoadStoreSpec,
    KeyLoadStoreSpec,
    TransferSpec,
)
from kvferry.proto.status import Limits

_SIDES = frozenset({GPULoadStoreSpec, CPULoadStoreSpec, KeyLoadStoreSpec})


class TransferResult(msgspec.Struct, frozen=True):
    """The result of a job.

    transfer_size: bytes copied. transfer_time: seconds on the device. transfer_type: ("GPU", "CPU")
    for a store, ("CPU", "GPU") for a load. error: why it failed; a failed load is a miss.
    """

    job_id: int
    success: bool
    transfer_size: int
    transfer_time: float
    transfer_type: tuple[str, str]
    outcome: Outcome
    error: KVFerryError | None = None


@dataclass(slots=True)
class _Job:
    """A job in flight. left: its parts without a result. result: of the other parts together."""

    direction: Direction
    gpu_blocks: int
    left: int
    result: JobResult | None = None


class JobTable:
    """Jobs in flight by id, and results that were not fetched. Used in the client's thread.

    A job of several parts has one result: done if all parts are, else that of the first part which
    is not.
    """

    def __init__(self) -> None:
        self._in_flight: dict[int, _Job] = {}
        # Parts in flight, and GPU blocks of both directions.
        self._counts = dict.fromkeys(Direction, 0)
        self._gpu_blocks = 0
        self._results: deque[TransferResult] = deque()

    def __len__(self) -> int:
        return len(self._in_flight)

    def __contains__(self, job_id: int) -> bool:
        return job_id in self._in_flight

    def check_room(self, limits: Limits, spec: TransferSpec, parts: int) -> None:
        """Raise Refused (BUSY) if one more job would exceed the limits of the daemon."""
        direction, gpu_blocks = direction_of(spec), self._gpu_blocks + _gpu_blocks_of(spec)
        in_flight = self._counts[direction]
        if in_flight + parts > limits.max_in_flight(direction):
            text = f"too many {direction}s are in flight; call get_finished first"
            raise Refused(Code.BUSY, text, in_flight)
        if gpu_blocks > limits.max_gpu_blocks:
            text = (
                f"the jobs in flight would have {gpu_blocks} GPU blocks, more than "
                f"{limits.max_gpu_blocks}; call get_finished first"
            )
            raise Refused(Code.BUSY, text, gpu_blocks)

    def add(self, job_id: int, spec: TransferSpec, parts: int) -> None:
        """A job was submitted, in parts."""
        direction, gpu_blocks = direction_of(spec), _gpu_blocks_of(spec)
        self._in_flight[job_id] = _Job(direction, gpu_blocks, parts)
        self._counts[direction] += parts
        self._gpu_blocks += gpu_blocks

    def add_result(self, result: JobResult) -> JobResult | None:
        """The result of a part arrived. Returns that of the job if it has ended. It is ignored if
        the job is not in flight."""
        job = self._in_flight.get(result.job_id)
        if job is None:
            return None
        job.left -= 1
        job.result = whole = _joined(job.result, result)
        self._counts[job.direction] -= 1
        if job.left:
            return None
        del self._in_flight[result.job_id]
        self._gpu_blocks -= job.gpu_blocks
        self._results.append(_result(whole))
        return whole

    def fail_all(self, error: Gone) -> None:
        """The connection was lost: all jobs in flight end as LOST."""
        for job_id, job in self._in_flight.items():
            lost = JobResult(job_id, job.direction, Outcome.LOST, error=error.info)
            self._results.append(_result(lost))
        self._in_flight.clear()
        self._counts, self._gpu_blocks = dict.fromkeys(Direction, 0), 0

    def take_results(self) -> list[TransferResult]:
        """Results that were not taken yet, in order per direction."""
        results = list(self._results)
        if results:
            self._results.clear()
        return results


class SessionJobs:
    """Submits jobs, and refuses loads whose store was lost with a daemon. Client's thread only."""

    def __init__(self, wire: Wire, restore: SessionState, opened: OpenedNamespace) -> None:
        self._wire, self._restore, self._opened = wire, restore, opened
        self._table, self._lost_stores = JobTable(), LostStores()

    def submit(self, job_id: int, spec: TransferSpec, wait_for: int) -> list[bytes]:
        """Encode the messages that start a job, one per part. Call `submitted` once all are sent.

        Raises Refused (DUPLICATE_JOB, BUSY, STALE, SIZE_MISMATCH...) or Gone; nothing changes.
        """
        job_id, wait_for = checked_id("job_id", job_id), checked_id("wait_for", wait_for)
        src, dst = checked_spec(spec, self._opened.if_open)
        if job_id in self._table:
            raise Refused(
                Code.DUPLICATE_JOB, "a job with this id is in flight; use a new job id", job_id
            )
        factor = self._restore.block_size_factor
        parts = split_transfer((src, dst), factor)
        if self._wire.welcome is not None:
            self._table.check_room(self._wire.welcome.limits, spec, len(parts))
        self._lost_stores.check(spec, factor)
        submits = (Submit(job_id, *part, wait_for, number) for number, part in enumerate(parts))
        return [self._wire.request(submit) for submit in submits]

    def submitted(self, job_id: int, spec: TransferSpec, parts: int) -> None:
        """The messages of `submit` were sent: the job is in flight."""
        self._table.add(job_id, spec, parts)
        self._lost_stores.job_submitted(job_id, spec, self._restore.block_size_factor)

    def cancel(self, job_ids: Iterable[int]) -> bytes:
        """Encode the message that cancels jobs. Raises Refused (BAD_SPEC) or Gone."""
        return self._wire.request(Cancel(checked_ids(job_ids)))

    def wait(self, job_ids: Iterable[int]) -> Wait:
        """The request whose reply means that these jobs have ended. Raises Refused (BAD_SPEC)."""
        return Wait(self._wire.next_request_id(), checked_ids(job_ids))

    def in_flight(self, job_ids: Iterable[int]) -> list[int]:
        """Those of these jobs that are in flight."""
        return [job_id for job_id in job_ids if job_id in self._table]

    def take_results(self) -> list[TransferResult]:
        """See JobTable."""
        return self._table.take_results()

    # What happens to the session

    def connection_lost(self, error: Gone) -> None:
        """All jobs in flight end as LOST."""
        self._table.fail_all(error)
        self._lost_stores.connection_lost()

    def receive(self, message: Finished) -> None:
        for result in message.results:
            if (ended := self._table.add_result(result)) is not None:
                done = ended.outcome is Outcome.DONE
                self._lost_stores.job_completed(ended.job_id, done=done)


def direction_of(spec: TransferSpec) -> Direction:
    return Direction.STORE if isinstance(spec[0], GPULoadStoreSpec) else Direction.LOAD


def _gpu_blocks_of(spec: TransferSpec) -> int:
    return sum(side.block_ids.size for side in spec if isinstance(side, GPULoadStoreSpec))


def checked_id(what: str, value: SupportsIndex) -> int:
    """`value` as an int. Raises Refused (BAD_SPEC) with the name `what`."""
    try:
        number = value if type(value) is int else operator.index(value)
    except TypeError:
        number = -1
    if not 0 <= number <= MAX_INT:
        message = f"{what} is {value!r}; give an integer from 0 to {MAX_INT}"
        raise Refused(Code.BAD_SPEC, message, value)
    return number


def checked_ids(job_ids: Iterable[int]) -> tuple[int, ...]:
    """Job ids as a tuple. Raises Refused (BAD_SPEC)."""
    try:
        ids = tuple(checked_id("job_id", job_id) for job_id in job_ids)
    except TypeError:
        message = "job_ids must be a list of integers"
        raise Refused(Code.BAD_SPEC, message, job_ids) from None
    if len(ids) > MAX_JOB_IDS:
        raise Refused(
            Code.BAD_SPEC, f"{len(ids)} job ids were given; give at most {MAX_JOB_IDS}", len(ids)
        )
    return ids


def checked_spec(spec: TransferSpec, namespace: ClientNamespace | None) -> TransferSpec:
    """Check that a daemon can decode both specs. It checks whether they match each other.

    namespace: that of the client, if it has opened one. Raises Refused (BAD_SPEC, BAD_KEY).
    """
    if (
        not isinstance(spec, tuple | list)
        or len(spec) != 2
        or type(spec[0]) not in _SIDES
        or type(spec[1]) not in _SIDES
    ):
        message = "spec must be a pair of a GPULoadStoreSpec and a host-side spec"
        raise Refused(Code.BAD_SPEC, message, spec)
    for side in spec:
        if isinstance(side, KeyLoadStoreSpec) and namespace is not None:
            namespace.checked_keys(side.keys)
        else:
            side.check()
    return spec


def _joined(whole: JobResult | None, part: JobResult) -> JobResult:
    """The result of several parts: done if all are, else the first one that is not."""
    if whole is None:
        return part
    if whole.outcome is not Outcome.DONE or part.outcome is not Outcome.DONE:
        return part if whole.outcome is Outcome.DONE else whole
    nbytes, seconds = whole.nbytes + part.nbytes, whole.seconds + part.seconds
    return msgspec.structs.replace(whole, nbytes=nbytes, seconds=seconds)


def _result(result: JobResult) -> TransferResult:
    return TransferResult(
        result.job_id,
        result.outcome is Outcome.DONE,
        result.nbytes,
        result.seconds,
        result.direction.transfer_type,
        result.outcome,
        None if result.error is None else error_of(result.error),
    )
