"""The result of a job, as the daemon reports it and the client sees it."""

from __future__ import annotations

from enum import StrEnum

from kvferry.proto.errors import ErrorInfo
from kvferry.proto.specs import Count, Direction, Id, Part


class Outcome(StrEnum):
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    REFUSED = "refused"
    # Set by clients only: the daemon was lost before it reported the result.
    LOST = "lost"

    __hash__ = str.__hash__


class JobResult(Part):
    """How a job ended. nbytes: bytes copied. seconds: on the device. Both are 0 unless DONE."""

    job_id: Id
    direction: Direction
    outcome: Outcome
    nbytes: Count = 0
    seconds: float = 0.0
    error: ErrorInfo | None = None
