"""Waiting for a condition, on the event loop and without one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from support.time_limits import TIMEOUT


async def eventually(condition: Callable[[], object], timeout: float = TIMEOUT) -> None:
    """Return when the condition holds. Raises TimeoutError after `timeout` seconds."""
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0.001)


def wait_until(condition: Callable[[], object], timeout: float = TIMEOUT) -> None:
    """As `eventually`, without an event loop. The condition is called again and again."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.0005)
