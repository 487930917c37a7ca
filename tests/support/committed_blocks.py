"""Block tables as persistence and the next daemon use them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from kvferry.daemon.core.block_lines import NO_PARTS, Lines, Part
from kvferry.daemon.core.block_table import OCCUPIED, UNCOMMITTED, BlockTable


class ResidentBlock(NamedTuple):
    """A committed block: its key, and its stored sub-blocks if not all were stored."""

    block: int
    key: bytes
    part: Part | None = None


def residents_of(lines: Lines | None, epoch: int = 0) -> tuple[ResidentBlock, ...]:
    """The committed blocks that the next daemon finds in this epoch, least recent first."""
    assert lines is not None
    found = np.flatnonzero(lines["committed"] & (lines["epoch"] == epoch))
    blocks = sorted(found.tolist(), key=lambda at: lines["stamp"][at])
    return tuple(
        ResidentBlock(block, line["key"].tobytes(), (first, end) if end else None)
        for block, line in ((block, lines[block]) for block in blocks)
        for first, end in [line["part"].tolist()]
    )


def commit_all(table: BlockTable) -> None:
    """Commit all stored blocks of a table, with checksums of 7 times their numbers."""
    blocks = table.find(*UNCOMMITTED)
    table.commit(blocks, table.lines.versions(blocks), (7 * blocks).astype(np.uint64))


def store_blocks(
    table: BlockTable,
    blocks: Sequence[int],
    keys: Sequence[bytes] = (),
    parts: Mapping[int, Part] = NO_PARTS,
) -> None:
    """Store blocks, by number, and commit them. The first becomes the most recent."""
    some = np.array(blocks, np.int64)
    table.drop(some[table.among(some, *OCCUPIED)])
    table.set_pending(some)
    table.set_stored(some, keys, parts)
    commit_all(table)


def next_table(table: BlockTable, key_bytes: int) -> BlockTable:
    """The table of the next daemon, in which nothing is restored yet."""
    after = BlockTable(table.num_blocks, key_bytes, table.lines.memory.copy())
    if table.epoch:
        after.begin_epoch(table.epoch)
    return after
