"""BlockLayout, compared with loops over groups, blocks, pages and bytes.

The model is in support/transfers_model.py. Some tests also copy real memory.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.daemon.core.layout import BlockLayout, Extent
from kvferry.proto.errors import Refused
from kvferry.proto.specs import Direction, GPULoadStoreSpec
from support.transfers_model import (
    GUARD,
    ModelTransfer,
    TransfersModel,
    bases,
    changed_transfers,
    faults_of,
    models,
    moved_bytes,
    pairs_of,
    valid_transfers,
)

PROFILE = settings(max_examples=150)

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def split_into_chunks(
    block_layout: BlockLayout, runs: tuple[Extent, ...], max_bytes: int, max_blocks: int
) -> list[Extent]:
    chunks = []
    while runs:
        chunk, runs = block_layout.split_chunk(runs, max_bytes, max_blocks)
        chunks.append(chunk)
    return chunks


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


@settings(PROFILE, max_examples=300)
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
