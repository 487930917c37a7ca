"""Drops of whole namespaces in one tier: a marker first, then the request.

Of each namespace at most one drop is in progress. Drops that are requested before it is sent are
the same one; later ones are all done by the next. So resets cannot fill the tier's queue, or the
directory of markers. Called by tiering.py, on the event loop, except that markers are written and
removed by a thread of the loop's executor.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from time import time_ns
from typing import Any

import structlog

from kvferry.daemon.tiers.drop_markers import add_marker, marked_stores, remove_marker
from kvferry.daemon.tiers.tier_client import TierClient

log = structlog.get_logger()


@dataclass(eq=False, slots=True)
class _StoreDrop:
    """A namespace that is being dropped. requested: those that the next drop does. sent: set once
    the first one is sent."""

    requested: list[asyncio.Future[None]] = field(default_factory=list)
    sent: asyncio.Event = field(default_factory=asyncio.Event)


class DropQueue:
    """markers: directory. start: starts a flow. marker_seconds: for the marker of a drop. After
    that it is sent without: no search may overtake it, so it must be sent before it counts as
    done."""

    def __init__(
        self,
        client: TierClient,
        markers: Path,
        start: Callable[[Coroutine[Any, Any, None]], None],
        marker_seconds: float,
    ) -> None:
        self._client, self._directory, self._start = client, markers, start
        self._seconds = marker_seconds
        self._loop = asyncio.get_running_loop()
        self._numbers = count(time_ns())
        self._drops: dict[str, _StoreDrop] = {}

    def repeat_marked(self) -> None:
        """Drop the namespaces that an earlier daemon has marked."""
        found = defaultdict[str, list[Path]](list)
        for marker, store in marked_stores(self._directory):
            found[store].append(marker)
        for store, markers in found.items():
            self._start(self._repeat_drop(store, markers))

    def drop(self, store: str) -> asyncio.Future[None]:
        """Drop a namespace. The future ends when the tier has confirmed it."""
        drop = self._drops.get(store)
        if drop is None:
            drop = self._drops[store] = _StoreDrop()
            self._start(self._drop_marked(store, drop))
        confirmed = self._loop.create_future()
        drop.requested.append(confirmed)
        return confirmed

    async def wait_until_sent(self) -> None:
        """Wait until all drops are sent."""
        for drop in tuple(self._drops.values()):
            await drop.sent.wait()

    async def _drop_marked(self, store: str, drop: _StoreDrop) -> None:
        """Mark a namespace and drop it, again if that was requested since, and remove the mark."""
        number = next(self._numbers)
        adding = self._loop.run_in_executor(None, add_marker, self._directory, store, number)
        try:
            await asyncio.wait_for(asyncio.shield(adding), self._seconds)
        except OSError as error:
            # The drop itself is durable, too; only a crash before it could bring keys back.
            reason = str(error) or f"not written within {self._seconds} s"
            log.warning("drop not marked", tier=self._client.config.name, reason=reason)
        while drop.requested:
            requested, drop.requested = drop.requested, []
            drop.sent.set()
            await self._client.drop(store)  # at once if it is another one: no search may overtake
            for confirmed in requested:
                if not confirmed.done():
                    confirmed.set_result(None)
        del self._drops[store]
        with suppress(OSError):
            await self._remove([await adding])

    async def _repeat_drop(self, store: str, markers: list[Path]) -> None:
        await self._client.drop(store)
        await self._remove(markers)

    async def _remove(self, markers: list[Path]) -> None:
        for marker in markers:
            await self._loop.run_in_executor(None, remove_marker, marker)
