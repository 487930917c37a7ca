"""A ClientSession with jobs, without a socket."""

from __future__ import annotations

from typing import Any

from kvferry.client.session import ClientSession
from kvferry.proto import messages as wire
from kvferry.proto import status as proto_status
from kvferry.proto.codec import encode
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
    session.submitted(job_id, spec, len(session.submit(job_id, spec, 0)))


def finish(session: ClientSession, *job_ids: int, **result: Any) -> None:
    fields = {"direction": Direction.STORE, "outcome": Outcome.DONE} | result
    session.receive_message(
        encode(wire.Finished(tuple(JobResult(job_id, **fields) for job_id in job_ids)))
    )


def outcomes(session: ClientSession) -> list[tuple[int, str]]:
    return [(result.job_id, result.outcome) for result in session.jobs.take_results()]
