"""The pools of siblings as the daemon uses them: mapped read-only, and registered with its device.

The tier's process has the descriptors. A window is the memory of one namespace at one sibling. Its
chunks follow each other in the address space of this process, at the same distance from the chunks
of the own pool as those have from each other; so an engine addresses a block there like one of its
own pool, by an offset from its start. Blocks can be loaded from a window once it is registered. It
stays mapped until the last load from it has ended: the memory of a sibling that dies stays as long.

Nothing is held at the sibling. Before anything writes a block there, its version in the sibling's
block table grows, or, if a later daemon has the pool, the pool's incarnation changes. So a load for
which both are the same afterwards has read the right bytes.
"""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np
import structlog

from kvferry.daemon.core.layout import Bools, Int64s
from kvferry.daemon.memory.foreign_memory import WORD, ForeignColumn, ForeignMemory
from kvferry.daemon.memory.pool import HostPool, HostRegistrar
from kvferry.daemon.memory.shared_memory import PAGE, ReadOnlyFiles
from kvferry.daemon.tiers.messages import FileOf, LentFiles
from kvferry.proto.errors import Code, KVFerryError, Refused
from kvferry.proto.sizes import format_size
from kvferry.proto.status import SiblingStatus
from kvferry.shm.memfd import check_sealed

log = structlog.get_logger()

T = TypeVar("T")


class BlockTableFile(Protocol):
    """The block table of a sibling's namespace, as persistence/table_file.py reads it."""

    num_blocks: int

    def unchanged(self, blocks: Int64s, versions: Int64s) -> Bools:
        """Which blocks have not lost their contents since they had these versions."""

    def unmap(self) -> None:
        """Unmap it."""


@dataclass(eq=False, slots=True)
class _Window:
    """The memory of one namespace at one sibling.

    files: those that are mapped. incarnation: the word of the sibling's page. offset: the distance
    in bytes from the start of the own pool to byte 0 of the sibling's pool. holds: the number of
    blocks that loads in flight read.
    """

    files: LentFiles
    memory: ReadOnlyFiles
    table: BlockTableFile
    incarnation: ForeignColumn
    offset: int
    holds: int = 0

    @property
    def end(self) -> int:
        """Of the last mapped byte, in the sibling's pool."""
        first = self.files.start // self.files.chunk_bytes
        return first * self.files.chunk_bytes + self.memory.nbytes


class MappedWindows:
    """The windows that can be used. Satisfies LentMemory.

    pool: the own one. open_table: opens a block table, and closes its descriptor; raises Refused.
    Event loop only, except where a method says otherwise.
    """

    def __init__(
        self, engine: HostRegistrar, pool: HostPool, open_table: Callable[[int], BlockTableFile]
    ) -> None:
        self._engine, self._pool, self._open_table = engine, pool, open_table
        self._windows: dict[int, _Window] = {}
        # Windows from which nothing is loaded any longer, and those that cannot be used.
        self._closing: dict[int, _Window] = {}
        self._refused: set[int] = set()
        # Set when the daemon ends: a registration in progress ends after the current chunk.
        self._ending = threading.Event()
        # Blocks that were loaded directly, and their bytes, by the sibling's directory.
        self._loaded, self._loaded_bytes = Counter[str](), Counter[str]()

    @property
    def numbers(self) -> tuple[int, ...]:
        """The windows from which blocks can be loaded."""
        return tuple(self._windows)

    def count_in(self, sibling: SiblingStatus) -> SiblingStatus:
        """The status of a sibling, with the numbers of its windows."""
        name, every = sibling.directory, (*self._windows.values(), *self._closing.values())
        return msgspec.structs.replace(
            sibling,
            loaded=self._loaded[name],
            loaded_bytes=self._loaded_bytes[name],
            mapped_bytes=sum(each.memory.nbytes for each in every if each.files.directory == name),
        )

    async def update(self, lent: Sequence[LentFiles], pid: int) -> None:
        """Map and register what siblings lend, and unmap what they no longer lend.

        lent: of the tier's process `pid`. Registering tens of GiB takes seconds, so it begins when
        the own pool is registered.
        """
        numbers = {files.window for files in lent}
        for number in self._windows.keys() - numbers:
            self._closing[number] = self._windows.pop(number)
        self._refused &= numbers
        for number, window in list(self._closing.items()):
            if not window.holds:
                del self._closing[number]
                await self._finish(self._unmap, window)
        for files in lent if self._pool.ready_bytes == self._pool.nbytes else ():
            if files.window in self._windows or files.window in self._refused:
                continue
            try:
                self._windows[files.window] = await self._finish(self._map, files, pid)
            except (KVFerryError, OSError) as error:
                self._refused.add(files.window)
                log.warning(
                    "blocks of a sibling are copied to the own pool before they are loaded",
                    sibling=files.directory,
                    reason=str(error),
                )

    async def _finish(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function in another thread. If it is cancelled, it ends only after that call."""
        call = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            self._ending.set()
            await asyncio.wait([call])
            raise

    # LentMemory

    def resolve(self, places: Int64s, block_bytes: int, start: int) -> Int64s:
        rows = np.full((4, len(places)), -1, np.int64)
        # If no own block spans chunks, engines do not split the copies of any block.
        may_span = self._pool.chunk_bytes % block_bytes or start % block_bytes
        for number in np.unique(places[:, 0]).tolist():
            if (window := self._windows.get(number)) is None:
                continue
            these = np.flatnonzero(places[:, 0] == number)
            offsets, versions = places[these, 1], places[these, 2]
            files = window.files
            ends, blocks = offsets + block_bytes, (offsets - files.start) // block_bytes
            usable = (offsets >= files.start) & (ends <= window.end)
            usable &= blocks < window.table.num_blocks
            if not may_span:
                usable &= offsets // files.chunk_bytes == (ends - 1) // files.chunk_bytes
            windows = np.full(these.size, number)
            found = np.stack((windows, offsets + window.offset, blocks, versions))
            rows[:, these[usable]] = found[:, usable]
        return rows

    def unchanged(self, rows: Int64s) -> Bools:
        same = np.zeros(rows.shape[1], np.bool_)
        for number in np.unique(rows[0]).tolist():
            window, these = self._mapped(number), rows[0] == number
            if window is not None and window.incarnation.read() == window.files.incarnation:
                same[these] = window.table.unchanged(rows[2, these], rows[3, these])
        return same

    def hold(self, rows: Int64s) -> None:
        for number, count in Counter(rows[0].tolist()).items():
            window = self._mapped(number)
            assert window is not None, "a load of blocks that are not mapped"
            window.holds += count

    def release(self, rows: Int64s, block_bytes: int) -> None:
        for number, count in Counter(rows[0].tolist()).items():
            window = self._mapped(number)
            assert window is not None, "blocks were unmapped while a load read them"
            window.holds -= count
            if block_bytes:
                self._loaded[window.files.directory] += count
                self._loaded_bytes[window.files.directory] += count * block_bytes

    def _mapped(self, number: int) -> _Window | None:
        return self._windows.get(number) or self._closing.get(number)

    # Any thread

    def _map(self, files: LentFiles, pid: int) -> _Window:
        """Raises KVFerryError or OSError."""
        chunk_bytes = self._pool.chunk_bytes
        if files.chunk_bytes != chunk_bytes:
            its, own = format_size(files.chunk_bytes), format_size(chunk_bytes)
            text = f"its pool.chunk is {its}, and here {own}"
            raise Refused(Code.BAD_CONFIG, f"{text}; make them equal", files.chunk_bytes)
        with ExitStack() as opened, ExitStack() as undo:
            chunks = [_open_file(chunk, pid) for chunk in files.chunks]
            for chunk in chunks:
                opened.callback(os.close, chunk)
            memory = ReadOnlyFiles(chunks, chunk_bytes, self._pool.address)
            undo.callback(memory.close)
            for address, size in self._chunks_of(memory):
                if self._ending.is_set():
                    raise InterruptedError(errno.EINTR, "the daemon ends")
                self._engine.pin(address, size, writable=False)
                undo.callback(self._engine.unpin, address)
            page = _open_file(files.page, pid)
            opened.callback(os.close, page)
            incarnation = ForeignMemory(page, "the sibling's incarnation page", PAGE)
            table = self._open_table(_open_file(files.table, pid))
            undo.pop_all()
        begin = files.start // chunk_bytes * chunk_bytes
        offset = memory.address - self._pool.address - begin
        return _Window(files, memory, table, incarnation.column(WORD, 0, 1), offset)

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


def _open_file(file: FileOf, pid: int) -> int:
    """A descriptor of a file of the tier's process, to be read only. Raises Refused or OSError."""
    descriptor = os.open(f"/proc/{pid}/fd/{file.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_ino != file.inode:
            raise FileNotFoundError(errno.ENOENT, "the tier's process has closed it")
        check_sealed(descriptor, "the sibling's memory")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
