"""The end of the daemon, and its flows: coroutines that run beside the server until then.

Used by app.py. A flow ends with the daemon, or ends the daemon: no error in a flow is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import structlog

from kvferry.proto.errors import Code, Failed, KVFerryError

Flow: TypeAlias = Callable[[], Coroutine[Any, Any, None]]

log = structlog.get_logger()


class Shutdown:
    """A request to end the daemon: of a signal, or of a part that has failed."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._requested = asyncio.Event()
        self.error: KVFerryError | None = None

    def stop(self) -> None:
        """End the daemon. Event loop only."""
        self._requested.set()

    def fail(self, error: KVFerryError) -> None:
        """End the daemon with this error; the first one counts. Any thread."""
        self._loop.call_soon_threadsafe(self._stop_with_error, error)

    async def until_requested(self) -> None:
        await self._requested.wait()

    def _stop_with_error(self, error: KVFerryError) -> None:
        self.error = self.error or error
        self._requested.set()


@asynccontextmanager
async def running_flows(fail: Callable[[KVFerryError], None], *flows: Flow) -> AsyncIterator[None]:
    """Run the flows in one task group during the block, and cancel them at its end.

    fail: called with the first error of a flow, after all flows have ended; others are logged.
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
        first, *others = _leaves(errors)
        for error in (*others, *(() if isinstance(first, KVFerryError) else (first,))):
            log.error("a flow of the daemon failed", exc_info=error)
        if not isinstance(first, KVFerryError):
            first = Failed(Code.COPY_FAILED, f"a flow of the daemon failed: {first!r}; see the log")
        fail(first)


def _leaves(error: Exception) -> Iterator[Exception]:
    """The errors in an exception group, and in the groups in it."""
    if isinstance(error, ExceptionGroup):
        for each in error.exceptions:
            yield from _leaves(each)
    else:
        yield error
