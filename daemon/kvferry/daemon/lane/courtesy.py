"""When stores leave the lane to loads: somebody waits for a load, and for a store nobody does.

What the lane does for stores it does in steps of some ten microseconds: it submits a piece, or has
the engine do a part of its work. Each keeps the loop, which has to hear what is said, from the GIL,
and the lane from seeing that a load is done. So before each step it is asked for here whether it
has to wait, as long as the link has enough of stores to do:

    a short load is on the link     until it is due it is in nobody's way, so one step may go; then
                                    the lane looks whether the load is done
    a short load has ended          a moment ago: who waited for it may want another one, and the
                                    loop has to take its end in. One step may go at once, if none
                                    went beside the load and the link has not enough for LONG
    something was said              a moment ago: it may be a load. The lane sleeps, and who hears
                                    of it may begin it
    the lane has orders             those come first

Where the link has not enough to do a step goes in any case, but then the others have their turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kvferry.daemon.lane.berth import Flight, Stream

ENOUGH = 2e-4
"""Seconds that the link is busy with stores: then they can wait."""
LONG = 2e-3
"""Seconds in which as many loads come as there are steps to a piece."""
MOMENT = 3e-4
"""Seconds in which a client that has heard of an end says what is next, and is heard."""
BREATH = 20e-6
"""Seconds that the lane sleeps between two steps where others want to go on."""


class Courtesy:
    """Of the lane, which alone asks.

    unsent: how many pieces of stores, the last ones, the link was not given yet. said: a number
    that is another one when more was said; 0: nothing that was not heard.
    """

    def __init__(
        self, loads: Stream, stores: Stream, unsent: Callable[[], int], said: Callable[[], int]
    ) -> None:
        self._loads, self._stores = loads, stores
        self._unsent, self._said = unsent, said
        self._last_said = 0
        self._until = 0.0
        """When the moment is over."""
        self._beside: Flight | None = None
        """The load beside which a step went while it was on the link."""
        self._behind = False
        """Whether a step may go behind a load, which has ended since the lane looked at
        everything last."""
        self._did = False
        """Whether a step was done since the lane looked at everything last."""
        self.pause = 0.0
        """Seconds that stores leave the lane to others, from now on."""

    def look(self) -> None:
        """The lane looks at everything: what is done, and what there is to do."""
        self._behind = self._did = False
        self.pause = 0.0

    def load_ended(self, load: Flight, now: float) -> None:
        """A short one."""
        self._behind, self._until = load is not self._beside, now + MOMENT

    def stepped(self) -> None:
        """A step was done."""
        self._did, self._beside = True, self._load

    def waits(self, *, orders: bool) -> bool:
        """Whether the next step of stores has to wait."""
        now = time.perf_counter()
        said = self._said()
        if said not in (0, self._last_said):
            self._last_said, self._until = said, now + MOMENT
        load = self._load
        short = load is not None and not load.large
        if not (short or orders or now < self._until):
            return False
        left = self._stores.left(self._unsent(), now)
        if not self._did:
            beside = short and load is not self._beside and now < self._loads.due
            enough = LONG if self._behind else ENOUGH
            if left <= 0 or (not orders and (beside or left <= enough)):
                return False
        if not (short or orders):
            rest = BREATH if self._did else min(self._until - now, left - ENOUGH)
            self.pause = max(BREATH, rest)
        return True

    @property
    def _load(self) -> Flight | None:
        """The oldest on the link."""
        return self._loads.flights[0] if self._loads.flights else None
