"""Jobs: checks of their arguments, those in flight, and results until they are fetched."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable
from typing import SupportsIndex

import msgspec

from kvferry.client.namespace import ClientNamespace
from kvferry.proto.errors import Code, Gone, KVFerryError, Refused, error_of
from kvferry.proto.messages import MAX_JOB_IDS
from kvferry.proto.results import JobResult, Outcome
from kvferry.proto.specs import (
    MAX_INT,
    CPULoadStoreSpec,
    Direction,
    GPULoadStoreSpec,
    KeyLoadStoreSpec,
    TransferSpec,
)

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


class JobTable:
    """Jobs in flight by id, and results that were not fetched. Used in the client's thread."""

    def __init__(self) -> None:
        self.in_flight: dict[int, Direction] = {}
        self._counts = dict.fromkeys(Direction, 0)
        self._results: deque[TransferResult] = deque()

    def __len__(self) -> int:
        return len(self.in_flight)

    def __contains__(self, job_id: int) -> bool:
        return job_id in self.in_flight

    def add(self, job_id: int, direction: Direction) -> None:
        """A job was submitted."""
        self.in_flight[job_id] = direction
        self._counts[direction] += 1

    def count(self, direction: Direction) -> int:
        """Number of jobs of one direction in flight."""
        return self._counts[direction]

    def add_result(self, result: JobResult) -> None:
        """A result arrived. It is ignored if the job is not in flight."""
        direction = self.in_flight.pop(result.job_id, None)
        if direction is not None:
            self._counts[direction] -= 1
            self._results.append(_result(result))

    def fail_all(self, error: Gone) -> None:
        """The connection was lost: all jobs in flight end as LOST."""
        for job_id, direction in self.in_flight.items():
            lost = JobResult(job_id, direction, Outcome.LOST, error=error.info)
            self._results.append(_result(lost))
        self.in_flight.clear()
        self._counts = dict.fromkeys(Direction, 0)

    def take_results(self) -> list[TransferResult]:
        """Results that were not taken yet, in order per direction."""
        results = list(self._results)
        if results:
            self._results.clear()
        return results


def direction_of(spec: TransferSpec) -> Direction:
    return Direction.STORE if isinstance(spec[0], GPULoadStoreSpec) else Direction.LOAD


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
    ids = tuple(checked_id("job_id", job_id) for job_id in job_ids)
    if len(ids) > MAX_JOB_IDS:
        raise Refused(
            Code.BAD_SPEC, f"{len(ids)} job ids were given; give at most {MAX_JOB_IDS}", len(ids)
        )
    return ids


def checked_spec(spec: TransferSpec, namespace: ClientNamespace | None) -> TransferSpec:
    """Check that a daemon can decode both specs. It checks whether they match each other.

    namespace: that of the client, if it has opened one. Raises Refused (BAD_SPEC, BAD_KEY).
    """
    if len(spec) != 2 or type(spec[0]) not in _SIDES or type(spec[1]) not in _SIDES:
        message = "spec must be a pair of a GPULoadStoreSpec and a host-side spec"
        raise Refused(Code.BAD_SPEC, message, spec)
    for side in spec:
        if isinstance(side, KeyLoadStoreSpec) and namespace is not None:
            namespace.checked_keys(side.keys)
        else:
            side.check()
    return spec


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
