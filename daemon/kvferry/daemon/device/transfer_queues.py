"""The queues of transfers before and on the device.

    RegistrationQueues   one registration: its memory, its timeline, a TransferQueue per direction
    TransferQueue        one registration and direction: FIFO of transfers that have not ended
    DirectionQueue       one direction of the device: registrations in turn, chunks in flight

Used only by the device worker's thread.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import msgspec
import numpy as np

from kvferry.daemon.core.actions import CopyPlan, TransferCompleted
from kvferry.daemon.core.layout import Extent, Int64s
from kvferry.daemon.engine.base import Mapping, Submission
from kvferry.daemon.memory.shared_memory import TimelineReader
from kvferry.proto.errors import ErrorInfo
from kvferry.proto.results import Outcome
from kvferry.proto.specs import Direction

# From this many bytes on, a chunk in flight is work that contends with the other direction.
LARGE = 8 << 20


class ActiveTransfer(msgspec.Struct, eq=False):
    """A transfer that is queued or on the device.

    rest: extents that were not submitted yet. in_flight: chunks on the device. first: its first
    chunk. before: the chunk that was the last in flight when `first` was submitted. failed_store:
    serial of a store that it requires and that did not complete. unpackable: byte offsets in the
    pool of GPU blocks that were not stored, of each chunk that has any.
    """

    plan: CopyPlan
    rest: tuple[Extent, ...]
    in_flight: int = 0
    first: Submission | None = None
    before: Submission | None = None
    # Seconds on the device, and from acceptance until the first chunk was submitted.
    seconds: float = 0.0
    queued: float = 0.0
    outcome: Outcome = Outcome.DONE
    error: ErrorInfo | None = None
    failed_store: int | None = None
    unpackable: list[Int64s] = []

    def abort(self, outcome: Outcome, error: ErrorInfo | None = None) -> None:
        """Submit no further chunk of it. The first outcome other than DONE is reported."""
        if self.outcome is Outcome.DONE:
            self.outcome, self.error = outcome, error
        self.rest = ()

    @property
    def over(self) -> bool:
        return not self.rest and not self.in_flight

    @property
    def completion(self) -> TransferCompleted:
        seconds = self.seconds if self.outcome is Outcome.DONE else 0.0
        return TransferCompleted(
            self.plan.serial,
            self.outcome,
            seconds,
            self.error,
            self.queued,
            np.concatenate(self.unpackable) if self.unpackable else None,
        )


@dataclass(slots=True, eq=False)
class TransferQueue:
    """FIFO of one registration and direction.

    live: all transfers that have not ended, by serial, oldest first. waiting: those that have
    chunks to submit; only the first may submit. listed: whether DirectionQueue.turns contains the
    registration. These are OrderedDicts because thousands may be cancelled in any order, and
    finding the first entry of a plain dict takes longer the more entries before it were deleted.
    """

    live: OrderedDict[int, ActiveTransfer] = field(default_factory=OrderedDict)
    waiting: OrderedDict[int, ActiveTransfer] = field(default_factory=OrderedDict)
    listed: bool = False

    @property
    def head(self) -> ActiveTransfer:
        """The first waiting transfer."""
        return next(iter(self.waiting.values()))

    @property
    def oldest(self) -> ActiveTransfer | None:
        return next(iter(self.live.values()), None)

    def ended_up_to(self, serial: int) -> bool:
        oldest = next(iter(self.live), None)
        return oldest is None or oldest > serial

    def finished(self, transfer: ActiveTransfer) -> bool:
        """Whether a transfer is over and is not the one that may submit next."""
        return transfer.over and not (self.waiting and self.head is transfer)


@dataclass(slots=True, eq=False)
class RegistrationQueues:
    """The mapped memory of a registration, and its queues.

    failed_stores: serials of stores that did not complete, as long as the core may plan a load
    that requires them.
    """

    mapping: Mapping
    timeline: TimelineReader | None
    transfers: dict[Direction, TransferQueue] = field(
        default_factory=lambda: {direction: TransferQueue() for direction in Direction}
    )
    unmapping: bool = False
    failed_stores: set[int] = field(default_factory=set)

    def add_transfer(self, plan: CopyPlan) -> None:
        transfer, queue = ActiveTransfer(plan, plan.extents), self.transfers[plan.direction]
        queue.live[plan.serial] = queue.waiting[plan.serial] = transfer
        if self.failed_stores:
            failed = self.failed_stores.intersection(plan.requires)
            transfer.failed_store = min(failed, default=None)

    def mark_store_failed(self, serial: int) -> None:
        """A store did not complete: loads that require it must not copy anything."""
        self.failed_stores.add(serial)
        for load in self.transfers[Direction.LOAD].waiting.values():
            if serial in load.plan.requires:
                load.failed_store = serial

    def cancel_transfers(
        self, serials: Iterable[int]
    ) -> Iterator[tuple[TransferQueue, ActiveTransfer]]:
        """Submit no further chunk of these transfers; yield those that have not ended."""
        for serial in serials:
            for queue in self.transfers.values():
                if transfer := queue.live.get(serial):
                    transfer.abort(Outcome.CANCELLED)
                    queue.waiting.pop(serial, None)
                    yield queue, transfer

    def must_wait(self, plan: CopyPlan, pool_ready: int) -> bool:
        """Whether the plan at the head of its queue must not be submitted yet.

        unmapping     the registration is being unmapped
        host_end      the pool is not registered up to this byte
        wait_for      the engine's timeline has not reached this value
        after         the other direction has a transfer up to this serial (RAW, WAR)
        revoked       the engine has abandoned all transfers. Read last: the stream may still write
                      the value that a fence waits for after the engine has revoked the page.
        """
        if self.unmapping or plan.host_end > pool_ready:
            return True
        if plan.wait_for and self._fenced(plan):
            return True
        return (plan.after > 0 and self._behind(plan) is not None) or self.revoked

    @property
    def revoked(self) -> bool:
        """Whether the engine has abandoned all jobs: their blocks may have another owner."""
        return self.timeline is not None and self.timeline.is_revoked()

    def held_by_engine(self, plan: CopyPlan) -> bool:
        """Whether the plan, or a transfer that it must follow, waits for the timeline."""
        before = self._behind(plan)
        return self._fenced(plan) or (before is not None and self._fenced(before.plan))

    def _fenced(self, plan: CopyPlan) -> bool:
        reached = self.timeline is not None and self.timeline.reached(plan.wait_for)
        return plan.wait_for > 0 and not reached

    def _behind(self, plan: CopyPlan) -> ActiveTransfer | None:
        """The oldest transfer of the other direction, if the plan has to wait for it."""
        other = self.transfers[plan.direction.other]
        return None if other.ended_up_to(plan.after) else other.oldest

    @property
    def serials(self) -> tuple[int, ...]:
        """The serials of all transfers that have not ended."""
        return tuple(serial for queue in self.transfers.values() for serial in queue.live)

    @property
    def empty(self) -> bool:
        return not any(queue.live for queue in self.transfers.values())


def oldest_accepted(
    registrations: Iterable[RegistrationQueues],
) -> tuple[float | None, float | None]:
    """When the oldest transfer was accepted: without those that wait for a timeline, and of those.

    time.monotonic() seconds; None if there is none.
    """
    running: list[float] = []
    held: list[float] = []
    for registration in registrations:
        for queue in registration.transfers.values():
            if (first := queue.oldest) and first.plan.accepted:
                waits = first.first is None and registration.held_by_engine(first.plan)
                (held if waits else running).append(first.plan.accepted)
    return min(running, default=None), min(held, default=None)


class InflightChunk(msgspec.Struct, eq=False):
    """A chunk that was submitted and has not completed in a poll."""

    registration: RegistrationQueues
    transfer: ActiveTransfer
    submission: Submission
    extent: Extent
    nbytes: int

    def fail_transfer(self, error: ErrorInfo) -> None:
        """Fail the transfer, unless its engine has revoked the timeline: then it is cancelled."""
        if not self.registration.revoked:
            self.transfer.abort(Outcome.FAILED, error)

    def add_unpackable(self, positions: Int64s) -> None:
        """The GPU blocks at these positions of the extent could not be packed."""
        if positions.size:
            self.transfer.unpackable.append(self.extent.host_offsets[positions])

    def mark_done(self) -> None:
        """The chunk is done or has failed."""
        self.transfer.in_flight -= 1
        if self.registration.revoked:
            self.transfer.abort(Outcome.CANCELLED)


@dataclass(slots=True, eq=False)
class DirectionQueue:
    """One direction of the device, over all registrations.

    inflight: chunks in the order of submission. turns: registrations with waiting transfers, in
    the order in which they may submit a chunk. A registration without any is removed when it is the
    first. full: the engine returned NO_ROOM, and nothing has changed since.
    """

    direction: Direction
    inflight: deque[InflightChunk] = field(default_factory=deque)
    turns: deque[RegistrationQueues] = field(default_factory=deque)
    full: bool = False

    def add_registration(self, registration: RegistrationQueues) -> None:
        """A registration has a waiting transfer."""
        queue = registration.transfers[self.direction]
        if not queue.listed:
            queue.listed = True
            self.turns.append(registration)

    def remove_registration(self, registration: RegistrationQueues) -> None:
        if registration.transfers[self.direction].listed:
            self.turns.remove(registration)

    @property
    def waiting(self) -> bool:
        """Whether a transfer has chunks to submit."""
        return any(each.transfers[self.direction].waiting for each in self.turns)

    @property
    def contends(self) -> bool:
        """Whether it has work that counts for the other direction."""
        return bool(self.inflight and self.inflight[-1].nbytes >= LARGE) or self.waiting
