"""BlockLayout against semantics.md as plain loops over groups, blocks, pages and bytes.

A model is a layout with its memory: an arena that stands for the device, a pool for the host. The
model says which byte goes where, or what is wrong; real copies are done on real memory.
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
    offsets: tuple[int, ...]
    """Where each tensor begins in the arena."""
    arena_bytes: int
    region_start: int
    host_blocks: int

    @property
    def geometry(self) -> BlockLayout:
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


def moved(model: TransfersModel, transfer: ModelTransfer) -> list[tuple[int, int]]:
    """(byte of the arena, byte of the pool) for every byte that a good transfer moves, in order."""
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


def wrong(model: TransfersModel, transfer: ModelTransfer) -> set[Code]:
    """What is wrong with a transfer; empty where it is good."""
    layout, factor = model.layout, model.layout.block_size_factor
    if not len(transfer.sizes) == len(transfer.indices) == len(layout.groups):
        return {Code.UNKNOWN_GROUP}
    faults = set()
    if any(not 0 <= host < model.host_blocks for host in transfer.hosts):
        faults.add(Code.BLOCK_OUT_OF_RANGE)
    if sum(transfer.sizes) != len(transfer.gpu_ids):
        return faults | {Code.SIZE_MISMATCH}
    needed, rest = 0, list(transfer.gpu_ids)
    named: list[tuple[int, int]] = []
    for group, (size, index) in enumerate(zip(transfer.sizes, transfer.indices, strict=True)):
        needed += -(-(size + index % factor) // factor) if size else 0
        named += [(group, rest.pop(0)) for _ in range(size)]
    if needed != len(transfer.hosts):
        faults.add(Code.SIZE_MISMATCH)
    if any(not 0 <= block < model.blocks_of(group) for group, block in named):
        faults.add(Code.BLOCK_OUT_OF_RANGE)
    if transfer.direction is Direction.STORE:
        twice = len(set(transfer.hosts)) != len(transfer.hosts)
    else:
        twice = any(
            block == other_block and model.share_memory(group, other)
            for n, (group, block) in enumerate(named)
            for other, other_block in named[:n]
        )
    return faults | {Code.DUPLICATE_BLOCK} if twice else faults


# Worlds and transfers


@st.composite
def worlds(draw: st.DrawFn) -> TransfersModel:
    """Slabs of tensors whose rows are interleaved and padded; groups that share, or do not."""
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
    if draw(st.booleans()):  # every group shares the first tensor, as hybrid models do
        uses = [list(range(draw(st.integers(1, len(tensors))))) for _ in range(draw(_GROUPS))]
    else:  # every group has tensors of its own
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
def good_transfers(draw: st.DrawFn, model: TransfersModel) -> ModelTransfer:
    """Distinct blocks per family of groups that share memory, distinct host blocks."""
    factor, left = model.layout.block_size_factor, model.host_blocks
    taken: list[tuple[int, int]] = []
    sizes, indices, needed = [], [], 0
    for group in range(len(model.layout.groups)):
        index = draw(st.integers(0, 3 * factor))
        free = [
            block
            for block in range(model.blocks_of(group))
            if not any(block == b and model.share_memory(group, g) for g, b in taken)
        ]
        most = min(len(free), max(0, left * factor - index % factor))
        size = draw(st.integers(0, most))
        used = -(-(size + index % factor) // factor) if size else 0
        taken += [(group, block) for block in draw(st.permutations(free))[:size]]
        sizes.append(size)
        indices.append(index)
        needed, left = needed + used, left - used
    hosts = draw(st.permutations(range(model.host_blocks)))[:needed]
    gpu_ids = tuple(block for _, block in taken)
    direction = draw(st.sampled_from(Direction))
    return ModelTransfer(direction, gpu_ids, tuple(sizes), tuple(indices), tuple(hosts))


@st.composite
def spoiled_transfers(draw: st.DrawFn, model: TransfersModel) -> ModelTransfer:
    """A good transfer with one to three things changed, for the worse or not."""
    transfer = draw(good_transfers(model))
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
    """(byte of the arena, byte of the pool) of all fragments of `runs`, in order."""
    parts = [model.geometry.copy_batch(run, bases(model), 0) for run in runs]
    rows = [row for f in parts for row in zip(f.gpu, f.host, f.size, strict=True)]
    return [(int(gpu) + n, int(host) + n) for gpu, host, size in rows for n in range(int(size))]


def pieces_of(
    geometry: BlockLayout, runs: tuple[Extent, ...], max_bytes: int, max_blocks: int
) -> list[Extent]:
    pieces = []
    while runs:
        piece, runs = geometry.split_chunk(runs, max_bytes, max_blocks)
        pieces.append(piece)
    return pieces


def bases(model: TransfersModel) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(model.offsets, dtype=np.int64)


@settings(PROFILE)
@given(st.data())
def test_every_byte_of_a_transfer_is_where_the_model_has_it(data: st.DataObject) -> None:
    model = data.draw(worlds())
    transfer = data.draw(good_transfers(model))
    geometry, expected = model.geometry, moved(model, transfer)
    resolved = geometry.resolve(transfer.direction, transfer.spec, transfer.host_ids)
    assert geometry.count_bytes(resolved.extents) == len(expected)
    assert geometry.end_offset(resolved.extents) == max(
        (host + 1 for _, host in expected), default=0
    )
    assert geometry.end_offset(resolved.extents) <= model.pool_bytes - GUARD
    assert sorted(resolved.host_blocks.tolist()) == sorted(transfer.hosts)
    assert pairs_of(model, resolved.extents) == expected


@settings(PROFILE)
@given(st.data())
def test_pieces_are_the_transfer_cut_in_order(data: st.DataObject) -> None:
    model = data.draw(worlds())
    transfer = data.draw(good_transfers(model))
    max_bytes, max_blocks = data.draw(st.integers(1, 200)), data.draw(st.integers(1, 9))
    geometry = model.geometry
    runs = geometry.resolve(transfer.direction, transfer.spec, transfer.host_ids).extents
    pieces = pieces_of(geometry, runs, max_bytes, max_blocks)
    assert pairs_of(model, tuple(pieces)) == moved(model, transfer)
    full = [max(1, min(max_blocks, max_bytes // group)) for group in geometry.group_bytes]
    assert all(1 <= piece.gpu_blocks.size <= full[piece.group] for piece in pieces)
    for piece, following in pairwise(pieces):
        assert piece.group != following.group or piece.gpu_blocks.size == full[piece.group]


@settings(PROFILE, max_examples=600)
@given(st.data())
def test_transfers_are_refused_exactly_if_the_model_refuses_them(data: st.DataObject) -> None:
    model = data.draw(worlds())
    transfer = data.draw(spoiled_transfers(model))
    faults = wrong(model, transfer)
    try:
        model.geometry.resolve(transfer.direction, transfer.spec, transfer.host_ids)
    except Refused as error:
        assert error.code in faults  # noqa: PT017
    else:
        assert not faults


@settings(PROFILE)
@given(st.data())
def test_slots_tell_which_blocks_share_memory(data: st.DataObject) -> None:
    """Two (group, block) have one slot if, and only if, their bytes on the device overlap."""
    model = data.draw(worlds())
    transfer = replace(data.draw(good_transfers(model)), direction=Direction.STORE)
    named = [g for g, size in enumerate(transfer.sizes) for _ in range(size)]
    geometry = model.geometry
    slots = geometry.resolve(Direction.STORE, transfer.spec, transfer.host_ids).gpu_slots.tolist()
    assert all(0 <= slot < geometry.gpu_slots for slot in slots)
    for group in range(len(model.layout.groups)):
        for block in range(model.blocks_of(group)):
            sizes = tuple(int(g == group) for g in range(len(model.layout.groups)))
            one = GPULoadStoreSpec([block], sizes, (0,) * len(sizes))
            (slot,) = geometry.resolve(Direction.LOAD, one, np.array([0])).gpu_slots.tolist()
            for other, other_block, other_slot in zip(named, transfer.gpu_ids, slots, strict=True):
                shared = block == other_block and model.share_memory(group, other)
                assert (slot == other_slot) == shared


# Real memory


class ArenaMemory:
    """An arena and a pool full of noise, and the copying of fragments between them."""

    def __init__(self, model: TransfersModel) -> None:
        random = np.random.default_rng(7)
        self.model = model
        self.arena: Bytes = random.integers(0, 256, model.arena_bytes, dtype=np.uint8)
        self.pool: Bytes = random.integers(0, 256, model.pool_bytes, dtype=np.uint8)

    def copy(self, direction: Direction, runs: tuple[Extent, ...]) -> None:
        for piece in pieces_of(self.model.geometry, runs, 64, 5):
            where = bases(self.model) + self.arena.ctypes.data
            fragments = self.model.geometry.copy_batch(piece, where, self.pool.ctypes.data)
            for gpu, host, size in zip(fragments.gpu, fragments.host, fragments.size, strict=True):
                to, origin = (host, gpu) if direction is Direction.STORE else (gpu, host)
                ctypes.memmove(int(to), int(origin), int(size))

    def transfer(self, transfer: ModelTransfer) -> None:
        geometry = self.model.geometry
        resolved = geometry.resolve(transfer.direction, transfer.spec, transfer.host_ids)
        self.copy(transfer.direction, resolved.extents)


@settings(PROFILE)
@given(st.data())
def test_a_copy_changes_the_bytes_it_should_and_no_other(data: st.DataObject) -> None:
    model = data.draw(worlds())
    memory = ArenaMemory(model)
    arena, pool = memory.arena.copy(), memory.pool.copy()
    for _ in range(data.draw(st.integers(1, 3))):
        transfer = data.draw(good_transfers(model))
        memory.transfer(transfer)
        for gpu, host in moved(model, transfer):
            if transfer.direction is Direction.STORE:
                pool[host] = arena[gpu]
            else:
                arena[gpu] = pool[host]
    assert np.array_equal(memory.arena, arena)
    assert np.array_equal(memory.pool, pool)


@settings(PROFILE)
@given(st.data())
def test_stored_blocks_load_into_other_blocks_unchanged(data: st.DataObject) -> None:
    model = data.draw(worlds())
    memory = ArenaMemory(model)
    store = replace(data.draw(good_transfers(model)), direction=Direction.STORE)
    elsewhere = data.draw(others(model, store))
    memory.transfer(store)
    before, origin = memory.arena.copy(), [gpu for gpu, _ in moved(model, store)]
    memory.transfer(elsewhere)
    target = [gpu for gpu, _ in moved(model, elsewhere)]
    assert np.array_equal(memory.arena[target], before[origin])
    rest = np.ones(memory.arena.size, dtype=bool)
    rest[target] = False
    assert np.array_equal(memory.arena[rest], before[rest])


@st.composite
def others(draw: st.DrawFn, model: TransfersModel, store: ModelTransfer) -> ModelTransfer:
    """The load of what `store` stored, into any blocks that a transfer of its shape may name."""
    gpu_ids: list[tuple[int, int]] = []
    for group, size in enumerate(store.sizes):
        free = [
            block
            for block in range(model.blocks_of(group))
            if not any(block == b and model.share_memory(group, g) for g, b in gpu_ids)
        ]
        if len(free) < size:  # groups before took too many: the blocks of the store will do
            return replace(store, direction=Direction.LOAD)
        gpu_ids += [(group, block) for block in draw(st.permutations(free))[:size]]
    blocks = tuple(block for _, block in gpu_ids)
    return replace(store, direction=Direction.LOAD, gpu_ids=blocks)
