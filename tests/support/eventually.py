"""Waiting for a condition on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from support.time_limits import TIMEOUT


async def eventually(condition: Callable[[], object], timeout: float = TIMEOUT) -> None:
    """Return when the condition holds. Raises TimeoutError after `timeout` seconds."""
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0.001)
