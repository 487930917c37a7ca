"""A ClientSession with jobs, without a socket."""

from __future__ import annotations

from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from kvferry.client.link import ClientLink
from kvferry.client.restoring import AttemptCall, connect, restore_session
from kvferry.client.session import ClientSession
from kvferry.client.transport.connection import NoConnection
from kvferry.proto import messages as wire
from kvferry.proto import status as proto_status
from kvferry.proto.codec import decode_client_message, encode
from kvferry.proto.errors import Code, ErrorInfo
from kvferry.proto.results import JobResult, Outcome
from kvferry.proto.specs import CPULoadStoreSpec, Direction, GPULoadStoreSpec, KeyLoadStoreSpec

STORE = GPULoadStoreSpec([1, 2]), CPULoadStoreSpec([3])
LOAD = CPULoadStoreSpec([3]), GPULoadStoreSpec([1, 2])
KEYED_STORE = GPULoadStoreSpec([1, 2]), KeyLoadStoreSpec((b"a", b"b"))
KEYED_LOAD = KEYED_STORE[1], KEYED_STORE[0]
MAX_JOBS = 3
WELCOME = wire.Welcome(
    1,
    "boot",
    "s1",
    "0.1",
    1,
    proto_status.DeviceInfo("cpu", "cpu", "host"),
    proto_status.Limits(9, 9, MAX_JOBS),
)
BUSY = ErrorInfo(Code.BUSY, "later", "3")


def submit(session: ClientSession, job_id: int, spec: Any = STORE) -> None:
    session.jobs.submitted(job_id, spec, len(session.jobs.submit(job_id, spec, 0)))


def finish(session: ClientSession, *job_ids: int, **result: Any) -> None:
    fields = {"direction": Direction.STORE, "outcome": Outcome.DONE} | result
    session.receive_message(
        encode(wire.Finished(tuple(JobResult(job_id, **fields) for job_id in job_ids)))
    )


class SteppedAttempt:
    """Restores a session step by step. `sent`: the messages of the last step."""

    def __init__(self, session: ClientSession) -> None:
        self.session, self.done = session, False
        self.sent: list[Any] = []
        link = ClientLink(session, Path, restore_session)
        link.connection = _SendingConnection(self.sent)
        session.wire.socket_opened()
        self._attempt: Coroutine[float, Any, None] = connect(AttemptCall(link, 0.0))
        self._step(None)

    def receive(self, *messages: wire.DaemonMessage) -> None:
        """Messages of the daemon arrive, and the next step follows."""
        for message in messages:
            self.session.receive_message(encode(message))
        self._step(0.0)

    def _step(self, now: float | None) -> None:
        self.sent.clear()
        try:
            self._attempt.send(now)
        except StopIteration:
            self.done = True


class _SendingConnection(NoConnection):
    def __init__(self, sent: list[Any]) -> None:
        super().__init__()
        self._sent = sent

    def send(self, data: bytes) -> None:
        self._sent.append(decode_client_message(data))


def outcomes(session: ClientSession) -> list[tuple[int, str]]:
    return [(result.job_id, result.outcome) for result in session.jobs.take_results()]
