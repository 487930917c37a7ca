"""Jobs under way, and how those that ended did."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable
from typing import SupportsIndex

import msgspec

from kvferry.proto.errors import Code, Gone, KVFerryError, Refused, error_of
from kvferry.proto.messages import MAX_JOB_IDS, JobResult, Outcome
from kvferry.proto.specs import MAX_INT, Direction, GPULoadStoreSpec, TransferSpec


class TransferResult(msgspec.Struct, frozen=True):
    """How a job ended.

    transfer_size: bytes moved. transfer_time: seconds on the device. transfer_type: ("GPU", "CPU")
    for a store, ("CPU", "GPU") for a load. error: why it did not succeed; a failed load is a miss.
    """

    job_id: int
    success: bool
    transfer_size: int
    transfer_time: float
    transfer_type: tuple[str, str]
    outcome: Outcome
    error: KVFerryError | None = None


class Jobs:
    def __init__(self) -> None:
        self.under_way: dict[int, Direction] = {}
        """Which way each goes."""
        self._counts = dict.fromkeys(Direction, 0)
        self._ended: deque[TransferResult] = deque()

    def __len__(self) -> int:
        return len(self.under_way)

    def __contains__(self, job_id: int) -> bool:
        return job_id in self.under_way

    def add(self, job_id: int, direction: Direction) -> None:
        self.under_way[job_id] = direction
        self._counts[direction] += 1

    def count(self, direction: Direction) -> int:
        """How many of one direction are under way."""
        return self._counts[direction]

    def take(self, result: JobResult) -> None:
        """A result arrived. One of a job that is not under way is ignored."""
        direction = self.under_way.pop(result.job_id, None)
        if direction is not None:
            self._counts[direction] -= 1
            self._ended.append(_result(result))

    def lose(self, error: Gone) -> None:
        """The daemon is gone: what is under way ends as lost."""
        for job_id, direction in self.under_way.items():
            lost = JobResult(job_id, direction, Outcome.LOST, error=error.info)
            self._ended.append(_result(lost))
        self.under_way.clear()
        self._counts = dict.fromkeys(Direction, 0)

    def results(self) -> list[TransferResult]:
        """What ended since this was asked last."""
        results = list(self._ended)
        if results:
            self._ended.clear()
        return results


def direction_of(spec: TransferSpec) -> Direction:
    return Direction.STORE if isinstance(spec[0], GPULoadStoreSpec) else Direction.LOAD


def checked_id(what: str, value: SupportsIndex) -> int:
    try:
        number = value if type(value) is int else operator.index(value)
    except TypeError:
        number = -1
    if not 0 <= number <= MAX_INT:
        raise Refused(Code.BAD_SPEC, f"{what} is a number from 0 to {MAX_INT}", value)
    return number


def checked_ids(job_ids: Iterable[int]) -> tuple[int, ...]:
    ids = tuple(checked_id("a job id", job_id) for job_id in job_ids)
    if len(ids) > MAX_JOB_IDS:
        raise Refused(Code.BAD_SPEC, f"at most {MAX_JOB_IDS} job ids at once", len(ids))
    return ids


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
