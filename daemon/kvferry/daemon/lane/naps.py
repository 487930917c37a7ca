"""How long the lane sleeps: a wake-up costs the loop a turn at the GIL, and who waits for an end
waits for a late one too.
"""

from __future__ import annotations

from kvferry.daemon.lane.berth import Stream

LINK = 60e9
"""Bytes per second that a piece moves at, at most."""
WATCH = 150e-6
"""A piece that is not large is polled without pause until it is late by as much, and so is the last
of a plan from when it is due: somebody may be waiting for it. Polling others so would only take the
loop's turns at the GIL away."""
NAP = 20e-6
"""While the end of a plan is awaited that has been submitted whole."""
NAP_LONG = 50e-6
"""Also: what was not looked at for as long is looked at now, however late it is."""
NAP_LATE = 100e-6
MAX_NAP_LONG = 2e-3
NAP_HELD = 20e-6
MAX_NAP_HELD = 1e-3
"""A fence is read ever less often while nothing happens: memory cannot wake a thread."""


def until_due(stream: Stream, now: float) -> float:
    """How long to leave the oldest piece of a stream alone."""
    flight = stream.flights[0]
    left = stream.since + flight.takes * stream.pace - now
    if not flight.large:
        return 0.0 if left > -WATCH or now - flight.looked > NAP_LONG else NAP
    if flight.last and -WATCH < left < NAP:
        return 0.0
    least, late = (NAP_LONG, NAP_LATE) if flight.crossing.rest else (NAP, NAP_LONG)
    if left < 0:
        return min(late, max(least, -left / 16))
    return min(MAX_NAP_LONG, max(least, left))
