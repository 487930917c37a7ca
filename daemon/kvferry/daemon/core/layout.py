"""Block address maths: from the two sides of a TransferSpec to the bytes to copy.

A GPU block of a group consists of one page per reference of the group. In host memory these pages
are contiguous, and a host block is `block_size_factor` such GPU blocks in a row:

    host block h of a group with pages a, b and factor 3     | a0 b0 | a1 b1 | a2 b2 |
                                                             ^ region start + h * host_block_bytes

So a whole host block, or any range of sub-blocks in it, is contiguous. A request that starts at
logical block i uses its first host block from sub-block `i mod factor` on. No byte outside the
range is read or written.

Everything is array arithmetic over block ids: there is no loop over layers, and loops over blocks
only for FEW of them. Called by the core and by the copy engines, on any thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from kvferry.daemon.core.aliasing import sharers_of, slot_bases
from kvferry.daemon.core.block_ids import (
    as_int64s,
    check_range,
    check_unique,
    in_range,
    join_ids,
    largest,
)
from kvferry.daemon.core.group_refs import group_refs, number_of_section
from kvferry.proto.errors import Code, Refused
from kvferry.proto.layout import Bools as Bools  # used throughout the daemon
from kvferry.proto.layout import Int64s as Int64s
from kvferry.proto.layout import LayoutArrays
from kvferry.proto.memory import Location
from kvferry.proto.specs import (
    BlockIds,
    CPULoadStoreSpec,
    Direction,
    GPULoadStoreSpec,
    HostSpec,
    KeyLoadStoreSpec,
    LoadStoreSpec,
)

NO_BLOCKS = np.empty(0, dtype=np.int64)


class Extent(msgspec.Struct, frozen=True):
    """GPU blocks of one group or section, and the byte offset of each in the host pool."""

    # Or the number of a section (group_refs.py).
    group: int
    # (n,) block ids, in range.
    gpu_blocks: Int64s
    # (n,) byte offsets from the start of the pool.
    host_offsets: Int64s
    # If it was split off another extent: the index of its first block there.
    at: int = 0

    def slice_blocks(self, start: int, stop: int) -> Extent:
        blocks, offsets = self.gpu_blocks[start:stop], self.host_offsets[start:stop]
        return Extent(self.group, blocks, offsets, self.at + start)


class CopyBatch(msgspec.Struct, frozen=True):
    """Copies between contiguous ranges of GPU and host memory, in one direction.

    table: (3, n) int64 whose rows are contiguous: addresses on the GPU, addresses in host memory,
    sizes in bytes.
    """

    table: Int64s

    @classmethod
    def from_rows(cls, gpu: Int64s, host: Int64s, size: Int64s) -> CopyBatch:
        return cls(np.stack((gpu, host, size)))

    @property
    def count(self) -> int:
        return int(self.table.shape[1])

    @property
    def gpu(self) -> Int64s:
        gpu: Int64s = self.table[0]
        return gpu

    @property
    def host(self) -> Int64s:
        host: Int64s = self.table[1]
        return host

    @property
    def size(self) -> Int64s:
        size: Int64s = self.table[2]
        return size

    def rows(self) -> list[tuple[int, int, int]]:
        """(address on the GPU, in host memory, bytes) of each copy."""
        gpu, host, size = self.table.tolist()
        return list(zip(gpu, host, size, strict=True))


class ResolvedBlocks(msgspec.Struct, frozen=True):
    """A checked transfer: its extents, and the blocks that it touches, for the hazard tracker.

    sub_blocks, sizes: of host blocks named by number, for block_states.py. Sub-block j of host
    block h is h * factor + j; `sizes` numbers the GPU-block size of each host block's group.
    """

    extents: tuple[Extent, ...]
    gpu_slots: Int64s
    host_blocks: Int64s
    sub_blocks: Int64s = NO_BLOCKS
    sizes: Int64s = NO_BLOCKS


def split_spec(
    src: LoadStoreSpec, dst: LoadStoreSpec
) -> tuple[Direction, GPULoadStoreSpec, HostSpec]:
    """Direction, GPU side and host side of a TransferSpec. Raises Refused (BAD_SPEC)."""
    match src, dst:
        case GPULoadStoreSpec(), CPULoadStoreSpec() | KeyLoadStoreSpec():
            return Direction.STORE, src, dst
        case CPULoadStoreSpec() | KeyLoadStoreSpec(), GPULoadStoreSpec():
            return Direction.LOAD, dst, src
    given = f"{type(src).__name__} -> {type(dst).__name__}"
    message = f"a transfer {given} is neither a store nor a load; give one GPU and one host spec"
    raise Refused(Code.BAD_SPEC, message, given)


class GroupExtent(msgspec.Struct, frozen=True):
    """A group's part of a transfer: its GPU blocks, and their range of host blocks.

    skip: sub-blocks of the first host block before the first GPU block. begin, end: the range of
    the group in the transfer's list of host blocks.
    """

    group: int
    gpu_blocks: Int64s
    skip: int
    begin: int
    end: int


class BlockLayout:
    """Address arithmetic of one registration. Immutable.

    refs, group_bytes: of the groups, and of their sections (group_refs.py).
    """

    def __init__(
        self,
        layout_arrays: LayoutArrays,
        region_start: int,
        host_blocks: int,
        locations: Sequence[Location] | None = None,
        host_block_bytes: int | None = None,
    ) -> None:
        self.layout_arrays = layout_arrays
        self.region_start = region_start
        self.host_blocks = host_blocks
        self.factor = layout_arrays.block_size_factor
        self.packed = layout_arrays.packed
        self.host_block_bytes = host_block_bytes or layout_arrays.host_block_bytes
        self.refs = group_refs(layout_arrays)
        self.group_bytes = [refs.nbytes for refs in self.refs]
        self._host_block = np.array([self.host_block_bytes])  # faster than an int
        # Per group, the byte offsets in the pool of the sub-blocks of host block 0.
        self._sub_blocks = [
            np.arange(self.factor) * nbytes + region_start for nbytes in layout_arrays.group_bytes
        ]
        # Per group, its number of GPU blocks.
        self._blocks: list[int] = layout_arrays.blocks_of_groups(np.minimum).tolist()
        distinct = sorted(set(layout_arrays.group_bytes))
        self.sizes = len(distinct)
        self._size_of_group = [distinct.index(nbytes) for nbytes in layout_arrays.group_bytes]
        self._slot_base, self.gpu_slots = slot_bases(layout_arrays, locations)
        self._sharers = sharers_of(layout_arrays)

    def resolve(
        self, direction: Direction, gpu: GPULoadStoreSpec, host_ids: BlockIds
    ) -> ResolvedBlocks:
        """Check a transfer against this registration and resolve it. Raises Refused."""
        hosts = as_int64s(host_ids)
        group_extents = self.group_extents(direction, gpu, hosts.size)
        check_range(hosts, self.host_blocks, "host block")
        if direction is Direction.STORE:
            check_unique(hosts, self.host_blocks, "host block")
        placed = self._resolved(group_extents, hosts, None)
        sub_blocks, sizes = self._sub_blocks_of(group_extents, hosts), self._sizes_of(group_extents)
        return msgspec.structs.replace(placed, sub_blocks=sub_blocks, sizes=sizes)

    def group_extents(
        self, direction: Direction, gpu: GPULoadStoreSpec, hosts: int
    ) -> tuple[GroupExtent, ...]:
        """Check the GPU side, and that it takes `hosts` host blocks. Raises Refused."""
        sizes, indices = self._checked_sizes(gpu)
        gpu_ids = as_int64s(gpu.block_ids)
        group_extents: list[GroupExtent] = []
        taken = used = 0
        for group, (count, first) in enumerate(zip(sizes, indices, strict=True)):
            if not count:
                continue
            ids = gpu_ids[taken : taken + count]
            check_range(ids, self._blocks[group], "GPU block", group)
            taken += count
            skip = first % self.factor
            begin, used = used, used - (-(count + skip) // self.factor)
            group_extents.append(GroupExtent(group, ids, skip, begin, used))
        if used != hosts:
            raise Refused(
                Code.SIZE_MISMATCH,
                f"{hosts} host blocks were given, but the {gpu_ids.size} GPU blocks (group_sizes "
                f"{list(sizes)}, block_indices {list(indices)}, {self.factor} GPU blocks per host "
                f"block) take {used}; name {used} host blocks",
                hosts,
            )
        if direction is Direction.LOAD and gpu_ids.size > 1:
            self._check_written_once(group_extents)
        return tuple(group_extents)

    def resolve_extents(
        self, group_extents: tuple[GroupExtent, ...], hosts: Int64s
    ) -> ResolvedBlocks:
        """Resolve checked group extents. GPU blocks whose host block is -1 are left out."""
        kept = None if in_range(hosts, self.host_blocks) else hosts >= 0
        return self._resolved(group_extents, hosts, kept)

    def resolve_borrowed(
        self, group_extents: tuple[GroupExtent, ...], hosts: Int64s, offsets: Int64s
    ) -> ResolvedBlocks:
        """As resolve_extents, but host blocks of -1 are in another pool. offsets: of them, in
        order, from the start of the own pool."""
        away = hosts < 0
        starts = hosts * self._host_block
        starts[away] = offsets - self.region_start
        extents, slots = self._placed(group_extents, starts, None)
        return ResolvedBlocks(extents, slots, hosts[~away])

    def check_section(self, direction: Direction, section: int | None) -> None:
        """Raise Refused (BAD_SPEC) if a transfer cannot have this section."""
        if section is None:
            return
        sections = self.layout_arrays.sections
        if direction is Direction.STORE or section >= sections:
            message = (
                f"section {section} of a {direction}, but only loads have sections, and these KV "
                f"caches are registered with {sections}; leave it out, or register more"
            )
            raise Refused(Code.BAD_SPEC, message, section)

    def section_of(self, blocks: ResolvedBlocks, section: int) -> ResolvedBlocks:
        """The same transfer of one section only."""
        extents = []
        for extent in blocks.extents:
            number = number_of_section(self.layout_arrays, extent.group, section)
            offsets = extent.host_offsets + self.refs[number].start
            extents.append(Extent(number, extent.gpu_blocks, offsets))
        return msgspec.structs.replace(blocks, extents=tuple(extents))

    def end_parts(self, part: GroupExtent) -> tuple[tuple[int, int], tuple[int, int]]:
        """The sub-blocks (from, to) that it uses of its first and of its last host block."""
        end = part.skip + part.gpu_blocks.size
        first = (part.skip, min(self.factor, end))
        return first, first if part.end - part.begin == 1 else (0, (end - 1) % self.factor + 1)

    def count_bytes(self, extents: tuple[Extent, ...]) -> int:
        total = 0
        for extent in extents:  # often one, for which sum() takes twice as long
            total += extent.gpu_blocks.size * self.group_bytes[extent.group]
        return total

    def end_offset(self, extents: tuple[Extent, ...]) -> int:
        """The byte offset in the pool where the last of the extents ends."""
        ends = [largest(extent.host_offsets) + self.group_bytes[extent.group] for extent in extents]
        return max(ends, default=0)

    def blocks_within_chunks(self, chunk_bytes: int) -> bool:
        """Whether no host block spans two chunks of the pool, which have `chunk_bytes` each."""
        nbytes = self.host_block_bytes
        return chunk_bytes % nbytes == 0 == self.region_start % nbytes

    def split_chunk(
        self, extents: tuple[Extent, ...], max_bytes: int, max_blocks: int
    ) -> tuple[Extent, tuple[Extent, ...]]:
        """Split off a chunk: blocks of one group, at least one. Return it and the rest."""
        first, others = extents[0], extents[1:]
        blocks = max(1, min(max_blocks, max_bytes // self.group_bytes[first.group]))
        if first.gpu_blocks.size <= blocks:
            return first, others
        return first.slice_blocks(0, blocks), (
            first.slice_blocks(blocks, first.gpu_blocks.size),
            *others,
        )

    def copy_batch(self, extent: Extent, bases: Int64s, pool: int) -> CopyBatch:
        """One copy per page. bases: (tensors,) addresses. pool: address of the host pool.

        size: on the GPU; packed pages are smaller in host memory.
        """
        refs = self.refs[extent.group]
        table = np.empty((3, extent.gpu_blocks.size, refs.pages.size), dtype=np.int64)
        gpu, host, size = table
        np.multiply(extent.gpu_blocks[:, None], refs.strides, gpu)
        np.add(gpu, bases[refs.tensors], gpu)
        np.add(extent.host_offsets[:, None], refs.offsets + pool, host)
        size[:] = refs.pages
        return CopyBatch(table.reshape(3, -1))

    def _resolved(
        self, group_extents: tuple[GroupExtent, ...], hosts: Int64s, kept: Bools | None
    ) -> ResolvedBlocks:
        """Resolve group extents to pool offsets and GPU slots. kept: of the host blocks to use."""
        extents, slots = self._placed(group_extents, hosts * self._host_block, kept)
        return ResolvedBlocks(extents, slots, hosts if kept is None else hosts[kept])

    def _placed(
        self, group_extents: tuple[GroupExtent, ...], starts: Int64s, kept: Bools | None
    ) -> tuple[tuple[Extent, ...], Int64s]:
        """The extents, and their GPU slots. starts: of host blocks, in bytes in the region."""
        extents, slots = [], []
        for part in group_extents:
            extent = self._extent(part, starts, kept)
            if extent.gpu_blocks.size:
                base = self._slot_base[extent.group]
                extents.append(extent)
                slots.append(extent.gpu_blocks + base if base else extent.gpu_blocks)
        return tuple(extents), join_ids(slots)

    def _sub_blocks_of(self, group_extents: tuple[GroupExtent, ...], hosts: Int64s) -> Int64s:
        if self.factor == 1:
            return hosts
        every = (hosts * self.factor)[:, None] + np.arange(self.factor)
        parts = []
        for part in group_extents:
            used = slice(part.skip, part.skip + part.gpu_blocks.size)
            parts.append(every[part.begin : part.end].ravel()[used])
        return join_ids(parts)

    def _sizes_of(self, group_extents: tuple[GroupExtent, ...]) -> Int64s:
        if self.sizes == 1:
            return NO_BLOCKS
        return np.repeat(
            np.array([self._size_of_group[part.group] for part in group_extents], dtype=np.int64),
            np.array([part.end - part.begin for part in group_extents], dtype=np.int64),
        )

    def _check_written_once(self, group_extents: list[GroupExtent]) -> None:
        """Check that no GPU block is written twice, in a group or in groups that share a tensor."""
        blocks = {part.group: part.gpu_blocks for part in group_extents}
        for sharers in self._sharers:
            written = [blocks[group] for group in sharers if group in blocks]
            check_unique(join_ids(written), self.gpu_slots, "GPU block")

    def _extent(self, part: GroupExtent, starts: Int64s, kept: Bools | None) -> Extent:
        """The GPU blocks of one group whose host block is `kept`, and their pool offsets."""
        own = slice(part.begin, part.end)
        used = slice(part.skip, part.skip + part.gpu_blocks.size)
        starts = starts[own]
        if self.factor > 1:
            starts = starts[:, None]
        offsets = (starts + self._sub_blocks[part.group]).ravel()[used]
        if kept is None:
            return Extent(part.group, part.gpu_blocks, offsets)
        these = np.repeat(kept[own], self.factor)[used]
        return Extent(part.group, part.gpu_blocks[these], offsets[these])

    def _checked_sizes(self, gpu: GPULoadStoreSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
        groups = self.layout_arrays.num_groups
        sizes = (gpu.block_ids.size,) if gpu.group_sizes is None else gpu.group_sizes
        indices = (0,) * len(sizes) if gpu.block_indices is None else gpu.block_indices
        if len(sizes) != groups:
            raise Refused(
                Code.UNKNOWN_GROUP, _wrong_count("group_sizes", sizes, groups), list(sizes)
            )
        if len(indices) != groups:
            raise Refused(
                Code.UNKNOWN_GROUP, _wrong_count("block_indices", indices, groups), list(indices)
            )
        if sum(sizes) != gpu.block_ids.size:
            raise Refused(
                Code.SIZE_MISMATCH,
                f"sum(group_sizes) is {sum(sizes)}, but {gpu.block_ids.size} GPU block ids were "
                "given; make them equal",
                sum(sizes),
            )
        return sizes, indices


def _wrong_count(name: str, values: Sequence[int], groups: int) -> str:
    """Message for group_sizes or block_indices that do not match the registered groups."""
    return (
        f"{name} {list(values)} has {len(values)} entries, but {groups} groups are registered; "
        "give one entry per group"
    )
