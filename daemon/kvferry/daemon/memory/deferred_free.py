"""Frees the keys of a cache that was reset, in steps on the event loop, between other work."""

from __future__ import annotations

import asyncio

from kvferry.daemon.core.cache.deferred_free import DeferredFree


def free_in_steps(deferred: DeferredFree) -> None:
    """Free some entries now and the rest in later turns of the loop. Event loop only."""
    if deferred.free_some():
        asyncio.get_running_loop().call_soon(free_in_steps, deferred)
