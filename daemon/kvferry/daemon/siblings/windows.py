"""The pools of siblings as the daemon uses them: mapped read-only, and registered with its device.

A window is the memory of one namespace at one sibling: chunks of its pool, and its block table. The
chunks follow each other in the address space of this process, at the same distance from the chunks
of the own pool as those have from each other; so an engine addresses a block there like one of its
own pool, by an offset from its start. A window stays mapped until the last load from it has ended:
the memory of a sibling that dies stays as long.

Nothing is held at the sibling, and nothing is asked: a search reads its key table, and a load
counts only if the block table says afterwards that no block has changed (lent_table.py).
"""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, TypeVar

import numpy as np
import structlog

from kvferry.daemon.core.siblings import NamespaceContents
from kvferry.daemon.memory.pool import HostPool, HostRegistrar
from kvferry.daemon.memory.shared_memory import ReadOnlyFiles
from kvferry.daemon.siblings.lent_table import LentTable, SoughtKeys
from kvferry.proto.errors import Code, Refused
from kvferry.proto.keys import OffloadKey
from kvferry.proto.layout import Bools, Int64s
from kvferry.proto.lending import MAX_USES, Uses
from kvferry.proto.sizes import format_size
from kvferry.shm.memfd import check_sealed

# Keys of one sibling and namespace whose uses it is not told yet; of more, the oldest are left out.
MAX_NOTED_USES = 4 * MAX_USES

log = structlog.get_logger()

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LentMemory:
    """The memory of a namespace at a sibling, to be mapped. Owns the descriptors.

    directory: of the sibling. region, chunk_bytes, start, first: see MemoryLent. chunks, table,
    page: descriptors. contents: of the own namespace.
    """

    directory: str
    contents: NamespaceContents
    region: int
    chunk_bytes: int
    start: int
    first: int
    chunks: Sequence[int]
    table: int
    page: int

    def close(self) -> None:
        for descriptor in (*self.chunks, self.table, self.page):
            os.close(descriptor)


@dataclass(eq=False, slots=True)
class _Window:
    """offset: the distance in bytes from the start of the own pool to byte 0 of the sibling's.
    holds: the number of blocks that loads in flight read. closed: nothing is found in it."""

    number: int
    directory: str
    namespace: str
    composition: int
    region: int
    start: int
    end: int
    offset: int
    memory: ReadOnlyFiles
    table: LentTable
    holds: int = 0
    closed: bool = False


class MappedWindows:
    """Satisfies Siblings, of the core. pool: the own one. store_all: whether the own pool stores
    also keys that siblings have. Event loop only, except where a method says otherwise."""

    is_enabled = True

    def __init__(self, engine: HostRegistrar, pool: HostPool, *, store_all: bool = False) -> None:
        self._engine, self._pool = engine, pool
        self.stores_once = not store_all
        # All windows, until they are unmapped; and those in use, by namespace and directory.
        self._windows: dict[int, _Window] = {}
        self._open: dict[str, dict[str, _Window]] = {}
        self._numbers = count(1)
        # Registrations run one after another, as the driver serializes them anyway.
        self._mapping, self._ending = asyncio.Lock(), threading.Event()
        self._unmapping = set[asyncio.Task[None]]()
        # Blocks that were loaded, and their bytes, by the sibling's directory.
        self.loaded, self.loaded_bytes = Counter[str](), Counter[str]()
        # By directory and namespace, the most recent last.
        self._uses: dict[str, dict[str, dict[OffloadKey, None]]] = {}
        # Called when uses are noted.
        self.uses_noted: Callable[[], None] = lambda: None

    # Windows

    @property
    def is_ready(self) -> bool:
        """Whether memory can be mapped: registering tens of GiB takes seconds, and the own pool is
        first."""
        return self._pool.ready_bytes == self._pool.nbytes

    def check_chunks(self, chunk_bytes: int) -> None:
        """Raise Refused if chunks of this size cannot be addressed like own ones."""
        if chunk_bytes != self._pool.chunk_bytes:
            its, own = format_size(chunk_bytes), format_size(self._pool.chunk_bytes)
            text = f"its pool.chunk is {its}, and here {own}"
            raise Refused(Code.BAD_CONFIG, f"{text}; make them equal", chunk_bytes)

    def has(self, directory: str, contents: NamespaceContents, region: int) -> bool:
        """Whether this region is mapped."""
        window = self._open.get(contents.namespace, {}).get(directory)
        return window is not None and (window.region, window.composition) == (
            region,
            contents.composition,
        )

    async def map(self, lent: LentMemory) -> None:
        """Map and register memory, and use it instead of what the sibling lent before.

        Takes the descriptors. Raises KVFerryError or OSError.
        """
        begun = time.monotonic()
        try:
            async with self._mapping:
                window = await self._map_whole(lent)
        finally:
            lent.close()
        log.info(
            "sibling mapped",
            sibling=lent.directory,
            namespace=window.namespace,
            bytes=window.memory.nbytes,
            seconds=round(time.monotonic() - begun, 3),
        )
        self.close(lent.directory, window.namespace)
        self._windows[window.number] = window
        self._open.setdefault(window.namespace, {})[window.directory] = window

    def close(self, directory: str, *namespaces: str) -> None:
        """Find nothing more in the windows of these namespaces at a sibling, and unmap them."""
        for namespace in namespaces:
            window = self._open.get(namespace, {}).pop(directory, None)
            if window is not None:
                window.closed = True
                self._unmap_if_unused(window)

    def namespaces_of(self, directory: str) -> list[str]:
        """The namespaces of which there are windows at a sibling."""
        return [name for name, windows in self._open.items() if directory in windows]

    def mapped_bytes(self, directory: str) -> int:
        every = self._windows.values()
        return sum(each.memory.nbytes for each in every if each.directory == directory)

    def stop_mapping(self) -> None:
        """The daemon ends: a registration in progress ends after the current chunk."""
        self._ending.set()

    async def wait_unmapped(self) -> None:
        """Wait until the windows that were closed are unmapped, if no load reads them."""
        if self._unmapping:
            await asyncio.wait(self._unmapping)

    def take_uses(self, directory: str) -> Iterator[Uses]:
        """The uses of a sibling's blocks since the last call."""
        for namespace, keys in self._uses.pop(directory, {}).items():
            names = tuple(keys)
            # The first key of a message ends up as the most recent one.
            for at in range(0, len(names), MAX_USES):
                yield Uses(namespace, names[at : at + MAX_USES][::-1])

    # Siblings

    def have(self, contents: NamespaceContents) -> bool:
        windows = self._open.get(contents.namespace, {}).values()
        return any(window.composition == contents.composition for window in windows)

    def find(self, contents: NamespaceContents, keys: Sequence[OffloadKey]) -> Int64s:
        rows = np.full((4, len(keys)), -1, np.int64)
        windows = self._open.get(contents.namespace)
        if not windows or not keys:
            return rows
        sought = SoughtKeys.of(keys)
        for window in windows.values():
            if window.composition == contents.composition:
                blocks, versions = window.table.find(sought, contents.epoch)
                these = np.flatnonzero((blocks >= 0) & (rows[0] < 0))
                if these.size:
                    self._add_rows(rows, these, window, contents, (blocks[these], versions[these]))
        return rows

    def unchanged(self, rows: Int64s) -> Bools:
        same = np.zeros(rows.shape[1], np.bool_)
        for number in np.unique(rows[0]).tolist():
            if (window := self._windows.get(number)) is not None:
                these = rows[0] == number
                same[these] = window.table.unchanged(rows[2, these], rows[3, these])
        return same

    def hold(self, rows: Int64s) -> None:
        for number, blocks in Counter(rows[0].tolist()).items():
            self._windows[number].holds += blocks

    def release(self, rows: Int64s, block_bytes: int) -> None:
        for number, blocks in Counter(rows[0].tolist()).items():
            window = self._windows[number]
            window.holds -= blocks
            if block_bytes:
                self.loaded[window.directory] += blocks
                self.loaded_bytes[window.directory] += blocks * block_bytes
            self._unmap_if_unused(window)

    def note_uses(
        self, contents: NamespaceContents, rows: Int64s, keys: Sequence[OffloadKey]
    ) -> None:
        used = dict[str, list[OffloadKey]]()
        for key, number in zip(keys, rows[0].tolist(), strict=True):
            if (window := self._windows.get(number)) is not None:
                used.setdefault(window.directory, []).append(key)
        for directory, its in used.items():
            noted = self._uses.setdefault(directory, {}).setdefault(contents.namespace, {})
            for key in reversed(its):
                noted.pop(key, None)
                noted[key] = None
            for key in list(islice(noted, max(0, len(noted) - MAX_NOTED_USES))):
                del noted[key]
        self.uses_noted()

    def _add_rows(
        self,
        rows: Int64s,
        these: Int64s,
        window: _Window,
        contents: NamespaceContents,
        found: tuple[Int64s, Int64s],
    ) -> None:
        """Add the rows of blocks in a window. these: their columns. found: blocks and versions."""
        (blocks, versions), nbytes = found, contents.block_bytes
        chunk_bytes = self._pool.chunk_bytes
        offsets = window.start + blocks * nbytes
        ends = offsets + nbytes
        fits = ends <= window.end
        # If no own block spans chunks, engines do not split the copies of any block.
        if not (chunk_bytes % nbytes or contents.start % nbytes):
            fits &= offsets // chunk_bytes == (ends - 1) // chunk_bytes
        numbers = np.full(these.size, window.number)
        columns = np.stack((numbers, offsets + window.offset, blocks, versions))
        rows[:, these[fits]] = columns[:, fits]

    # The end of windows

    def _unmap_if_unused(self, window: _Window) -> None:
        if window.closed and not window.holds and window.number in self._windows:
            del self._windows[window.number]
            task = asyncio.get_running_loop().create_task(self._finish(self._unmap, window))
            self._unmapping.add(task)
            task.add_done_callback(self._unmapping.discard)

    async def _map_whole(self, lent: LentMemory) -> _Window:
        """If this is cancelled, nothing stays mapped."""
        mapped = list[_Window]()
        try:
            await self._finish(lambda: mapped.append(self._map(lent)))
        except asyncio.CancelledError:
            for window in mapped:
                await self._finish(self._unmap, window)
            raise
        return mapped[0]

    async def _finish(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function in another thread. If this is cancelled, it ends only after the call."""
        call = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            await asyncio.wait([call])
            raise

    # Any thread

    def _map(self, lent: LentMemory) -> _Window:
        """Raises KVFerryError or OSError."""
        self.check_chunks(lent.chunk_bytes)
        _check_chunks(lent.chunks, lent.chunk_bytes)
        begin = lent.first * lent.chunk_bytes
        if not begin <= lent.start < begin + len(lent.chunks) * lent.chunk_bytes:
            text = f"the sibling's region begins at byte {lent.start}, outside of its chunks"
            raise Refused(Code.BAD_LAYOUT, text, lent.start)
        with ExitStack() as undo:
            table = LentTable(lent.table, lent.page, lent.contents.composition)
            undo.callback(table.unmap)
            memory = ReadOnlyFiles(lent.chunks, lent.chunk_bytes, self._pool.address)
            undo.callback(memory.close)
            for address, size in self._chunks_of(memory):
                if self._ending.is_set():
                    raise InterruptedError(errno.EINTR, "the daemon ends")
                self._engine.pin(address, size, writable=False)
                undo.callback(self._engine.unpin, address)
            undo.pop_all()
        return _Window(
            next(self._numbers),
            lent.directory,
            lent.contents.namespace,
            lent.contents.composition,
            lent.region,
            lent.start,
            begin + memory.nbytes,
            memory.address - self._pool.address - begin,
            memory,
            table,
        )

    def _unmap(self, window: _Window) -> None:
        for address, _ in self._chunks_of(window.memory):
            self._engine.unpin(address)
        window.memory.close()
        window.table.unmap()

    def _chunks_of(self, memory: ReadOnlyFiles) -> Iterator[tuple[int, int]]:
        """The address and the size of each chunk."""
        step = self._pool.chunk_bytes
        for start in range(0, memory.nbytes, step):
            yield memory.address + start, min(step, memory.nbytes - start)


def _check_chunks(chunks: Iterable[int], chunk_bytes: int) -> None:
    """Raise Refused if these are no chunks of a pool: only the last may be smaller."""
    sizes = [os.fstat(chunk).st_size for chunk in chunks]
    for chunk in chunks:
        check_sealed(chunk, "the sibling's pool memory")
    if not sizes or {*sizes[:-1]} - {chunk_bytes} or not 0 < sizes[-1] <= chunk_bytes:
        text = f"chunks of the sibling's pool have {sizes[:4]} bytes, not {chunk_bytes} each"
        raise Refused(Code.BAD_LAYOUT, text, chunk_bytes)
