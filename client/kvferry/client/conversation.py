"""What a client knows, without a socket: the same for the blocking and the asyncio client.

`Conversation` makes the messages to send and is fed those that arrive. It keeps the jobs under
way, their results until they are fetched, and replies until they are asked for. It never waits,
and knows no clock.
"""

from __future__ import annotations

import contextlib
import operator
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import SupportsIndex, TypeAlias

from kvferry.proto.codec import decode_daemon_message, encode
from kvferry.proto.errors import Code, Gone, KVFerryError, Refused, error_of
from kvferry.proto.messages import (
    MAX_JOB_IDS,
    PROTOCOL,
    Allocated,
    AllocateKVCaches,
    Cancel,
    ClientMessage,
    Error,
    Finished,
    Goodbye,
    Hello,
    JobResult,
    Outcome,
    Registered,
    RegisterKVCaches,
    StatusReport,
    StatusRequest,
    Submit,
    Wait,
    Waited,
    Welcome,
)
from kvferry.proto.specs import (
    MAX_INT,
    CPULoadStoreSpec,
    Direction,
    GPULoadStoreSpec,
    TransferSpec,
)

Request: TypeAlias = RegisterKVCaches | AllocateKVCaches | Wait | StatusRequest
Reply: TypeAlias = Registered | Allocated | Waited | StatusReport


_SIDES = frozenset({GPULoadStoreSpec, CPULoadStoreSpec})


@dataclass(frozen=True, slots=True)
class TransferResult:
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


class Conversation:
    def __init__(self, engine: str, client: str) -> None:
        self.engine = engine
        self.client = client
        self.welcome: Welcome | None = None
        self.ended: Gone | None = None
        """Set once the daemon is known to be gone; every later request raises it."""
        self._jobs: dict[int, Direction] = {}
        self._results: deque[TransferResult] = deque()
        self._replies: dict[int, Reply | KVFerryError] = {}
        self._asked: set[int] = set()
        self._refused: KVFerryError | None = None
        self._request_ids = count(1)

    # Messages to send

    def hello(self) -> bytes:
        return encode(Hello(PROTOCOL, PROTOCOL, self.client, self.engine))

    def request(self, message: ClientMessage) -> bytes:
        """The bytes of a message; raises what ended the conversation, if anything did."""
        if self.ended is not None:
            raise self.ended
        return encode(message)

    @contextlib.contextmanager
    def asking(self, message: Request) -> Iterator[bytes]:
        """The bytes of a request; its reply is kept while this lasts, and dropped after."""
        data = self.request(message)
        self._asked.add(message.request_id)
        try:
            yield data
        finally:
            self._asked.discard(message.request_id)
            self._replies.pop(message.request_id, None)

    def next_request_id(self) -> int:
        return next(self._request_ids)

    def submit(self, job_id: int, spec: TransferSpec, wait_for: int) -> bytes:
        """The message that starts a job; `submitted` says that it went out.

        Raises Refused (DUPLICATE_JOB, BUSY, MESSAGE_TOO_LARGE) or Gone, and nothing changed.
        """
        job_id, wait_for = _checked_id("a job id", job_id), _checked_id("wait_for", wait_for)
        src, dst = _checked_sides(spec)
        if job_id in self._jobs:
            raise Refused(Code.DUPLICATE_JOB, "a job with this id is under way", job_id)
        if self.welcome is not None and len(self._jobs) >= self.welcome.limits.max_jobs:
            raise Refused(Code.BUSY, "too many jobs are under way: poll first", len(self._jobs))
        return self.request(Submit(job_id, src, dst, wait_for))

    def submitted(self, job_id: int, spec: TransferSpec) -> None:
        store = isinstance(spec[1], CPULoadStoreSpec)
        self._jobs[job_id] = Direction.STORE if store else Direction.LOAD

    def cancel(self, job_ids: Iterable[int]) -> bytes:
        return self.request(Cancel(_checked(job_ids)))

    def wait(self, job_ids: Iterable[int]) -> Wait:
        """The request to be told when these jobs have ended; Refused where none can read it."""
        return Wait(self.next_request_id(), _checked(job_ids))

    # What arrived

    def feed(self, data: bytes) -> None:
        """Take a message of the daemon's in."""
        match decode_daemon_message(data):
            case Finished(results):
                for result in results:
                    self._finish(result)
            case Welcome() as welcome:
                self.welcome = welcome
            case Error(request_id, info, _):
                self._take_error(request_id, error_of(info))
            case Goodbye(reason):
                self.lose(Gone(Code.DAEMON_GONE, f"the daemon said goodbye: {reason}"))
            case reply:
                self._take_reply(reply.request_id, reply)

    def lose(self, error: Gone) -> None:
        """The daemon is gone: every job under way ends as lost."""
        self.ended = self.ended or error
        for job_id, direction in self._jobs.items():
            lost = JobResult(job_id, direction, Outcome.LOST, error=error.info)
            self._results.append(_result(lost))
        self._jobs.clear()

    def greeted(self) -> Welcome | None:
        """The daemon's Welcome, once it is here; raises what it said instead."""
        if self._refused is not None:
            raise self._refused
        return self.welcome

    def reply(self, request_id: int) -> Reply | None:
        """The reply to a request, once; None while there is none. Raises what it says."""
        reply = self._replies.pop(request_id, None)
        if isinstance(reply, KVFerryError):
            raise reply
        if reply is None and self.ended is not None:
            raise self.ended
        return reply

    def results(self) -> list[TransferResult]:
        results = list(self._results)
        self._results.clear()
        return results

    @property
    def has_results(self) -> bool:
        return bool(self._results)

    def under_way(self, job_ids: Iterable[int]) -> list[int]:
        return [job_id for job_id in job_ids if job_id in self._jobs]

    @property
    def idle(self) -> bool:
        return not self._jobs

    def _take_reply(self, request_id: int, reply: Reply | KVFerryError) -> None:
        if request_id in self._asked:
            self._replies[request_id] = reply

    def _finish(self, result: JobResult) -> None:
        if self._jobs.pop(result.job_id, None) is not None:
            self._results.append(_result(result))

    def _take_error(self, request_id: int | None, error: KVFerryError) -> None:
        if request_id is not None:
            self._take_reply(request_id, error)
        elif self.welcome is None:
            self._refused = error
        elif error.code == Code.NO_SESSION:
            self.lose(Gone(Code.DAEMON_GONE, "the daemon was restarted, or has let us go"))
        else:
            raise error


def _checked_id(what: str, value: SupportsIndex) -> int:
    try:
        number = value if type(value) is int else operator.index(value)
    except TypeError:
        number = -1
    if not 0 <= number <= MAX_INT:
        raise Refused(Code.BAD_SPEC, f"{what} is a number from 0 to {MAX_INT}", value)
    return number


def _checked(job_ids: Iterable[int]) -> tuple[int, ...]:
    ids = tuple(_checked_id("a job id", job_id) for job_id in job_ids)
    if len(ids) > MAX_JOB_IDS:
        raise Refused(Code.BAD_SPEC, f"at most {MAX_JOB_IDS} job ids at once", len(ids))
    return ids


def _checked_sides(spec: TransferSpec) -> TransferSpec:
    """A pair of specs that a daemon can read; whether they fit together it says itself."""
    if len(spec) != 2 or type(spec[0]) not in _SIDES or type(spec[1]) not in _SIDES:
        raise Refused(Code.BAD_SPEC, "a transfer is a pair of a GPU and a CPULoadStoreSpec", spec)
    spec[0].check()
    spec[1].check()
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


def timed_out(what: str, value: object) -> Gone:
    return Gone(Code.TIMEOUT, f"{what} in time", value)
