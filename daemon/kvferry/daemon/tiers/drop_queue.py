"""Drops of whole namespaces in one tier: a marker first, then the request.

Of each namespace at most one drop is in progress. Drops that are requested before it is sent are
the same one; later ones are all done by the next. So resets cannot fill the tier's queue, or the
directory of markers. Called by tiering.py, on the event loop, except that markers are written and
removed by a thread of the loop's executor.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from time import time_ns

import structlog

from kvferry.daemon.tiers.drop_markers import add_marker, marked_stores, remove_marker
from kvferry.daemon.tiers.tier_client import TierClient

log = structlog.get_logger()


@dataclass(eq=False, slots=True)
class _StoreDrop:
    """current: called when the tier has confirmed it. following: when it has confirmed the one
    after it. marker: its path, once it is written."""

    marker: asyncio.Future[Path]
    current: list[Callable[[], None]] = field(default_factory=list)
    following: list[Callable[[], None]] = field(default_factory=list)
    sent: bool = False


class DropQueue:
    """markers: directory; its drops, of an earlier daemon, are repeated. marker_seconds: for the
    marker of a drop. After that it is sent without: no search may overtake it, so it must be sent
    before it counts as done."""

    def __init__(self, client: TierClient, markers: Path, marker_seconds: float) -> None:
        self._client, self._directory, self._seconds = client, markers, marker_seconds
        self._loop = asyncio.get_running_loop()
        self._numbers = count(time_ns())
        self._drops: dict[str, _StoreDrop] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        found = defaultdict[str, list[Path]](list)
        for marker, store in marked_stores(markers):
            found[store].append(marker)
        for store, paths in found.items():
            client.drop(store, done=partial(self._remove_markers, paths))

    def drop(self, store: str, done: Callable[[], None]) -> None:
        """Drop a namespace. done: called when the tier has confirmed it."""
        drop = self._drops.get(store)
        if drop is not None:
            (drop.following if drop.sent else drop.current).append(done)
            return
        number, directory = next(self._numbers), self._directory
        adding = self._loop.run_in_executor(None, add_marker, directory, store, number)
        drop = self._drops[store] = _StoreDrop(adding, [done])
        task = self._loop.create_task(self._send_marked(store, drop))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Wait until all drops are sent."""
        await asyncio.gather(*self._tasks)

    async def _send_marked(self, store: str, drop: _StoreDrop) -> None:
        try:
            await asyncio.wait_for(asyncio.shield(drop.marker), self._seconds)
        except OSError as error:
            # The drop itself is durable, too; only a crash before it could bring keys back.
            reason = str(error) or f"not written within {self._seconds} s"
            log.warning("drop not marked", tier=self._client.spec.name, reason=reason)
        drop.sent = True
        self._send(store, drop)

    def _send(self, store: str, drop: _StoreDrop) -> None:
        self._client.drop(store, done=partial(self._confirm, store, drop))

    def _confirm(self, store: str, drop: _StoreDrop) -> None:
        confirmed, drop.current, drop.following = drop.current, drop.following, []
        if drop.current:  # first: no search may overtake it
            self._send(store, drop)
        else:
            del self._drops[store]
            drop.marker.add_done_callback(self._remove_added)
        for done in confirmed:
            done()

    def _remove_added(self, added: asyncio.Future[Path]) -> None:
        if added.exception() is None:
            self._remove_markers([added.result()])

    def _remove_markers(self, paths: list[Path]) -> None:
        for path in paths:
            self._loop.run_in_executor(None, remove_marker, path)
