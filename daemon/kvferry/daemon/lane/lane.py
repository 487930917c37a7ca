"""The lane: a device, and the one thread that works it.

It takes orders from an inbox and does three things in turn: it reaps pieces that the engine has
finished, submits the next ones, and sleeps for as long as it may. Per registration and direction
plans stand in a queue, the track; a plan leaves it for the stream piece by piece, so that few are
in flight and a cancel or a dead client acts within one. Only the plan at the head of a track may
begin, and only when nothing holds it:

    the engine's timeline has reached `wait_for`      a plain read of a shared page
    the other direction has ended up to `after`       the other track's oldest live plan
    the pool is registered up to `host_end`           a number that grows

No wait is ever queued on the device, so nothing can hang a stream.

Whoever has the helm (helm.py) may touch what is here. That is the lane's thread; while that sleeps,
or the driver keeps it, the loop takes the helm, to begin what it posts.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from kvferry.daemon.core.actions import (
    CancelTransfers,
    Continue,
    CopyCalibrated,
    CopyPlan,
    ForgetStores,
    Pong,
    ReleaseTensors,
    Report,
    StartTransfer,
    TensorsUnmapped,
    UnmapTensors,
)
from kvferry.daemon.engine.base import CopyEngine, Want
from kvferry.daemon.engine.pool import HostPool
from kvferry.daemon.lane.berth import Berth, Crossing, Flight, Stream, Track, oldest
from kvferry.daemon.lane.courtesy import BREATH, Courtesy
from kvferry.daemon.lane.inbox import Inbox, Listen, Stop
from kvferry.daemon.lane.naps import LINK, MAX_NAP_HELD, NAP_HELD, until_due
from kvferry.daemon.lane.quay import MapOrder, Quay
from kvferry.proto.errors import Code, Failed, KVFerryError
from kvferry.proto.messages import Outcome
from kvferry.proto.specs import Direction

STEP = 4
"""So many large pieces of stores are submitted one after the other, then the lane sleeps for a
BREATH: of what comes by the socket it cannot know before the loop has done something for it."""
PREPARED = 32 << 20
"""Bytes of a transfer that has several pieces. What they need is made ready as it is posted, while
numpy is in the core's caches: later it takes several times as long, of some load's time."""
GIVEN_UP = 64
"""Transfers in one go: there may be thousands, and each keeps the loop busy, too."""
_PR_SET_TIMERSLACK = 29

Order: TypeAlias = (
    MapOrder
    | ReleaseTensors
    | UnmapTensors
    | StartTransfer
    | CancelTransfers
    | ForgetStores
    | Listen
    | Stop
)


class Lane:
    """`post` orders from any thread; `report` is called with what happened, in the lane's.

    said: a number that is another one when more was said that may lead to an order; 0: nothing is.
    """

    def __init__(
        self,
        engine: CopyEngine,
        pool: HostPool,
        report: Callable[[list[Report]], None],
        died: Callable[[KVFerryError], None],
        said: Callable[[], int] = lambda: 0,
    ) -> None:
        self._engine = engine
        self._pool = pool
        self._report = report
        self._died = died
        self._inbox: Inbox[Order] = Inbox()
        self._quay = Quay(engine)
        self._berths = self._quay.berths
        self._streams = [Stream(direction) for direction in (Direction.LOAD, Direction.STORE)]
        self._stream_of = {stream.direction: stream for stream in self._streams}
        self._loads, self._stores = self._streams
        unsent = partial(engine.unsent, Direction.STORE)
        self._courtesy = Courtesy(self._loads, self._stores, unsent, said)
        self._reports: list[Report] = []
        self._held_nap = NAP_HELD
        self._begins = 0
        """The thread besides the lane's own that may use the device."""
        self._broken: Exception | None = None
        """What went wrong at the helm in another thread."""
        self._started = threading.Event()
        self._trouble: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="kvferry-lane", daemon=True)

    def hold(self, number: int, *descriptors: int) -> None:
        """Take memory over that an earlier daemon held; before the start."""
        self._quay.hold(number, *descriptors)

    def start(self) -> None:
        """Bring the device up in the lane's thread; raises what it raises."""
        self._thread.start()
        self._started.wait()
        if self._trouble is not None:
            raise self._trouble

    def enter(self) -> None:
        """The calling thread may begin transfers that it posts while the lane sleeps."""
        self._engine.enter()
        self._begins = threading.get_ident()

    def post(self, order: Order) -> None:
        begins = isinstance(order, StartTransfer) and threading.get_ident() == self._begins
        if isinstance(order, StartTransfer) and order.plan.nbytes > PREPARED:
            self._prepare(order.plan)  # first: then the lane need not do it in a step
        self._inbox.put(order, self._begin if begins else None)

    def _prepare(self, plan: CopyPlan) -> None:
        """Make ready what its first pieces need, in any thread."""
        berth = self._berths.get(plan.registration)
        if berth is not None:
            for run in plan.runs:
                self._engine.prepare(plan.direction, berth.mapping, run)

    def close(self) -> None:
        """Stop the thread. Whoever calls has seen every job end, or gives them up."""
        self.post(Stop())
        self._thread.join()

    def _run(self) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1)  # a nap of 20 us is not one of 70
        try:
            copying = self._engine.attach(self._pool.address, self._inbox.helm)
            if copying is not None:
                self._reports.append(CopyCalibrated(copying))
                self._flush()
        except Exception as error:
            self._trouble = error
            return
        finally:
            self._started.set()
        try:
            while self._obey_orders():
                for stream in self._streams:
                    self._reap(stream)
                if self._stores.large:  # who waits for an end need not wait for more of them, too
                    self._flush()
                for stream in self._streams:
                    if stream.flights or stream.turn:
                        self._fill(stream)
                self._flush()
            self._quay.drop_all()
            self._engine.shutdown()
        except Exception as error:
            self._died(Failed(Code.COPY_FAILED, f"the lane stopped: {error!r}"))
            raise

    def _begin(self, order: Order) -> None:
        """At the helm in a thread that posts: submit the first piece of a transfer, if nothing
        holds it and nothing of its direction is under way."""
        try:
            assert isinstance(order, StartTransfer)
            self._start(plan := order.plan)
            stream, berth = self._stream_of[plan.direction], self._berths[plan.registration]
            track = berth.tracks[plan.direction]
            busy = stream.flights or (self._inbox.helm.lent and stream is self._stores)
            if not (busy or berth.holds(track.head.plan, self._pool.ready_bytes)):
                self._submit(stream, berth, track)
                if track.waiting:
                    self._urge(stream)
                else:
                    self._push(stream, more=False)
        except Exception as error:
            self._broken = error

    def _obey_orders(self) -> bool:
        """Do what the inbox says, sleeping first for as long as there is nothing else to do."""
        patience = self._nap()
        self._inbox.wait(patience, let_in=self._courtesy.pause > 0)
        self._courtesy.look()
        if self._broken is not None:
            raise self._broken
        while (order := self._inbox.take()) is not None:
            if isinstance(order, Stop):
                return False
            self._obey(order)
        return True

    def _nap(self) -> float | None:
        """How long to sleep unless an order comes: 0 is not at all, None until one does."""
        busy = [stream for stream in self._streams if stream.flights]
        if busy:
            self._held_nap, now = NAP_HELD, time.perf_counter()
            return min([self._leave_alone(stream, now) for stream in busy])
        if any(stream.waiting for stream in self._streams):
            self._held_nap = min(2 * self._held_nap, MAX_NAP_HELD)
            return self._held_nap
        return None

    def _leave_alone(self, stream: Stream, now: float) -> float:
        if stream.paused:
            return BREATH
        pause = self._courtesy.pause if stream is self._stores else 0.0
        return pause or until_due(stream, now)

    def _obey(self, order: Order) -> None:
        match order:
            case StartTransfer(plan=plan):
                self._start(plan)
            case MapOrder():
                self._reports.append(self._quay.map(order))
            case CancelTransfers(number, serials):
                self._all_may_try()
                self._give_up(number, serials)
            case UnmapTensors(number):
                self._all_may_try()
                self._unmap(number)
            case ReleaseTensors(number):
                self._quay.drop(number)
            case ForgetStores(number, serials):
                if berth := self._berths.get(number):
                    berth.failed_stores.difference_update(serials)
            case Listen(posted):
                self._reports.append(Pong(posted, *oldest(self._berths.values())))

    def _unmap(self, number: int) -> None:
        if berth := self._berths.get(number):
            berth.leaving = True
            self._give_up(number, berth.live)
        else:  # it was never mapped
            self._reports.append(TensorsUnmapped(number))

    def _start(self, plan: CopyPlan) -> None:
        berth = self._berths[plan.registration]
        berth.add(plan)
        stream = self._stream_of[plan.direction]
        stream.enlist(berth)
        stream.refused, self._held_nap = False, NAP_HELD

    def _give_up(self, number: int, serials: tuple[int, ...]) -> None:
        """Some transfers; the others once the loop has heard of these."""
        if (berth := self._berths.get(number)) is None:
            return
        for track, crossing in berth.spoil(serials[:GIVEN_UP]):
            self._end_if_over(track, crossing)
        if rest := serials[GIVEN_UP:]:
            self._reports.append(Continue(CancelTransfers(number, rest)))
        self._leave_if_empty(number, berth)

    def _reap(self, stream: Stream) -> None:
        while stream.flights:
            flight = stream.flights[0]
            crossing = flight.crossing
            looked = time.perf_counter()
            try:
                if not self._engine.poll(flight.ticket):
                    flight.looked = looked
                    return
                if crossing.in_flight == 1 and not crossing.rest:
                    crossing.seconds = self._engine.elapsed(
                        crossing.first, flight.ticket, crossing.after
                    )
            except KVFerryError as error:
                crossing.spoil(Outcome.FAILED, error.info)
            stream.landed(looked)
            self._made_room(stream, flight)
            flight.landed()
            if stream is self._loads and crossing.over and not flight.large:
                self._courtesy.load_ended(flight, looked)
            self._end_if_over(flight.berth.tracks[stream.direction], crossing)
            self._leave_if_empty(crossing.plan.registration, flight.berth)

    def _made_room(self, stream: Stream, flight: Flight) -> None:
        """A piece has landed: what was refused may be taken now. But not a large one for the little
        room that a short one leaves, while others are about to leave more."""
        stream.refused, other = False, self._stream_of[stream.direction.other]
        if flight.large or not other.large:
            other.refused = False

    def _all_may_try(self) -> None:
        for stream in self._streams:
            stream.refused = False

    def _fill(self, stream: Stream) -> None:
        """Submit pieces, one registration after the other, until the engine has enough."""
        held, sent, more = 0, 0, stream.refused
        tries, stream.paused = not more, False
        while tries and held < len(stream.turn):
            if self._engine.full(stream.direction):  # or each would be told so, every time
                more = True
                break
            if self._waits(stream):
                return
            if self._urge(stream):
                self._stepped(stream)
                continue
            berth = stream.turn.popleft()
            track = berth.tracks[stream.direction]
            if not track.waiting:
                track.listed = False
                continue
            stream.turn.append(berth)
            if berth.holds(track.head.plan, self._pool.ready_bytes):
                held += 1
            else:
                more = not self._submit(stream, berth, track)
                held = held + 1 if more else 0
                sent += not more
                if more or stream is not self._stores:  # who had no room keeps its place
                    continue
                self._stepped(stream)
                if sent >= STEP and stream.large:
                    stream.paused = True
                    return
        stream.refused = more
        self._push(stream, more)

    def _urge(self, stream: Stream) -> bool:
        """Push once, where the engine wants that before more is submitted; whether it did."""
        wants = self._engine.wants_push(stream.direction)
        if wants:
            self._engine.push(stream.direction, more=True)
        return wants

    def _push(self, stream: Stream, more: bool) -> None:
        while not self._waits(stream) and self._engine.push(stream.direction, more):
            self._stepped(stream)

    def _waits(self, stream: Stream) -> bool:
        """Whether the next step of a stream has to wait, for another is more urgent."""
        return stream is self._stores and self._courtesy.waits(orders=not self._inbox.empty)

    def _stepped(self, stream: Stream) -> None:
        if stream is self._stores:
            self._courtesy.stepped()

    def _submit(self, stream: Stream, berth: Berth, track: Track) -> bool:
        """Send the next piece of the track's head on its way; False where there is no room."""
        crossing = track.head
        if crossing.failed_store is not None:
            message = "a store that this load waited for did not complete: store its blocks again"
            stale = Failed(Code.STALE, message, f"transfer {crossing.failed_store}")
            crossing.spoil(Outcome.FAILED, stale.info)
        if crossing.rest:
            geometry = berth.mapping.geometry
            nbytes, contended = geometry.nbytes(crossing.rest), self._contended(stream)
            want = Want(crossing.rest[0].group, nbytes, contended)
            room = self._engine.room(stream.direction, berth.mapping, want)
            if not room.nbytes:
                return False
            piece, rest = geometry.split(crossing.rest, room.nbytes, room.blocks)
            try:
                ticket = self._engine.submit(stream.direction, berth.mapping, piece)
            except KVFerryError as error:
                crossing.spoil(Outcome.FAILED, error.info)
            else:
                crossing.rest = rest
                crossing.in_flight += 1
                if crossing.first is None:
                    crossing.first = ticket
                    if accepted := crossing.plan.accepted:
                        crossing.queued = time.monotonic() - accepted
                    crossing.after = stream.flights[-1].ticket if stream.flights else None
                if not stream.flights:
                    stream.begin(time.perf_counter())
                takes = geometry.nbytes((piece,)) / LINK
                stream.flights.append(Flight(berth, crossing, ticket, takes))
        if not crossing.rest:
            track.waiting.popitem(last=False)
            self._end_if_over(track, crossing)
        return True

    def _contended(self, stream: Stream) -> bool:
        """Whether the other direction has work, too: waiting, or large pieces in flight."""
        other = self._stream_of[stream.direction.other]
        return other.large or other.waiting

    def _end_if_over(self, track: Track, crossing: Crossing) -> None:
        """Report a plan that is over: in its turn, but one that was given up at once."""
        if not crossing.over:
            return
        if crossing.outcome is Outcome.CANCELLED and crossing.plan.serial in track.live:
            self._end(track, crossing)
        while (first := track.oldest) and first.done(track):
            self._end(track, first)

    def _end(self, track: Track, crossing: Crossing) -> None:
        plan = crossing.plan
        del track.live[plan.serial]
        self._reports.append(crossing.ended)
        if plan.direction is Direction.STORE and crossing.outcome is not Outcome.DONE:
            self._berths[plan.registration].store_failed(plan.serial)
            # The core may plan loads that require it until it has heard of its end.
            self._reports.append(Continue(ForgetStores(plan.registration, (plan.serial,))))

    def _leave_if_empty(self, number: int, berth: Berth) -> None:
        if not (berth.leaving and berth.empty):
            return
        for stream in self._streams:
            stream.strike(berth)
        self._quay.close(number)
        self._reports.append(TensorsUnmapped(number))

    def _flush(self) -> None:
        if self._reports:
            reports, self._reports = self._reports, []
            self._report(reports)
