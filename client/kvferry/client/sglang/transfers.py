"""The transfers of a rank, behind SGLang's forward stream. Used in the scheduler's thread."""

from __future__ import annotations

from itertools import count
from typing import Any

from kvferry.client.engines.rank_session import RankSession
from kvferry.proto.specs import Direction, TransferSpec


class RankTransfers:
    """Submits jobs, and keeps how each ended until it is taken.

    stream: a torch.cuda.Stream. A store must read what its kernels have written, and a load must
    not write what they still read; None: torch's current stream is the only one.
    """

    def __init__(self, session: RankSession, stream: Any) -> None:
        self._session, self._stream = session, stream
        self._ids = count(1)
        # None while a job is in flight.
        self._ended: dict[int, bool | None] = {}

    def submit(self, spec: TransferSpec, direction: Direction) -> int:
        """Returns the job's id. A job that cannot be submitted ends without success."""
        job_id = next(self._ids)
        self._ended[job_id] = None
        self._session.submit(job_id, spec, direction, self._stream)
        return job_id

    def poll(self) -> None:
        """Receive results."""
        for result in self._session.get_finished():
            if result.job_id in self._ended:
                self._ended[result.job_id] = result.success

    def take(self, job_id: int) -> bool | None:
        """Whether a job has succeeded; None while it is in flight."""
        success = self._ended[job_id]
        if success is not None:
            del self._ended[job_id]
        return success
