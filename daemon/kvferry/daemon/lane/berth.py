"""Where plans stand in the lane: a berth for each registration, in it a track each way.

Track.waiting     plans with pieces still to submit, the head may go on unless it is held
Stream.flights    pieces on the device, in the order submitted, over all registrations
Track.live        every plan that has not ended, oldest first
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import msgspec

from kvferry.daemon.core.actions import CopyPlan, TransferCompleted
from kvferry.daemon.core.layout import Extent
from kvferry.daemon.engine.base import Mapping, Ticket
from kvferry.daemon.engine.memory import Timeline
from kvferry.proto.errors import ErrorInfo
from kvferry.proto.messages import Outcome
from kvferry.proto.specs import Direction

LARGE = 150e-6
"""Seconds on the link from which on a piece is large."""
MOST = 1.25
"""Times as long as the least that large pieces are thought to take, at most."""
SHARE, SOONER = 0.25, 0.99
"""How much of it one counts that was seen to take longer; and what becomes of it with each that was
done when it was looked at first, so that the next is looked at a little too soon before long."""


class Crossing(msgspec.Struct, eq=False):
    """A plan under way, from its place in the track to its one end."""

    plan: CopyPlan
    rest: tuple[Extent, ...]
    """What is still to submit."""
    in_flight: int = 0
    first: Ticket | None = None
    after: Ticket | None = None
    """The piece that was in flight before its first."""
    seconds: float = 0.0
    queued: float = 0.0
    """Seconds from when it was accepted until its first piece was submitted."""
    outcome: Outcome = Outcome.DONE
    error: ErrorInfo | None = None
    failed_store: int | None = None
    """A store that it requires and that did not complete."""

    def spoil(self, outcome: Outcome, error: ErrorInfo | None = None) -> None:
        """Submit no more of it; what it ends as is decided, the first reason counts."""
        if self.outcome is Outcome.DONE:
            self.outcome, self.error = outcome, error
        self.rest = ()

    @property
    def over(self) -> bool:
        return not self.rest and not self.in_flight

    def done(self, track: Track) -> bool:
        """Over, and not at the head of its track any more."""
        return self.over and not (track.waiting and track.head is self)

    @property
    def ended(self) -> TransferCompleted:
        seconds = self.seconds if self.outcome is Outcome.DONE else 0.0
        return TransferCompleted(self.plan.serial, self.outcome, seconds, self.error, self.queued)


@dataclass(slots=True, eq=False)
class Track:
    """One registration's plans of one direction: all that have not ended, oldest first."""

    live: OrderedDict[int, Crossing] = field(default_factory=OrderedDict)
    waiting: OrderedDict[int, Crossing] = field(default_factory=OrderedDict)
    """By serial; these have pieces still to submit. There may be thousands, and they may be given
    up in any order: of a plain dict the first takes the longer to find the more have gone."""
    listed: bool = False
    """Whether its stream has it in turn."""

    @property
    def head(self) -> Crossing:
        """The first of those that wait."""
        return next(iter(self.waiting.values()))

    def ended_up_to(self, serial: int) -> bool:
        oldest = next(iter(self.live), None)
        return oldest is None or oldest > serial

    @property
    def oldest(self) -> Crossing | None:
        return next(iter(self.live.values()), None)


@dataclass(slots=True, eq=False)
class Berth:
    """A registration in the lane: its memory, its timeline, its two tracks."""

    mapping: Mapping
    timeline: Timeline | None
    tracks: dict[Direction, Track] = field(
        default_factory=lambda: {direction: Track() for direction in Direction}
    )
    leaving: bool = False
    failed_stores: set[int] = field(default_factory=set)
    """Stores that did not complete, as long as the core may plan a load that requires them."""

    def add(self, plan: CopyPlan) -> Crossing:
        """A plan comes into its track."""
        crossing, track = Crossing(plan, plan.runs), self.tracks[plan.direction]
        track.live[plan.serial] = track.waiting[plan.serial] = crossing
        if self.failed_stores:
            failed = self.failed_stores.intersection(plan.requires)
            crossing.failed_store = min(failed, default=None)
        return crossing

    def store_failed(self, serial: int) -> None:
        """A store did not complete: loads that require it must not copy anything."""
        self.failed_stores.add(serial)
        for load in self.tracks[Direction.LOAD].waiting.values():
            if serial in load.plan.requires:
                load.failed_store = serial

    @property
    def live(self) -> tuple[int, ...]:
        """Plans that have not ended."""
        return tuple(serial for track in self.tracks.values() for serial in track.live)

    def spoil(self, serials: Iterable[int]) -> Iterator[tuple[Track, Crossing]]:
        """Submit no more of these plans; those of them that have not ended."""
        for serial in serials:
            for track in self.tracks.values():
                if crossing := track.live.get(serial):
                    crossing.spoil(Outcome.CANCELLED)
                    track.waiting.pop(serial, None)
                    yield track, crossing

    def holds(self, plan: CopyPlan, pool_ready: int) -> bool:
        """Whether something keeps the plan at the head of its track from going on."""
        if self.leaving or self.revoked:
            return True
        if plan.wait_for and self._fenced(plan):
            return True
        return plan.host_end > pool_ready or (plan.after > 0 and self._behind(plan) is not None)

    @property
    def revoked(self) -> bool:
        """Whether its engine has given up all jobs, and their blocks may be somebody else's."""
        return self.timeline is not None and self.timeline.revoked

    def held_by_engine(self, plan: CopyPlan) -> bool:
        """Whether the engine's timeline keeps back the plan, or one that it must not overtake."""
        before = self._behind(plan)
        return self._fenced(plan) or (before is not None and self._fenced(before.plan))

    def _fenced(self, plan: CopyPlan) -> bool:
        reached = self.timeline is not None and self.timeline.reached(plan.wait_for)
        return plan.wait_for > 0 and not reached

    def _behind(self, plan: CopyPlan) -> Crossing | None:
        """The oldest plan of the other direction, where this one waits for it."""
        other = self.tracks[plan.direction.other]
        return None if other.ended_up_to(plan.after) else other.oldest

    @property
    def empty(self) -> bool:
        return not any(track.live for track in self.tracks.values())


def oldest(berths: Iterable[Berth]) -> tuple[float | None, float | None]:
    """When the oldest plans were accepted: of those on their way, and of those held by engines."""
    going: list[float] = []
    held: list[float] = []
    for berth in berths:
        for track in berth.tracks.values():
            if (first := track.oldest) and first.plan.accepted:
                waits = first.first is None and berth.held_by_engine(first.plan)
                (held if waits else going).append(first.plan.accepted)
    return min(going, default=None), min(held, default=None)


class Flight(msgspec.Struct, eq=False):
    """A piece on a stream."""

    berth: Berth
    crossing: Crossing
    ticket: Ticket
    takes: float
    """Seconds from when the one before it was done, at least."""
    looked: float = 0.0
    """When it was not done yet."""

    def landed(self) -> None:
        """It is done, or failed."""
        self.crossing.in_flight -= 1
        if self.berth.revoked:
            self.crossing.spoil(Outcome.CANCELLED)

    @property
    def large(self) -> bool:
        """Whether the device has something to do for long with it; so has the CPU that enqueues."""
        return self.takes > LARGE

    @property
    def last(self) -> bool:
        """Whether its plan is over with it."""
        return not self.crossing.rest and self.crossing.in_flight == 1


@dataclass(slots=True, eq=False)
class Stream:
    """What is in flight one way, over all registrations, in the order submitted."""

    direction: Direction
    flights: deque[Flight] = field(default_factory=deque)
    turn: deque[Berth] = field(default_factory=deque)
    """Those with plans waiting, in the order in which they may submit next. A berth without any is
    taken out when its turn comes."""
    since: float = 0.0
    """When the oldest piece in flight came first, or before: the one before it was done, or there
    was none."""
    pace: float = 1.0
    """How many times as long as the least large pieces take, as those of late did."""
    _seen: float = 0.0
    """When a piece was seen to be not done just before it was; 0: none since the first came."""
    _takes: float = 0.0
    """What all take that were done since."""
    paused: bool = False
    """Whether there is more to submit at once."""
    refused: bool = False
    """Whether the engine had no room, and nothing has changed since that could make some."""

    @property
    def large(self) -> bool:
        """Whether large pieces are under way, by the last one."""
        return bool(self.flights) and self.flights[-1].large

    @property
    def due(self) -> float:
        """When the oldest piece in flight is done, at least."""
        return self.since + self.flights[0].takes

    def left(self, unsent: int, now: float) -> float:
        """For how many seconds the link has something to do, at least; `unsent` pieces, the last
        ones, it does not have."""
        takes = [flight.takes for flight in self.flights]
        del takes[len(takes) - unsent :]
        return max(0.0, self.due - now) + sum(takes[1:]) if takes else 0.0

    def begin(self, now: float) -> None:
        """The first piece comes, where there was none."""
        self.since, self._seen, self._takes = now, 0.0, 0.0

    def landed(self, now: float) -> None:
        """The oldest piece is done, as is seen now. The next came first some time before: when
        this one was due, but not while it was seen not to be done."""
        flight = self.flights.popleft()
        self._takes += flight.takes
        due = self.since + flight.takes * self.pace * SOONER
        if flight.large:
            self._keep_pace(flight, now)
        self.since = min(now, max(flight.looked, due))

    def _keep_pace(self, flight: Flight, now: float) -> None:
        """Pieces that were not done when they were looked at first tell how long they take now."""
        if not flight.looked:
            self.pace = max(1.0, self.pace * SOONER)
            return
        times = (flight.looked - self._seen) / self._takes
        if self._seen and 1.0 < times < MOST:  # or one waited for something else
            self.pace += SHARE * (times - self.pace)
        self._seen, self._takes = flight.looked, 0.0

    def enlist(self, berth: Berth) -> None:
        """A plan waits there."""
        track = berth.tracks[self.direction]
        if not track.listed:
            track.listed = True
            self.turn.append(berth)

    def strike(self, berth: Berth) -> None:
        """Nothing comes from there any more."""
        if berth.tracks[self.direction].listed:
            self.turn.remove(berth)

    @property
    def waiting(self) -> bool:
        """Whether a plan has pieces still to submit."""
        return any(berth.tracks[self.direction].waiting for berth in self.turn)
