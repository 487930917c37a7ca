"""The jobs of an engine that generates traffic (traffic.py), and the check of their results."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvferry.client import TransferResult
from kvferry.proto.errors import Code
from kvferry.proto.results import Outcome
from support.host_blocks_model import UNDEFINED, HostBlocksModel
from support.marked_tensors import MarkedTensors
from support.traffic_statistics import TrafficOptions, TrafficStatistics

# A transfer by key may be refused with these, since other engines use the namespace as well.
EXPECTED_REFUSALS = {Code.KEY_ABSENT, Code.CACHE_FULL, Code.STALE, Code.BUSY}


@dataclass(slots=True, eq=False)
class TrafficJob:
    """A transfer in flight.

    gpu, labels: its GPU blocks, and what they must hold when it is done. subs: of a store by
    number, the sub-blocks that it writes. writers: of a load by number, the stores that wrote its
    labels. stores_complete: of a load by number, whether all stores of its blocks had completed
    when it was submitted. keys: of a transfer by key.
    """

    job_id: int
    store: bool
    gpu: list[int]
    labels: list[int]
    submitted: float
    writers: list[int] = field(default_factory=list)
    subs: list[int] = field(default_factory=list)
    keys: tuple[bytes, ...] = ()
    cancelled: bool = False
    stores_complete: bool = False


class TrafficJobs:
    """Jobs by id, and the free GPU blocks. Records results and errors in `statistics`."""

    def __init__(
        self,
        options: TrafficOptions,
        tensors: MarkedTensors,
        host_blocks: HostBlocksModel,
        statistics: TrafficStatistics,
        rng: random.Random,
    ) -> None:
        self._options, self._tensors, self._rng = options, tensors, rng
        self._host_blocks, self._statistics = host_blocks, statistics
        self.free_blocks = list(range(options.gpu_blocks))
        self.in_flight: dict[int, TrafficJob] = {}
        # Stores that did not complete, as long as loads that depend on them may be in flight.
        self._failed: set[int] = set()
        self._last_id = 0

    def begin(self, store: bool, labels: list[int]) -> TrafficJob:
        """A new job with as many free GPU blocks as there are labels."""
        self._last_id += 1
        self._rng.shuffle(self.free_blocks)
        gpu, self.free_blocks = self.free_blocks[: len(labels)], self.free_blocks[len(labels) :]
        job = TrafficJob(self._last_id, store, gpu, labels, time.monotonic())
        self.in_flight[job.job_id] = job
        return job

    def complete(self, result: TransferResult) -> TrafficJob | None:
        """Check a result and end its job. Returns the job."""
        job = self.in_flight.get(result.job_id)
        if job is None:
            self._statistics.add_error(f"a result without a job: {result}")
            return None
        self._check(job, result)
        self.end(job, result)
        return job

    def end(self, job: TrafficJob, result: TransferResult | None) -> None:
        """Remove a job. result: None if it was not submitted, or if its session ended."""
        del self.in_flight[job.job_id]
        self.free_blocks += job.gpu
        if not job.subs:
            pass
        elif result is None or result.outcome is Outcome.LOST:
            self._host_blocks.lose_store(job.job_id, job.subs)
        elif result.success:
            self._host_blocks.complete_store(job.job_id, job.subs)
        else:
            self._failed.add(job.job_id)
            self._host_blocks.fail_store(job.job_id, job.subs)
        if not self.in_flight:
            self._failed.clear()

    def report_late(self) -> None:
        """Record an error if the oldest job has had no result within `job_timeout`."""
        oldest = next(iter(self.in_flight.values()), None)
        if oldest is None:
            return
        age = time.monotonic() - oldest.submitted
        if age > self._options.job_timeout:
            self._statistics.add_error(f"job {oldest.job_id} has no result after {age:.1f} s")
            oldest.submitted = float("inf")

    def exclude_time(self, seconds: float) -> None:
        """Do not count time in which this process did not run."""
        for job in self.in_flight.values():
            job.submitted += seconds

    def _check(self, job: TrafficJob, result: TransferResult) -> None:
        code = None if result.error is None else result.error.code
        counts = self._statistics.counts
        counts[str(result.outcome)] += 1
        self._statistics.add_latency(time.monotonic() - job.submitted)
        match str(result.outcome):
            case "done" if not job.store:
                self._compare(job)
            case "done":
                counts["bytes"] += result.transfer_size
            case "cancelled" if job.cancelled:
                pass
            case "refused" if code in EXPECTED_REFUSALS and job.keys:
                counts[f"refused: {code}"] += 1
            case "refused" | "failed" if code == Code.STALE and not (
                job.store or job.stores_complete
            ):
                counts[f"{result.outcome}: {code}"] += 1
            case "lost" if code == Code.DAEMON_GONE:
                pass
            case "failed" if code == Code.COPY_FAILED and self._options.may_fail:
                pass
            case _:
                self._statistics.add_error(f"job {job.job_id} ended as {result}")

    def _compare(self, job: TrafficJob) -> None:
        """Compare the loaded blocks whose label is known."""
        if not job.keys and any(writer in self.in_flight for writer in job.writers):
            self._statistics.add_error(f"load {job.job_id} ended before a store of its blocks")
        if UNDEFINED in job.labels or self._failed.intersection(job.writers):
            self._statistics.add_error(f"load {job.job_id} is done, a store of its blocks is not")
        known = [at for at, label in enumerate(job.labels) if label > 0]
        self._compare_blocks(job, [job.gpu[at] for at in known], [job.labels[at] for at in known])
        self._statistics.counts["compared"] += len(known)
        self._statistics.counts["bytes"] += len(job.gpu) * self._options.block_bytes

    def _compare_blocks(self, job: TrafficJob, gpu: Sequence[int], labels: Sequence[int]) -> None:
        blocks = self._tensors.read(gpu)
        for error in self._tensors.marker.find_errors(blocks, labels):
            self._statistics.add_error(f"load {job.job_id} loaded wrong bytes: {error}")
