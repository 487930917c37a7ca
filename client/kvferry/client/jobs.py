"""Jobs under way, and how those that ended did.

The result of a job that ran comes by the socket, and where there is a bulletin it is there first,
as a rule: in the same order, so that a count tells which of them were had already. A refused job
never ran, and its result comes by the socket only.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable
from typing import SupportsIndex

import msgspec

from kvferry.proto.bulletin import Bulletin
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
        self.bulletin: Bulletin | None = None
        self.under_way: dict[int, Direction] = {}
        """Which way each goes."""
        self._counts = dict.fromkeys(Direction, 0)
        self._ended: deque[TransferResult] = deque()
        self._had = 0
        """Results of jobs that ran, by either way."""
        self._from_socket = 0

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
        """A result came by the socket."""
        if result.outcome is not Outcome.REFUSED:
            self._from_socket += 1
            if self._from_socket <= self._had:
                return
            self._had = self._from_socket
        self._end(result)

    def read_bulletin(self) -> bool:
        """Take in what is to be read there; whether that was anything."""
        before = self._had
        if self.bulletin is None or not self.bulletin.shows_more_than(before):
            return False
        for result in self.bulletin.read(before):
            self._had += 1
            self._end(result)
        if self._had == before:
            return False
        self.bulletin.keep_from(self._had)
        return True

    def lose(self, error: Gone) -> None:
        """The daemon is gone: what is under way ends as lost, and its bulletin is read no more."""
        self.read_bulletin()
        self.bulletin, self._had, self._from_socket = None, 0, 0
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

    def _end(self, result: JobResult) -> None:
        direction = self.under_way.pop(result.job_id, None)
        if direction is not None:
            self._counts[direction] -= 1
            self._ended.append(_result(result))


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
