"""Stand-ins for what the linker's parts use: sources, pages, the session of a rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvferry.client.jobs import TransferResult
from kvferry.client.sglang.block_ids import SourcePages
from kvferry.proto.errors import KVFerryError
from kvferry.proto.keys import OffloadKey
from kvferry.proto.results import Outcome
from kvferry.proto.specs import Direction, TransferSpec


@dataclass(frozen=True)
class NamedSource:
    """A source whose buffers no test needs. See kvferry.client.sglang.pools.Source."""

    name: str
    slots: int
    groups: range


def pages(
    source: NamedSource, keys: Sequence[tuple[OffloadKey, ...]], blocks: Sequence[int]
) -> SourcePages:
    """Pages with these keys, which are in these blocks of the device."""
    slots = [block * source.slots + at for block in blocks for at in range(source.slots)]
    of_source: Any = source
    return SourcePages(of_source, [*keys], torch.tensor(slots, dtype=torch.int64))


@dataclass
class RecordingSession:
    """In place of a RankSession: records jobs, and returns the results that a test sets.

    submitted: by job. on_poll: results of each next poll, one list after the other; then none.
    refused: ends the next jobs without success, as a session that cannot submit does.
    """

    submitted: dict[int, tuple[TransferSpec, Direction, Any]] = field(default_factory=dict)
    on_poll: list[list[TransferResult]] = field(default_factory=list)
    refused: bool = False
    abandoned: list[KVFerryError] = field(default_factory=list)
    waited: int = 0
    _in_flight: list[int] = field(default_factory=list)
    _results: list[TransferResult] = field(default_factory=list)

    def submit(self, job_id: int, spec: TransferSpec, direction: Direction, stream: Any) -> None:
        self.submitted[job_id] = spec, direction, stream
        if self.refused:
            self._results.append(result(job_id, success=False))
        else:
            self._in_flight.append(job_id)

    def get_finished(self) -> list[TransferResult]:
        if self.on_poll:
            self.end(*self.on_poll.pop(0))
        results, self._results = self._results, []
        return results

    def end(self, *results: TransferResult) -> None:
        """Jobs end; the next get_finished returns it."""
        for each in results:
            self._in_flight.remove(each.job_id)
        self._results += results

    def wait_all(self) -> None:
        self.waited += 1
        self.end(*[result(job_id) for job_id in self._in_flight])

    def abandon(self, error: KVFerryError) -> None:
        self.abandoned.append(error)
        self.end(*[result(job_id, success=False) for job_id in self._in_flight])


def result(job_id: int, *, success: bool = True) -> TransferResult:
    outcome = Outcome.DONE if success else Outcome.LOST
    return TransferResult(job_id, success, 0, 0.0, Direction.STORE.transfer_type, outcome, None)
