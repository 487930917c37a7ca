"""BlockLayout, compared with loops over groups, blocks, pages and bytes.

A model is a layout with its memory: an arena for the device and a pool for the host. It computes
the addresses of every byte of a transfer, or its errors. Some tests also copy real memory.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.daemon.core.layout import BlockLayout, Extent
from kvferry.proto.errors import Code, Refused
from kvferry.proto.layout import LayoutArrays
from kvferry.proto.specs import Direction, GPULoadStoreSpec, KVLayout, TensorLayout, TensorRef

PROFILE = settings(max_examples=250)
GUARD = 16

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True)
class TransfersModel:
    layout: KVLayout
    # Start of each tensor in the arena.
    offsets: tuple[int, ...]
    arena_bytes: int
    region_start: int
    host_blocks: int

    @property
    def block_layout(self) -> BlockLayout:
        return BlockLayout(
            LayoutArrays.from_layout(self.layout), self.region_start, self.host_blocks
        )

    @property
    def pool_bytes(self) -> int:
        return self.region_start + self.host_blocks * self.layout.host_block_bytes + GUARD

    def blocks_of(self, group: int) -> int:
        return min(self.layout.tensors[ref.tensor].num_blocks for ref in self.layout.groups[group])

    def share_memory(self, group: int, other: int) -> bool:
        tensors = [{ref.tensor for ref in self.layout.groups[g]} for g in (group, other)]
        return not tensors[0].isdisjoint(tensors[1])


@dataclass(frozen=True)
class ModelTransfer:
    direction: Direction
    gpu_ids: tuple[int, ...]
    sizes: tuple[int, ...]
    indices: tuple[int, ...]
    hosts: tuple[int, ...]

    @property
    def spec(self) -> GPULoadStoreSpec:
        return GPULoadStoreSpec(self.gpu_ids, self.sizes, self.indices)

    @property
    def host_ids(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.array(self.hosts, dtype=np.int64)


# The model


def moved_bytes(model: TransfersModel, transfer: ModelTransfer) -> list[tuple[int, int]]:
    """(offset in the arena, offset in the pool) of every byte of a valid transfer, in order."""
    layout, factor = model.layout, model.layout.block_size_factor
    block_bytes = [sum(ref.page_size_bytes for ref in group) for group in layout.groups]
    gpu_ids, hosts = list(transfer.gpu_ids), list(transfer.hosts)
    pairs = []
    for group, (size, index) in enumerate(zip(transfer.sizes, transfer.indices, strict=True)):
        skip, host = index % factor, 0
        for number in range(size):
            if number == 0 or (skip + number) % factor == 0:
                host = hosts.pop(0)
            at = model.region_start + host * factor * max(block_bytes)
            at += (skip + number) % factor * block_bytes[group]
            block = gpu_ids.pop(0)
            for ref in layout.groups[group]:
                stride = layout.tensors[ref.tensor].row_stride_bytes
                row = model.offsets[ref.tensor] + block * stride
                for byte in range(ref.page_size_bytes):
                    pairs.append((row + byte, at))
                    at += 1
    assert not gpu_ids
    assert not hosts
    return pairs


def faults_of(model: TransfersModel, transfer: ModelTransfer) -> set[Code]:
    """The error codes of a transfer. Empty if it is valid."""
    layout, factor = model.layout, model.layout.block_size_factor
    if not len(transfer.sizes) == len(transfer.indices) == len(layout.groups):
        return {Code.UNKNOWN_GROUP}
    faults = set()
    if any(not 0 <= host < model.host_blocks for host in transfer.hosts):
        faults.add(Code.BLOCK_OUT_OF_RANGE)
    if sum(transfer.sizes) != len(transfer.gpu_ids):
        return faults | {Code.SIZE_MISMATCH}
    needed, gpu_ids = 0, list(transfer.gpu_ids)
    named: list[tuple[int, int]] = []
    for group, (size, index) in enumerate(zip(transfer.sizes, transfer.indices, strict=True)):
        needed += -(-(size + index % factor) // factor) if size else 0
        named += [(group, gpu_ids.pop(0)) for _ in range(size)]
    if needed != len(transfer.hosts):
        faults.add(Code.SIZE_MISMATCH)
    if any(not 0 <= block < model.blocks_of(group) for group, block in named):
        faults.add(Code.BLOCK_OUT_OF_RANGE)
    if transfer.direction is Direction.STORE:
        duplicate = len(set(transfer.hosts)) != len(transfer.hosts)
    else:
        duplicate = any(
            block == other_block and model.share_memory(group, other)
            for n, (group, block) in enumerate(named)
            for other, other_block in named[:n]
        )
    return faults | {Code.DUPLICATE_BLOCK} if duplicate else faults


# Layouts and transfers


@st.composite
def models(draw: st.DrawFn) -> TransfersModel:
    """Tensors with interleaved and padded rows, and groups that share tensors or do not."""
    tensors: list[TensorLayout] = []
    offsets: list[int] = []
    end = GUARD
    for _ in range(draw(st.integers(1, 3))):
        pages = draw(st.lists(st.integers(1, 7), min_size=1, max_size=2))
        blocks, stride = draw(st.integers(1, 9)), sum(pages) + draw(st.integers(0, 3))
        for number, page in enumerate(pages):
            tensors.append(TensorLayout(blocks, page, stride))
            offsets.append(end + sum(pages[:number]))
        end += blocks * stride + draw(st.integers(0, 5))
    if draw(st.booleans()):  # every group shares the first tensor, as in hybrid models
        uses = [list(range(draw(st.integers(1, len(tensors))))) for _ in range(draw(_GROUPS))]
    else:  # every group has its own tensors
        cuts = sorted(draw(st.sets(st.integers(1, len(tensors)), max_size=2)) | {len(tensors)})
        order = draw(st.permutations(range(len(tensors))))
        uses = [order[a:b] for a, b in zip([0, *cuts[:-1]], cuts, strict=True)]
    groups = tuple(
        tuple(TensorRef(t, draw(st.integers(1, tensors[t].page_size_bytes))) for t in group)
        for group in uses
    )
    layout = KVLayout(tuple(tensors), groups, draw(st.integers(1, 8)))
    LayoutArrays.from_layout(layout)  # checks it
    start, blocks = draw(st.integers(GUARD, 40)), draw(st.integers(1, 20))
    return TransfersModel(layout, tuple(offsets), end + GUARD, start, blocks)


_GROUPS = st.integers(1, 3)


@st.composite
def valid_transfers(draw: st.DrawFn, model: TransfersModel) -> ModelTransfer:
    """Different host blocks, and different GPU blocks in groups that share memory."""
    factor, left = model.layout.block_size_factor, model.host_blocks
    used_blocks: list[tuple[int, int]] = []
    sizes, indices, needed = [], [], 0
    for group in range(len(model.layout.groups)):
        index = draw(st.integers(0, 3 * factor))
        free = [
            block
            for block in range(model.blocks_of(group))
            if not any(block == b and model.share_memory(group, g) for g, b in used_blocks)
        ]
        max_size = min(len(free), max(0, left * factor - index % factor))
        size = draw(st.integers(0, max_size))
        used = -(-(size + index % factor) // factor) if size else 0
        used_blocks += [(group, block) for block in draw(st.permutations(free))[:size]]
        sizes.append(size)
        indices.append(index)
        needed, left = needed + used, left - used
    hosts = draw(st.permutations(range(model.host_blocks)))[:needed]
    gpu_ids = tuple(block for _, block in used_blocks)
    direction = draw(st.sampled_from(Direction))
    return ModelTransfer(direction, gpu_ids, tuple(sizes), tuple(indices), tuple(hosts))


@st.composite
def changed_transfers(draw: st.DrawFn, model: TransfersModel) -> ModelTransfer:
    """A valid transfer with one to three changes. It may still be valid."""
    transfer = draw(valid_transfers(model))
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from(["gpu_ids", "sizes", "indices", "hosts"]))
        values = list(getattr(transfer, name))
        at = draw(st.integers(0, len(values)))
        low = -2 if name in ("gpu_ids", "hosts") else 0
        match draw(st.sampled_from(["put", "insert", "cut", "copy"])):
            case "put":
                values[at : at + 1] = [draw(st.integers(low, 21))]
            case "insert":
                values.insert(at, draw(st.integers(low, 21)))
            case "cut":
                del values[at : at + 1]
            case _:
                values[at:at] = values[:1]
        changed: dict[str, Any] = {name: tuple(values)}
        transfer = replace(transfer, **changed)
    return transfer


def pairs_of(model: TransfersModel, runs: tuple[Extent, ...]) -> list[tuple[int, int]]:
    """(offset in the arena, offset in the pool) of every byte of `runs`, in order."""
    parts = [model.block_layout.copy_batch(run, bases(model), 0) for run in runs]
    rows = [row for f in parts for row in zip(f.gpu, f.host, f.size, strict=True)]
    return [(int(gpu) + n, int(host) + n) for gpu, host, size in rows for n in range(int(size))]


def split_into_chunks(
    block_layout: BlockLayout, runs: tuple[Extent, ...], max_bytes: int, max_blocks: int
) -> list[Extent]:
    chunks = []
    while runs:
        chunk, runs = block_layout.split_chunk(runs, max_bytes, max_blocks)
        chunks.append(chunk)
    return chunks


def bases(model: TransfersModel) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(model.offsets, dtype=np.int64)


@settings(PROFILE)
@given(st.data())
def test_every_byte_of_a_transfer_has_the_addresses_of_the_model(data: st.DataObject) -> None:
    model = data.draw(models())
    transfer = data.draw(valid_transfers(model))
    block_layout, expected = model.block_layout, moved_bytes(model, transfer)
    resolved = block_layout.resolve(transfer.direction, transfer.spec, transfer.host_ids)
    assert block_layout.count_bytes(resolved.extents) == len(expected)
    assert block_layout.end_offset(resolved.extents) == max(
        (host + 1 for _, host in expected), default=0
    )
    assert block_layout.end_offset(resolved.extents) <= model.pool_bytes - GUARD
    assert sorted(resolved.host_blocks.tolist()) == sorted(transfer.hosts)
    assert pairs_of(model, resolved.extents) == expected


@settings(PROFILE)
@given(st.data())
def test_chunks_have_all_bytes_of_the_transfer_in_order(data: st.DataObject) -> None:
    model = data.draw(models())
    transfer = data.draw(valid_transfers(model))
    max_bytes, max_blocks = data.draw(st.integers(1, 200)), data.draw(st.integers(1, 9))
    block_layout = model.block_layout
    runs = block_layout.resolve(transfer.direction, transfer.spec, transfer.host_ids).extents
    chunks = split_into_chunks(block_layout, runs, max_bytes, max_blocks)
    assert pairs_of(model, tuple(chunks)) == moved_bytes(model, transfer)
    full = [max(1, min(max_blocks, max_bytes // group)) for group in block_layout.group_bytes]
    assert all(1 <= chunk.gpu_blocks.size <= full[chunk.group] for chunk in chunks)
    for chunk, following in pairwise(chunks):
        assert chunk.group != following.group or chunk.gpu_blocks.size == full[chunk.group]


@settings(PROFILE, max_examples=600)
@given(st.data())
def test_transfers_are_refused_exactly_if_the_model_refuses_them(data: st.DataObject) -> None:
    model = data.draw(models())
    transfer = data.draw(changed_transfers(model))
    faults = faults_of(model, transfer)
    try:
        model.block_layout.resolve(transfer.direction, transfer.spec, transfer.host_ids)
    except Refused as error:
        assert error.code in faults  # noqa: PT017
    else:
        assert not faults


@settings(PROFILE)
@given(st.data())
def test_blocks_that_share_memory_have_one_slot(data: st.DataObject) -> None:
    """Two (group, block) have the same slot if and only if their bytes on the device overlap."""
    model = data.draw(models())
    transfer = replace(data.draw(valid_transfers(model)), direction=Direction.STORE)
    named = [g for g, size in enumerate(transfer.sizes) for _ in range(size)]
    block_layout = model.block_layout
    slots = block_layout.resolve(
        Direction.STORE, transfer.spec, transfer.host_ids
    ).gpu_slots.tolist()
    assert all(0 <= slot < block_layout.gpu_slots for slot in slots)
    for group in range(len(model.layout.groups)):
        for block in range(model.blocks_of(group)):
            sizes = tuple(int(g == group) for g in range(len(model.layout.groups)))
            spec = GPULoadStoreSpec([block], sizes, (0,) * len(sizes))
            (slot,) = block_layout.resolve(Direction.LOAD, spec, np.array([0])).gpu_slots.tolist()
            for other, other_block, other_slot in zip(named, transfer.gpu_ids, slots, strict=True):
                shared = block == other_block and model.share_memory(group, other)
                assert (slot == other_slot) == shared


# Real memory


class ArenaMemory:
    """An arena and a pool with random bytes, and copies between them."""

    def __init__(self, model: TransfersModel) -> None:
        rng = np.random.default_rng(7)
        self.model = model
        self.arena: Bytes = rng.integers(0, 256, model.arena_bytes, dtype=np.uint8)
        self.pool: Bytes = rng.integers(0, 256, model.pool_bytes, dtype=np.uint8)

    def copy(self, direction: Direction, runs: tuple[Extent, ...]) -> None:
        for chunk in split_into_chunks(self.model.block_layout, runs, 64, 5):
            addresses = bases(self.model) + self.arena.ctypes.data
            fragments = self.model.block_layout.copy_batch(chunk, addresses, self.pool.ctypes.data)
            for gpu, host, size in zip(fragments.gpu, fragments.host, fragments.size, strict=True):
                to, origin = (host, gpu) if direction is Direction.STORE else (gpu, host)
                ctypes.memmove(int(to), int(origin), int(size))

    def transfer(self, transfer: ModelTransfer) -> None:
        block_layout = self.model.block_layout
        resolved = block_layout.resolve(transfer.direction, transfer.spec, transfer.host_ids)
        self.copy(transfer.direction, resolved.extents)


@settings(PROFILE)
@given(st.data())
def test_a_copy_changes_only_the_bytes_of_its_transfer(data: st.DataObject) -> None:
    model = data.draw(models())
    memory = ArenaMemory(model)
    arena, pool = memory.arena.copy(), memory.pool.copy()
    for _ in range(data.draw(st.integers(1, 3))):
        transfer = data.draw(valid_transfers(model))
        memory.transfer(transfer)
        for gpu, host in moved_bytes(model, transfer):
            if transfer.direction is Direction.STORE:
                pool[host] = arena[gpu]
            else:
                arena[gpu] = pool[host]
    assert np.array_equal(memory.arena, arena)
    assert np.array_equal(memory.pool, pool)


@settings(PROFILE)
@given(st.data())
def test_stored_blocks_load_into_other_blocks_unchanged(data: st.DataObject) -> None:
    model = data.draw(models())
    memory = ArenaMemory(model)
    store = replace(data.draw(valid_transfers(model)), direction=Direction.STORE)
    load = data.draw(loads_of(model, store))
    memory.transfer(store)
    before, origin = memory.arena.copy(), [gpu for gpu, _ in moved_bytes(model, store)]
    memory.transfer(load)
    target = [gpu for gpu, _ in moved_bytes(model, load)]
    assert np.array_equal(memory.arena[target], before[origin])
    rest = np.ones(memory.arena.size, dtype=bool)
    rest[target] = False
    assert np.array_equal(memory.arena[rest], before[rest])


@st.composite
def loads_of(draw: st.DrawFn, model: TransfersModel, store: ModelTransfer) -> ModelTransfer:
    """A load of the host blocks of `store`, into any valid GPU blocks."""
    gpu_ids: list[tuple[int, int]] = []
    for group, size in enumerate(store.sizes):
        free = [
            block
            for block in range(model.blocks_of(group))
            if not any(block == b and model.share_memory(group, g) for g, b in gpu_ids)
        ]
        if len(free) < size:  # too few are left: use the blocks of the store
            return replace(store, direction=Direction.LOAD)
        gpu_ids += [(group, block) for block in draw(st.permutations(free))[:size]]
    blocks = tuple(block for _, block in gpu_ids)
    return replace(store, direction=Direction.LOAD, gpu_ids=blocks)
