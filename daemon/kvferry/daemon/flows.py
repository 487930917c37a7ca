"""Runs the daemon's flows: coroutines that work beside the server for as long as it serves.

Called by app.py. A flow ends with the daemon, or ends the daemon: no error in a flow is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import structlog

from kvferry.proto.errors import Code, Failed, KVFerryError

Flow: TypeAlias = Callable[[], Coroutine[Any, Any, None]]

log = structlog.get_logger()


@asynccontextmanager
async def running_flows(fail: Callable[[KVFerryError], None], *flows: Flow) -> AsyncIterator[None]:
    """Run the flows in one task group during the block, and cancel them at its end.

    fail: called if a flow raises an error, after all flows have ended.
    """
    task = asyncio.create_task(_run(fail, flows))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def _run(fail: Callable[[KVFerryError], None], flows: tuple[Flow, ...]) -> None:
    try:
        async with asyncio.TaskGroup() as tasks:
            for flow in flows:
                tasks.create_task(flow())
    except* Exception as errors:
        error: BaseException = errors
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if not isinstance(error, KVFerryError):
            log.error("a flow of the daemon failed", exc_info=error)
            error = Failed(Code.COPY_FAILED, f"a flow of the daemon failed: {error!r}; see the log")
        fail(error)
