"""BlockLayout's transfers, predicted by loops over groups, blocks, pages and bytes.

A TransfersModel is a layout with its memory: an arena for the device and a pool for the host. It
computes the addresses of every byte of a transfer, or its errors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from kvferry.daemon.core.layout import BlockLayout, Extent
from kvferry.proto.errors import Code
from kvferry.proto.layout import LayoutArrays
from kvferry.proto.specs import Direction, GPULoadStoreSpec, KVLayout, TensorLayout, TensorRef

GUARD = 16


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


def bases(model: TransfersModel) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(model.offsets, dtype=np.int64)
