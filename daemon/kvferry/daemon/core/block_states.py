"""Which sub-blocks of a region can be loaded by number.

A sub-block (one GPU block's place in a host block) is always in one of four states:

    undefined    not stored since the region has its owner, or its last store did not complete
    pending      a store of it was submitted and has not ended; the state is that store's serial
    loadable     its last store completed
    unverified   stored for an earlier daemon, and not compared with its checksum yet

    submit_store:  any -> pending          end_store:  pending -> loadable, or else undefined
    restore:       undefined -> unverified     verify: unverified -> loadable
    discard:       any but pending -> undefined

The block table has the state of the whole host block. If a store ends and leaves none of its
sub-blocks pending, the host block is stored, or it is dropped if the store failed. Stores end in
the order of submission, except for those that are cancelled while they wait. So no store writes a
host block that is stored.

Groups whose GPU blocks differ in size divide a host block differently. A host block belongs to the
size that was stored last; for the others it is undefined.
"""

from __future__ import annotations

import numpy as np

from kvferry.daemon.core.block_lines import Part
from kvferry.daemon.core.block_table import (
    OCCUPIED,
    PENDING,
    UNCHECKED,
    UNVERIFIED,
    UNVERIFIED_PART,
    WITH_CONTENTS,
    BlockTable,
)
from kvferry.daemon.core.layout import Bools, Int64s, ResolvedBlocks
from kvferry.proto.errors import Code, Refused
from kvferry.proto.layout import LayoutArrays

# Eight bytes of state for each, allocated by the kernel when first written.
MAX_SUB_BLOCKS = 1 << 28

_UNDEFINED, _LOADABLE, _UNVERIFIED = 0, -1, -2


class BlockStates:
    """The state of each sub-block of a region. Changes the block table of the region with it.

    factor: sub-blocks of a host block. sizes: how many different sizes sub-blocks have.

    Raises Refused (BAD_LAYOUT) if there are more sub-blocks than a region may have.
    """

    def __init__(self, table: BlockTable, factor: int, sizes: int = 1) -> None:
        num_blocks = table.num_blocks
        if num_blocks * factor > MAX_SUB_BLOCKS:
            raise Refused(
                Code.BAD_LAYOUT,
                f"{num_blocks} host blocks of {factor} GPU blocks are {num_blocks * factor} GPU "
                f"blocks, more than the {MAX_SUB_BLOCKS} of one region; request less host memory, "
                "or use larger pages",
                num_blocks * factor,
            )
        self._table, self._factor = table, factor
        self._states = np.zeros(num_blocks * factor, dtype=np.int64)
        self._by_block = self._states.reshape(num_blocks, factor)
        self._sizes = np.zeros(num_blocks, dtype=np.int16) if sizes > 1 else None

    @classmethod
    def for_layout(cls, layout: LayoutArrays, table: BlockTable) -> BlockStates:
        return cls(table, layout.block_size_factor, len(set(layout.group_bytes)))

    def submit_store(self, serial: int, blocks: ResolvedBlocks) -> None:
        """A store of these sub-blocks was submitted. Their old bytes are undefined from now on."""
        hosts = blocks.host_blocks
        if self._sizes is not None:
            changed = hosts[self._sizes[hosts] != blocks.sizes]
            self._by_block[changed] = _UNDEFINED
            self._sizes[hosts] = blocks.sizes
        if self._table.count(*UNCHECKED):
            # The checksum is of a whole host block, and is void once a part of it is stored.
            self._replace(hosts, (_UNVERIFIED,), _UNDEFINED)
        self._states[blocks.sub_blocks] = serial
        self._table.drop(hosts[self._table.among(hosts, *OCCUPIED)])
        self._table.set_pending(hosts)

    def end_store(self, serial: int, blocks: ResolvedBlocks, *, done: bool) -> None:
        """A store ended. Sub-blocks that a newer store was submitted for are not its own."""
        own = blocks.sub_blocks[self._states[blocks.sub_blocks] == serial]
        self._states[own] = _LOADABLE if done else _UNDEFINED
        hosts = blocks.host_blocks[self._table.among(blocks.host_blocks, PENDING)]
        ended = hosts[~(self._by_block[hosts] > 0).any(axis=1)]
        if done:
            self._table.set_stored(ended, parts=self._loadable_parts(ended))
        else:
            self._table.drop(ended)

    def required_stores(self, blocks: ResolvedBlocks) -> tuple[int, ...]:
        """The serials of stores that must complete before these sub-blocks can be loaded.

        Raises Refused (STALE) with the first host block that has an undefined or unverified one.
        """
        states = self._states[blocks.sub_blocks]
        if self._sizes is not None:
            hosts = blocks.host_blocks
            self._check(hosts, self._sizes[hosts] == blocks.sizes)
        if not np.count_nonzero(states != _LOADABLE):
            return ()
        if (states == _UNVERIFIED).any():
            first = int(blocks.sub_blocks[states == _UNVERIFIED][0]) // self._factor
            message = f"host block {first} is unverified since the daemon's restart; try later"
            raise Refused(Code.STALE, message, first)
        self._check(blocks.sub_blocks // self._factor, states != _UNDEFINED)
        return tuple(np.unique(states[states > 0]).tolist())

    def _loadable_parts(self, hosts: Int64s) -> dict[int, Part]:
        """Of host blocks that are loadable in part, the sub-blocks (from, to) that are.

        If they have gaps, the longest run counts. A block with no loadable sub-block has (0, 0).
        """
        if self._factor == 1:
            return {}
        loadable: Bools = self._by_block[hosts] == _LOADABLE
        partial = ~loadable.all(axis=1)
        return {
            int(block): _longest_run(row)
            for block, row in zip(hosts[partial], loadable[partial], strict=True)
        }

    def restore_blocks(self) -> None:
        """Blocks that an earlier daemon committed are unverified from now on.

        Raises ValueError if the block table is damaged.
        """
        if self._sizes is not None:
            # Which size was stored last is not recorded.
            lines = self._table.lines
            blocks, _ = lines.restore(self._table.epoch)
            lines.invalidate(blocks)
            return
        self._table.restore(self._factor)
        self._by_block[self._table.find(UNVERIFIED)] = _UNVERIFIED
        for block in self._table.find(UNVERIFIED_PART).tolist():
            first, end = self._table.part(block) or (0, 0)
            self._by_block[block, first:end] = _UNVERIFIED

    def mark_verified(self, hosts: Int64s) -> None:
        """These host blocks match their checksums. Those stored over meanwhile are not changed."""
        self._replace(hosts, (_UNVERIFIED,), _LOADABLE)
        self._table.set_verified(hosts)

    def discard_blocks(self, hosts: Int64s) -> None:
        """These host blocks lost their bytes."""
        self._replace(hosts, (_LOADABLE, _UNVERIFIED), _UNDEFINED)
        self._table.drop(hosts[self._table.among(hosts, *WITH_CONTENTS)])

    def _replace(self, hosts: Int64s, states: tuple[int, ...], state: int) -> None:
        """Give the sub-blocks in these states another one."""
        rows = self._by_block[hosts]
        rows[np.isin(rows, states)] = state
        self._by_block[hosts] = rows

    @staticmethod
    def _check(hosts: Int64s, loadable: Bools) -> None:
        if not loadable.all():
            missing = int(hosts[~loadable][0])
            message = f"host block {missing} has no completed store of this engine; store it first"
            raise Refused(Code.STALE, message, missing)


def _longest_run(loadable: Bools) -> tuple[int, int]:
    edges = np.flatnonzero(np.diff(np.concatenate(([0], loadable.view(np.int8), [0]))))
    if not edges.size:
        return 0, 0
    starts, ends = edges[::2], edges[1::2]
    longest = int(np.argmax(ends - starts))
    return int(starts[longest]), int(ends[longest])
