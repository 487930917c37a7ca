"""Jobs in flight, from submission to their result.

A job is accepted whole or refused whole. An accepted job ends exactly once, with the device
worker's report, also if its session, engine or registration has ended meanwhile. Called by the
core, on the event loop.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import TypeAlias

import msgspec
import numpy as np

from kvferry.daemon.core.actions import (
    Action,
    BlocksCorrupted,
    CancelTransfers,
    CopyPlan,
    SendMessage,
    StartTransfer,
    TransferCompleted,
)
from kvferry.daemon.core.dispatch import MessageTable, ReportTable
from kvferry.daemon.core.keyed_transfers import Lease, resolve_keyed
from kvferry.daemon.core.layout import NO_BLOCKS, Int64s, ResolvedBlocks, split_spec
from kvferry.daemon.core.registration import OWN, Registration
from kvferry.daemon.core.registrations import Registrations
from kvferry.proto.errors import Code, ErrorInfo, Failed, Refused
from kvferry.proto.messages import Cancel, Finished, Submit, Wait, Waited
from kvferry.proto.results import JobResult, Outcome
from kvferry.proto.specs import (
    MAX_BLOCK_IDS,
    Direction,
    GPULoadStoreSpec,
    HostSpec,
    KeyLoadStoreSpec,
)
from kvferry.proto.status import Limits

# Pending waits of one session.
MAX_WAITS = 256
# GPU blocks of the jobs of a session in flight: twice those of the largest job. About 32 bytes are
# held of each; a timeline that does not advance would let them grow without a limit.
MAX_GPU_BLOCKS = 2 * MAX_BLOCK_IDS


@dataclass(slots=True, eq=False)
class PendingWait:
    """A Wait of a session; `remaining` jobs have not ended."""

    session: str
    request_id: int
    remaining: int


class Transfer(msgspec.Struct, eq=False):
    """A job in flight, or a part of one. session: None once its session is closed."""

    serial: int
    job_id: int
    session: str | None
    registration: Registration
    direction: Direction
    nbytes: int
    mode: str
    blocks: ResolvedBlocks
    lease: Lease | None = None
    # Set if a block of the job is corrupt: it fails even if the copy completes.
    error: ErrorInfo | None = None
    waiters: list[PendingWait] = []


# Called with the copy mode ("direct", "staged" or "cpu") and the result of each ended job, except
# the daemon's own.
JobObserver: TypeAlias = Callable[[str, JobResult, TransferCompleted], None]


class Transfers:
    """All jobs in flight, by serial, and by engine and job id.

    limits: of one session. observe: see JobObserver. errors: number of errors by code.
    """

    def __init__(
        self,
        registrations: Registrations,
        limits: Limits,
        observe: JobObserver,
        errors: Counter[str],
    ) -> None:
        self._errors = errors
        self.totals: Counter[str] = Counter()
        self._observe = observe
        # Bytes moved, per session.
        self.moved_bytes: Counter[str] = Counter()
        self._registrations = registrations
        self._credits = {d: limits.max_in_flight(d) for d in Direction}
        self._max_gpu_blocks = limits.max_gpu_blocks
        self._serials = count(1)
        self._jobs: dict[int, Transfer] = {}
        # The parts of each job that have not ended.
        self._by_id: dict[tuple[str, int], list[Transfer]] = {}
        self._used_credits: Counter[tuple[str, Direction]] = Counter()
        # GPU blocks of the jobs in flight, per session.
        self._gpu_blocks: Counter[str] = Counter()
        self._pending_waits: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def messages(self) -> MessageTable:
        return {
            Submit: self.submit_transfer,
            Cancel: self.cancel_transfers,
            Wait: self.add_wait,
        }

    @property
    def reports(self) -> ReportTable:
        return {TransferCompleted: self.end_transfer}

    def count_by_engine(self) -> Counter[str]:
        """Number of jobs in flight per engine."""
        return Counter(name for name, _ in self._by_id)

    def submit_transfer(self, session: str, message: Submit, now: float) -> list[Action]:
        """Check a transfer and start it. If it raises Refused, nothing has changed."""
        engine = self._registrations.engine_of(session)
        registration = self._registrations.require_open(engine)
        key = engine, message.job_id
        parts = self._by_id.get(key, [])
        if parts and not (message.part and parts[0].session == session):
            duplicate = (
                f"job {message.job_id} of engine {engine!r} is still in flight; use a new job id"
            )
            raise Refused(Code.DUPLICATE_JOB, duplicate, message.job_id)
        direction, gpu, host = split_spec(message.src, message.dst)
        most = self._credits[direction]
        if self._used_credits[session, direction] >= most:
            busy = f"{most} {direction}s of this session are in flight; poll, then try again"
            raise Refused(Code.BUSY, busy, most)
        most, used = self._max_gpu_blocks, self._gpu_blocks[session] + gpu.block_ids.size
        if used > most:
            busy = (
                f"{used} GPU blocks of this session in flight exceed {most}; poll, then try again"
            )
            raise Refused(Code.BUSY, busy, used)
        if message.wait_for and not registration.has_timeline:
            missing = (
                f"wait_for = {message.wait_for}, but engine {engine!r} has no timeline; register "
                "its KV caches with one"
            )
            raise Refused(Code.NO_TIMELINE, missing, message.wait_for)
        registration.layout.check_section(direction, gpu.section)
        blocks, lease = _resolve_blocks(registration, direction, gpu, host)
        mode = registration.mode(direction, blocks.extents)
        if gpu.section is not None:
            blocks = registration.layout.section_of(blocks, gpu.section)
        states, requires = registration.region.states, tuple[int, ...]()
        if states is not None and direction is Direction.LOAD:
            requires = states.required_stores(blocks)
        nbytes = registration.layout.count_bytes(blocks.extents)
        serial = next(self._serials)
        if states is not None and direction is Direction.STORE:
            states.submit_store(serial, blocks)
        job = Transfer(
            serial, message.job_id, session, registration, direction, nbytes, mode, blocks, lease
        )
        self._jobs[serial] = job
        self._by_id[key] = parts
        parts.append(job)
        self._used_credits[session, direction] += 1
        self._gpu_blocks[session] += blocks.gpu_slots.size
        plan = CopyPlan(
            serial,
            registration.number,
            direction,
            blocks.extents,
            nbytes,
            message.wait_for,
            registration.hazards.add_transfer(serial, direction, blocks),
            # Blocks in the pools of siblings are outside of the region, and registered.
            min(registration.layout.end_offset(blocks.extents), registration.region.end),
            0.0 if engine == OWN else now,
            requires,
        )
        if direction is Direction.LOAD:
            registration.region.table.lines.touch(blocks.host_blocks)
        return [StartTransfer(plan, session, message.job_id)]

    def cancel_transfers(self, session: str, message: Cancel, _now: float) -> list[Action]:
        """Cancel these jobs of an engine; unknown ids are ignored."""
        engine = self._registrations.engine_of(session)
        return _cancel_jobs(self._parts_of(engine, message.job_ids))

    def add_wait(self, session: str, message: Wait, _now: float) -> list[Action]:
        """Reply Waited when all these jobs have ended. Unknown ids count as ended."""
        engine = self._registrations.engine_of(session)
        jobs = {*self._parts_of(engine, message.job_ids)}
        if not jobs:
            return [SendMessage(session, Waited(message.request_id))]
        if self._pending_waits[session] >= MAX_WAITS:
            busy = f"{MAX_WAITS} waits of this session are pending; wait for them first"
            raise Refused(Code.BUSY, busy, MAX_WAITS)
        self._pending_waits[session] += 1
        waiter = PendingWait(session, message.request_id, len(jobs))
        for job in jobs:
            job.waiters.append(waiter)
        return []

    def _parts_of(self, engine: str, job_ids: Iterable[int]) -> Iterator[Transfer]:
        for job_id in job_ids:
            yield from self._by_id.get((engine, job_id), ())

    def end_transfer(self, report: TransferCompleted) -> list[Action]:
        """End a job: send its result, then Waited to sessions that waited for it."""
        job = self._jobs.pop(report.serial)
        key = job.registration.engine, job.job_id
        self._by_id[key].remove(job)
        if not self._by_id[key]:
            del self._by_id[key]
        job.registration.hazards.remove_transfer(job.direction)
        result = self._result(job, report)
        done = result.outcome is Outcome.DONE
        if job.lease is not None:
            job.lease.release_blocks(done=done, lost=_lost_blocks(job, report))
        elif job.registration.region.states is not None and job.direction is Direction.STORE:
            job.registration.region.states.end_store(job.serial, job.blocks, done=done)
        if job.registration.engine != OWN:
            self._count_result(result)
            self._observe(job.mode, result, report)
        actions: list[Action] = []
        if job.session is not None:
            self._used_credits[job.session, job.direction] -= 1
            self._gpu_blocks[job.session] -= job.blocks.gpu_slots.size
            self.moved_bytes[job.session] += result.nbytes
            actions.append(SendMessage(job.session, Finished((result,))))
        for waiter in job.waiters:
            waiter.remaining -= 1
            if not waiter.remaining and waiter.session in self._pending_waits:
                self._pending_waits[waiter.session] -= 1
                actions.append(SendMessage(waiter.session, Waited(waiter.request_id)))
        return actions

    def mark_corrupted(self, report: BlocksCorrupted) -> None:
        """Host blocks are corrupt: loads of them that are in flight will fail."""
        for job in self._jobs.values():
            if job.direction is Direction.LOAD and job.registration.region.owner == report.owner:
                hit = job.blocks.host_blocks[np.isin(job.blocks.host_blocks, report.blocks)]
                if hit.size:
                    block = int(hit[0])
                    message = f"host block {block} does not match its checksum; treat it as a miss"
                    job.error = Failed(Code.CORRUPT_BLOCK, message, block).info

    def close_session(self, session: str) -> tuple[list[Action], int]:
        """Cancel all jobs of a closed session. Return the actions and the number of jobs."""
        for direction in Direction:
            self._used_credits.pop((session, direction), None)
        self._pending_waits.pop(session, None)
        self._gpu_blocks.pop(session, None)
        jobs = [job for job in self._jobs.values() if job.session == session]
        for job in jobs:
            job.session = None
        return _cancel_jobs(jobs), len(jobs)

    def cancel_all(self) -> list[Action]:
        """Cancel all jobs in flight."""
        return _cancel_jobs(self._jobs.values())

    def _result(self, job: Transfer, report: TransferCompleted) -> JobResult:
        outcome, error = report.outcome, report.error
        if outcome is Outcome.DONE and job.error is not None:
            outcome, error = Outcome.FAILED, job.error
        if outcome is Outcome.DONE and job.lease is not None and job.lease.forget_changed():
            message = "a sibling's block changed while it was loaded; treat it as a miss"
            outcome, error = Outcome.FAILED, ErrorInfo(Code.KEY_ABSENT, message, str(job.job_id))
        if outcome is Outcome.CANCELLED:
            message = f"job {job.job_id} was cancelled; submit it again if it is still needed"
            error = ErrorInfo(Code.CANCELLED, message, str(job.job_id))
            if not self._registrations.is_open(job.registration):
                outcome, owner = Outcome.FAILED, job.registration.engine
                message = (
                    f"the process that registered the KV caches of engine {owner!r} disconnected; "
                    "register them again"
                )
                error = ErrorInfo(Code.ENGINE_GONE, message, owner)
        moved = job.nbytes if outcome is Outcome.DONE else 0
        return JobResult(job.job_id, job.direction, outcome, moved, report.seconds, error)

    def _count_result(self, result: JobResult) -> None:
        if result.error is not None:
            self._errors[result.error.code] += 1
        match result.outcome:
            case Outcome.DONE:
                store = result.direction is Direction.STORE
                self.totals["stores" if store else "loads"] += 1
                self.totals["stored_bytes" if store else "loaded_bytes"] += result.nbytes
            case outcome:
                self.totals[outcome] += 1


def _cancel_jobs(jobs: Iterable[Transfer]) -> list[Action]:
    serials: defaultdict[int, list[int]] = defaultdict(list)
    for job in jobs:
        serials[job.registration.number].append(job.serial)
    return [CancelTransfers(number, tuple(each)) for number, each in serials.items()]


def _lost_blocks(job: Transfer, report: TransferCompleted) -> Int64s:
    """The host blocks of a store that have GPU blocks which could not be packed."""
    if report.unpackable is None:
        return NO_BLOCKS
    layout = job.registration.layout
    return np.unique((report.unpackable - layout.region_start) // layout.host_block_bytes)


def _resolve_blocks(
    registration: Registration, direction: Direction, gpu: GPULoadStoreSpec, host: HostSpec
) -> tuple[ResolvedBlocks, Lease | None]:
    """Resolve the host blocks of a transfer, by id or by key. Raises Refused."""
    layout, namespace = registration.layout, registration.namespace
    if isinstance(host, KeyLoadStoreSpec):
        if namespace is None:
            raise Refused(
                Code.UNKNOWN_NAMESPACE,
                f"engine {registration.engine!r} registered outside of any namespace, so its host "
                "blocks have no keys; name them by id, or open a namespace before registering",
                registration.engine,
            )
        return resolve_keyed(namespace, layout, direction, gpu, host)
    if namespace is not None:
        raise Refused(
            Code.BAD_SPEC,
            f"engine {registration.engine!r} registered in namespace {namespace.name}, so its host "
            "blocks have no ids; name them by key",
            namespace.name,
        )
    return layout.resolve(direction, gpu, host.block_ids), None
