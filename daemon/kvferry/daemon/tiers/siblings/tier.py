"""The pools of all siblings as one tier: finds siblings, and copies blocks from their pools."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvferry.client.endpoint import find_daemons
from kvferry.daemon.tiers.base import (
    Blocks,
    Fetched,
    HostMemory,
    Result,
    TierUsage,
    without_part,
)
from kvferry.daemon.tiers.messages import LentFiles
from kvferry.daemon.tiers.siblings.key_table import KeyTable, KeyTables, hash_keys
from kvferry.daemon.tiers.siblings.sibling_link import ON, PROMPT_SECONDS, SiblingLink
from kvferry.proto.errors import KVFerryError
from kvferry.proto.lending import UNCOMMITTED, BlocksLocated
from kvferry.proto.status import SiblingStatus

# Seconds between two questions for a block whose checksum the sibling still computes, and in all.
COMMIT_PAUSE, COMMIT_SECONDS = 0.005, 0.1
# Seconds for siblings to say where blocks are: less than a search may take in all. Without an
# answer the blocks are copied.
LOCATE_SECONDS = 0.05
# Chunks that one answer names; it must fit a datagram. Blocks in others are copied.
MAX_LENT_FILES = 8192


def open_tier(options: Mapping[str, Any], _memory: HostMemory) -> SiblingsTier:
    directories = [Path(directory) for directory in options["directories"]]
    tables = KeyTables(options["keys"])
    os.close(options["keys"])
    return SiblingsTier(Path(options["own"]), directories, tables)


class SiblingsTier:
    """The pools of siblings.

    own: directory of this daemon. directories: runtime directories in which siblings are. tables:
    for their keys, empty.
    """

    io_threads, call_bytes = 4, 16 << 20
    # Nothing holds the blocks of a sibling, so other bytes are an eviction, and no fault.
    unequal = Result.MISS

    def __init__(self, own: Path, directories: Sequence[Path], tables: KeyTables) -> None:
        self._tables, self._free_tables = tables, list(tables.tables)
        self._own, self._directories = own, directories
        self._links: dict[tuple[Path, str], SiblingLink] = {}
        self._tasks: dict[tuple[Path, str], asyncio.Task[None]] = {}
        # Of each store in use its generation in this daemon.
        self._generations: dict[str, int] = {}
        # Those that the daemon has mapped, so that it can load directly from them.
        self._windows: frozenset[int] = frozenset()
        # By directory: why a sibling is not used at all; counters of SiblingStatus.
        self._unusable: dict[Path, str] = {}
        self._counts: dict[Path, defaultdict[str, float]] = {}
        self._counting = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    # Requests of the daemon

    def contains(self, namespace: str, keys: Sequence[bytes]) -> Sequence[bool]:
        return [link is not None for link in self._holders(namespace, keys)]

    def locate(self, namespace: str, keys: Sequence[bytes]) -> bytes:
        """Where the daemon can load keys directly: see Answer.places."""
        places = np.full((len(keys), 3), -1, np.int64)
        wanted = dict[SiblingLink, list[int]]()
        for place, link in enumerate(self._holders(namespace, keys)):
            if link is not None and link.window in self._windows:
                wanted.setdefault(link, []).append(place)
        if not wanted:
            return b""
        located = asyncio.run_coroutine_threadsafe(self._locate_all(keys, wanted), self._loop)
        for at, found in zip(wanted.values(), located.result(), strict=True):
            if not isinstance(found, BaseException):
                window, blocks = found
                offsets = np.array(blocks.offsets)
                places[at, 0] = np.where(offsets < 0, -1, window)
                places[at, 1], places[at, 2] = offsets, blocks.versions
        return places.tobytes()

    def fetch(self, blocks: Blocks, deadline: float) -> Sequence[Fetched]:
        """Copy blocks from the siblings that have them. The caller compares the checksums."""
        fetched = [Fetched(Result.MISS)] * len(blocks.keys)
        holders = self._holders(blocks.namespace, blocks.keys)
        for link in dict.fromkeys(filter(None, holders)):
            places = [place for place, holder in enumerate(holders) if holder is link]
            begun = time.monotonic()
            copied = self._copy(link, blocks, places, min(deadline, begun + COMMIT_SECONDS))
            for place, checksum in copied.items():
                fetched[place] = Fetched(Result.OK, checksum)
            self._count(
                link.directory,
                copied=len(copied),
                missed=len(places) - len(copied),
                copied_bytes=len(copied) * blocks.nbytes,
                copy_seconds=time.monotonic() - begun,
            )
        return fetched

    def put(self, blocks: Blocks, _checksums: Sequence[int]) -> Sequence[Result]:
        return [Result.FULL] * len(blocks.keys)

    def drop(self, namespace: str, keys: Sequence[bytes] | None = None) -> None:
        """Reset the namespace at all siblings, and wait for those that answer. Of keys, forget that
        a sibling has them: their bytes were others."""
        if keys is None:
            self.maintain()  # of engines and siblings that have just started, too
            asyncio.run_coroutine_threadsafe(self._reset(namespace), self._loop).result()
            return
        hashes = hash_keys(namespace, keys)
        for link in tuple(self._links.values()):
            if link.store == namespace:
                self._loop.call_soon_threadsafe(link.keys.remove, hashes)

    def usage(self) -> TierUsage:
        return TierUsage(keys=sum(link.keys.count for link in tuple(self._links.values())))

    def maintain(self) -> None:
        """Find siblings that have started or ended."""
        found, inaccessible = find_daemons(self._directories)
        siblings = {path.resolve() for path in found} - {self._own.resolve()}
        unusable = dict.fromkeys(inaccessible, "this user may not read its directory")
        for path in sorted(siblings):
            try:
                owner = path.stat().st_uid
            except OSError:
                siblings.discard(path)
                continue
            if owner != os.geteuid():
                siblings.discard(path)
                unusable[path] = f"it runs as user {owner}, and this daemon as {os.geteuid()}"
        self._unusable = unusable
        self._loop.call_soon_threadsafe(self._update_links, siblings)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def note_pool(self, generations: Mapping[str, int], windows: Sequence[int]) -> None:
        """See UsageRequest."""
        self._tables.show_running()
        self._generations, self._windows = dict(generations), frozenset(windows)
        for link in tuple(self._links.values()):
            link.note_generation(generations.get(link.store))

    def lent_files(self) -> tuple[LentFiles, ...]:
        """The memory that siblings lend now."""
        pools = [(link.pool, link.directory) for link in tuple(self._links.values())]
        lent, left = list[LentFiles](), MAX_LENT_FILES
        for pool, directory in pools:
            files = None if pool is None else pool.files_of(directory)
            if files is not None and len(files.chunks) <= left:
                lent.append(files)
                left -= len(files.chunks)
        return tuple(lent)

    def siblings(self) -> tuple[SiblingStatus, ...]:
        links = tuple(self._links.values())
        directories = sorted({*self._unusable, *(link.directory for link in links)})
        return tuple(
            self._status(path, [link for link in links if link.directory == path])
            for path in directories
        )

    # Any thread

    def _holders(self, namespace: str, keys: Sequence[bytes]) -> list[SiblingLink | None]:
        """For each key a sibling that probably has it."""
        links = [link for link in tuple(self._links.values()) if link.store == namespace]
        holders: list[SiblingLink | None] = [None] * len(keys)
        hashes = hash_keys(namespace, keys) if links else np.empty(0, np.uint64)
        for link in links:
            if not link.is_usable:
                continue
            for place in np.flatnonzero(link.keys.contains(hashes)).tolist():
                holders[place] = holders[place] or link
        return holders

    def _copy(
        self, link: SiblingLink, blocks: Blocks, places: Sequence[int], until: float
    ) -> dict[int, int]:
        """Copy blocks from one sibling. Returns the checksums of those copied, by their places."""
        copied, pool = dict[int, int](), link.pool
        while places and pool is not None and (located := self._locate(link, blocks, places)):
            entries = zip(places, located.offsets, located.checksums, strict=True)
            later = list[int]()
            for place, offset, checksum in entries:
                if offset == UNCOMMITTED:
                    later.append(place)
                elif pool.copy_block(offset, blocks.nbytes, blocks.addresses[place]):
                    copied[place] = checksum
            places = later if time.monotonic() < until else ()
            if places:
                time.sleep(COMMIT_PAUSE)
        return copied

    def _locate(
        self, link: SiblingLink, blocks: Blocks, places: Sequence[int]
    ) -> BlocksLocated | None:
        keys = [blocks.keys[place] for place in places]
        try:
            located = link.locate(keys, PROMPT_SECONDS)
            return asyncio.run_coroutine_threadsafe(located, self._loop).result()
        except KVFerryError:
            return None

    def _count(self, directory: Path, **numbers: float) -> None:
        with self._counting:
            counts = self._counts.setdefault(directory, defaultdict(int))
            for name, number in numbers.items():
                counts[name] += number

    def _status(self, directory: Path, links: Sequence[SiblingLink]) -> SiblingStatus:
        states = [link.state for link in links] or [self._unusable.get(directory, "")]
        state = next((state for state in states if state != ON), ON)
        counts: Mapping[str, Any] = self._counts.get(directory, {})
        keys = sum(link.keys.count for link in links)
        return SiblingStatus(str(directory), state, keys, **counts)

    # The thread of the links

    async def _locate_all(
        self, keys: Sequence[bytes], wanted: Mapping[SiblingLink, Sequence[int]]
    ) -> Sequence[tuple[int, BlocksLocated] | BaseException]:
        """The windows and the places in them. wanted: by link, indices of keys."""
        asked = (_locate_in_window(link, [keys[at] for at in its]) for link, its in wanted.items())
        return await asyncio.gather(*asked, return_exceptions=True)

    def _update_links(self, siblings: set[Path]) -> None:
        wanted = {(path, store) for path in siblings for store in self._generations}
        for each in self._links.keys() - wanted:
            ended, task = self._links.pop(each), self._tasks.pop(each)
            task.add_done_callback(partial(self._free_table, ended.keys))
            task.cancel()
        for path, store in sorted(wanted - self._links.keys())[: len(self._free_tables)]:
            link = SiblingLink(path, store, self._free_tables.pop())
            link.note_generation(self._generations.get(store))
            self._links[path, store] = link
            self._tasks[path, store] = self._loop.create_task(link.run())

    def _free_table(self, table: KeyTable, _: asyncio.Task[None]) -> None:
        self._free_tables.append(table)

    async def _reset(self, namespace: str) -> None:
        links = [each for each in self._links.values() if without_part(each.store) == namespace]
        await asyncio.gather(*(link.reset() for link in links))


async def _locate_in_window(link: SiblingLink, keys: Sequence[bytes]) -> tuple[int, BlocksLocated]:
    window = link.window  # of this session: the request fails when that ends
    return window, await link.locate(keys, LOCATE_SECONDS)
