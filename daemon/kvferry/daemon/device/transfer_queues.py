"""Queues of transfers on their way to the device.

    RegistrationQueues   one registration: its memory, its timeline, a TransferQueue per direction
    TransferQueue        one registration and direction: FIFO of transfers that have not ended
    DirectionQueue       one direction of the device: registrations in turn, chunks in flight

Only the device worker's thread uses what is here.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import msgspec

from kvferry.daemon.core.actions import CopyPlan, TransferCompleted
from kvferry.daemon.core.layout import Extent
from kvferry.daemon.engine.base import Mapping, Ticket
from kvferry.daemon.memory.shared_memory import TimelineReader
from kvferry.proto.errors import ErrorInfo
from kvferry.proto.messages import Outcome
from kvferry.proto.specs import Direction

# Bytes from which on a chunk in flight counts as work that contends with the other direction.
LARGE = 8 << 20


class ActiveTransfer(msgspec.Struct, eq=False):
    """A transfer from its place in the queue to its end.

    rest: what has not been submitted. in_flight: chunks on the device. first, before: tickets of
    its first chunk, and of the chunk that was the last in flight then. failed_store: serial of a
    store that it requires and that did not complete.
    """

    plan: CopyPlan
    rest: tuple[Extent, ...]
    in_flight: int = 0
    first: Ticket | None = None
    before: Ticket | None = None
    # Seconds on the device, and from acceptance until the first chunk was submitted.
    seconds: float = 0.0
    queued: float = 0.0
    outcome: Outcome = Outcome.DONE
    error: ErrorInfo | None = None
    failed_store: int | None = None

    def abort(self, outcome: Outcome, error: ErrorInfo | None = None) -> None:
        """Submit no more of it. The first outcome other than DONE counts."""
        if self.outcome is Outcome.DONE:
            self.outcome, self.error = outcome, error
        self.rest = ()

    @property
    def over(self) -> bool:
        return not self.rest and not self.in_flight

    @property
    def completion(self) -> TransferCompleted:
        seconds = self.seconds if self.outcome is Outcome.DONE else 0.0
        return TransferCompleted(self.plan.serial, self.outcome, seconds, self.error, self.queued)


@dataclass(slots=True, eq=False)
class TransferQueue:
    """FIFO of one registration and direction.

    live: all transfers that have not ended, by serial, oldest first. waiting: those of them with
    chunks to submit; only the first may submit. listed: the direction's queue has the registration
    in turn. An OrderedDict, because thousands may be cancelled in any order: the first entry of a
    plain dict takes the longer to find the more entries before it were deleted.
    """

    live: OrderedDict[int, ActiveTransfer] = field(default_factory=OrderedDict)
    waiting: OrderedDict[int, ActiveTransfer] = field(default_factory=OrderedDict)
    listed: bool = False

    @property
    def head(self) -> ActiveTransfer:
        """The first of those that wait."""
        return next(iter(self.waiting.values()))

    @property
    def oldest(self) -> ActiveTransfer | None:
        return next(iter(self.live.values()), None)

    def ended_up_to(self, serial: int) -> bool:
        oldest = next(iter(self.live), None)
        return oldest is None or oldest > serial

    def finished(self, transfer: ActiveTransfer) -> bool:
        """Whether it is over, and is not the one that may submit next."""
        return transfer.over and not (self.waiting and self.head is transfer)


@dataclass(slots=True, eq=False)
class RegistrationQueues:
    """A registration on the device.

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
        """Submit no more of these transfers; yields those of them that have not ended."""
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
        revoked       the engine has given up all transfers. Read last: the stream may still write
                      the value that a fence waits for after the engine has revoked the page.
        """
        if self.unmapping or plan.host_end > pool_ready:
            return True
        if plan.wait_for and self._fenced(plan):
            return True
        return (plan.after > 0 and self._behind(plan) is not None) or self.revoked

    @property
    def revoked(self) -> bool:
        """Whether the engine has cancelled all jobs: their blocks may have another owner."""
        return self.timeline is not None and self.timeline.is_revoked()

    def held_by_engine(self, plan: CopyPlan) -> bool:
        """Whether the timeline holds the plan, or one that it must not overtake."""
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
        """Of all transfers that have not ended."""
        return tuple(serial for queue in self.transfers.values() for serial in queue.live)

    @property
    def empty(self) -> bool:
        return not any(queue.live for queue in self.transfers.values())


def oldest_accepted(
    registrations: Iterable[RegistrationQueues],
) -> tuple[float | None, float | None]:
    """When the oldest transfers were accepted: not held by their engine's timeline, and held.

    time.monotonic() seconds; None if there is none.
    """
    going: list[float] = []
    held: list[float] = []
    for registration in registrations:
        for queue in registration.transfers.values():
            if (first := queue.oldest) and first.plan.accepted:
                waits = first.first is None and registration.held_by_engine(first.plan)
                (held if waits else going).append(first.plan.accepted)
    return min(going, default=None), min(held, default=None)


class InflightChunk(msgspec.Struct, eq=False):
    """A chunk that was submitted and is not known to be done."""

    registration: RegistrationQueues
    transfer: ActiveTransfer
    ticket: Ticket
    nbytes: int

    def fail_transfer(self, error: ErrorInfo) -> None:
        """It failed; if its engine has revoked the timeline, it was cancelled."""
        if not self.registration.revoked:
            self.transfer.abort(Outcome.FAILED, error)

    def mark_done(self) -> None:
        """It is done, or failed."""
        self.transfer.in_flight -= 1
        if self.registration.revoked:
            self.transfer.abort(Outcome.CANCELLED)


@dataclass(slots=True, eq=False)
class DirectionQueue:
    """One direction of the device, over all registrations.

    inflight: chunks in the order submitted. turns: registrations with transfers that wait, in the
    order in which they may submit a chunk; one without any is removed when its turn comes.
    full: the engine had no room, and nothing has changed since.
    """

    direction: Direction
    inflight: deque[InflightChunk] = field(default_factory=deque)
    turns: deque[RegistrationQueues] = field(default_factory=deque)
    full: bool = False

    def add_registration(self, registration: RegistrationQueues) -> None:
        """A transfer waits there."""
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
