"""Frees many entries in steps on the event loop, between other work."""

from __future__ import annotations

import asyncio

from kvferry.daemon.core.cache.deferred_free import FreedInSteps


def free_in_steps(deferred: FreedInSteps) -> None:
    """Free some entries now and the rest in later turns of the loop. Event loop only."""
    if deferred.free_some():
        asyncio.get_running_loop().call_soon(free_in_steps, deferred)
