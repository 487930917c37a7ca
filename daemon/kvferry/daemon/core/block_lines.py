"""The columns of a block table that survive the daemon: a line for each host block of a region.

The lines are in a memfd (persistence/table_file.py), which the next daemon reads. Siblings read it
at any time. The daemon may be killed between any two stores. The order of writes keeps the lines
consistent:

    invalidate   before anything writes a block: an even version, then `committed` is cleared
    store        after the store: key, part and epoch are written, then an odd version
    commit       once the checksum is computed: it is written first, `committed` last
    validate     an earlier daemon's block matches its checksum: an odd version

The version is odd while a block has contents. Without contents it is even: v + 2 - (v & 1), with
contents v | 1. It is never toggled: after a kill, or for a block of another epoch, either is there.
So a version that a reader finds again after its copy belongs to the same bytes, if the reader takes
the version first, then key, part and epoch. A committed block always matches its checksum. A line
of another epoch than the table's counts as free, whatever else it has; so a reset writes no line.
The block table calls what changes contents. Event loop only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np

from kvferry.daemon.core.block_ids import largest
from kvferry.proto.keys import OffloadKey
from kvferry.proto.layout import Bools, Int64s

Lines: TypeAlias = np.ndarray[Any, np.dtype[np.void]]
Versions: TypeAlias = np.ndarray[Any, np.dtype[np.uint32]]
Checksums: TypeAlias = np.ndarray[Any, np.dtype[np.uint64]]
Stamps: TypeAlias = np.ndarray[Any, np.dtype[np.uint64]]
# Some sub-blocks of a host block: (from, to).
Part: TypeAlias = tuple[int, int]
NO_PARTS: Mapping[Any, Part] = MappingProxyType({})

# A larger stamp is damaged: no daemon counts so far.
MAX_STAMP = 1 << 62
_ONE, _TWO = np.uint32(1), np.uint32(2)


def line_type(key_bytes: int) -> np.dtype[np.void]:
    """The dtype of a line. key_bytes: of a key; 0: blocks have none.

    stamp: time of the last use (UseClock). part: stored sub-blocks (from, to); (0, 0): all.
    epoch: of its contents. version: odd while the block has contents.
    """
    fields = [
        ("stamp", "<u8"),
        ("checksum", "<u8"),
        ("epoch", "<u8"),
        ("part", "<u4", (2,)),
        ("version", "<u4"),
        ("committed", "?"),
        ("key", f"V{max(1, key_bytes)}"),
    ]
    return np.dtype(fields, align=True)


class UseClock:
    """Counts uses of blocks in all tables, so that their recency can be compared."""

    def __init__(self) -> None:
        self.now = 0

    def advance(self, uses: int) -> int:
        """Count some uses; return the stamp of the last one."""
        self.now += uses
        return self.now


class BlockLines:
    """Lines in ordinary memory, until persistence gives them other memory.

    memory: the lines that an earlier daemon wrote. Lines that were never used take no memory.
    """

    def __init__(self, num_blocks: int, key_bytes: int, memory: Lines | None = None) -> None:
        self._key_bytes = key_bytes
        self._clock = UseClock()
        # No line from here on was ever used. They must not be read: that would allocate pages.
        self._end = 0 if memory is None else num_blocks
        self.use_memory(np.zeros(num_blocks, line_type(key_bytes)) if memory is None else memory)

    def use_memory(self, lines: Lines) -> None:
        """Keep the lines in this memory, which is equal: no line was used."""
        self.memory, self._committed = lines, lines["committed"]
        self._versions, self._stamps = lines["version"], lines["stamp"]
        self._epochs = lines["epoch"]

    def leave_memory(self) -> None:
        """Release memory that persistence gave: the region was freed, but jobs may still end."""
        self.use_memory(np.zeros(self.memory.size, self.memory.dtype))

    def use_clock(self, clock: UseClock) -> int:
        """Count uses with this clock, which continues after all stamps of the lines. Returns the
        largest of them, the time of the last use."""
        self._clock = clock
        most = int(self._stamps[: self._end].max(initial=0))
        if most >= MAX_STAMP:
            order = np.argsort(self._stamps, kind="stable")
            self._stamps[order] = np.arange(most := order.size)
        clock.now = max(clock.now, most)
        return most

    def touch(self, blocks: Int64s) -> None:
        """Record a use of blocks; the first becomes the most recent."""
        self._end = max(self._end, largest(blocks) + 1)
        now = self._clock.advance(blocks.size)
        if blocks.size == 1:
            self._stamps[blocks] = now
        else:
            self._stamps[blocks] = now - np.arange(blocks.size)

    def invalidate(self, blocks: Int64s) -> None:
        """Blocks lose their contents."""
        self._make_even(blocks)
        self._committed[blocks] = False

    def store(
        self, blocks: Int64s, keys: Sequence[OffloadKey], parts: Mapping[int, Part], epoch: int
    ) -> None:
        """Blocks have contents, with these keys, if any. parts: of those that are not whole."""
        if keys and self._key_bytes:
            self.memory["key"][blocks] = np.frombuffer(b"".join(keys), self.memory.dtype["key"])
        self.memory["part"][blocks] = (0, 0)
        if parts:
            self.memory["part"][np.fromiter(parts, np.int64)] = list(parts.values())
        self._epochs[blocks] = epoch
        self.validate(blocks)

    def validate(self, blocks: Int64s) -> None:
        """Blocks have the contents that their lines state."""
        self._versions[blocks] |= _ONE

    def commit(self, blocks: Int64s, checksums: Checksums) -> None:
        self.memory["checksum"][blocks] = checksums
        self._committed[blocks] = True

    def parts(self, blocks: Int64s) -> Int64s:
        """The stored sub-blocks (from, to) of each block, (n, 2); (0, 0) if it is whole."""
        return self.memory["part"][blocks].astype(np.int64)

    def unchanged(self, blocks: Int64s, versions: Versions) -> Bools:
        """Which blocks have not lost their contents since they had these versions."""
        same: Bools = self._versions[blocks] == versions
        return same

    def restore(self, epoch: int) -> tuple[Int64s, tuple[OffloadKey, ...]]:
        """The blocks that an earlier daemon committed in this epoch, least recent first, and their
        keys. All versions are even from now on."""
        self._make_even(np.flatnonzero(self._versions & _ONE))
        blocks = self.committed(epoch)
        blocks = blocks[np.argsort(self._stamps[blocks], kind="stable")]
        return blocks, self.keys(blocks)

    def committed(self, epoch: int) -> Int64s:
        """The blocks with a commit in this epoch."""
        blocks = np.flatnonzero(self._committed)
        own: Int64s = blocks[self._epochs[blocks] == epoch]
        return own

    def stamps(self, blocks: Int64s) -> Stamps:
        """The time of the last use of each block; larger is more recent."""
        stamps: Stamps = self._stamps[blocks]
        return stamps

    def versions(self, blocks: Int64s) -> Versions:
        versions: Versions = self._versions[blocks]
        return versions

    def checksums(self, blocks: Int64s) -> Checksums:
        checksums: Checksums = self.memory["checksum"][blocks]
        return checksums

    def keys(self, blocks: Int64s) -> tuple[OffloadKey, ...]:
        """The keys of blocks with contents; empty if blocks of this region have no keys."""
        return tuple(self.memory["key"][blocks].tolist()) if self._key_bytes else ()

    def _make_even(self, blocks: Int64s) -> None:
        versions = self._versions[blocks]
        self._versions[blocks] = versions + _TWO - (versions & _ONE)
