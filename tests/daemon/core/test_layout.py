"""Block address maths, by example. tests/property compares it with a model."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.daemon.core.block_ids import FEW
from kvferry.daemon.core.layout import BlockLayout, split_spec
from kvferry.proto.errors import Code, Refused
from kvferry.proto.layout import LayoutArrays
from kvferry.proto.memory import Location
from kvferry.proto.specs import (
    CPULoadStoreSpec,
    Direction,
    GPULoadStoreSpec,
    KVLayout,
    TensorLayout,
    TensorRef,
)

STORE, LOAD = Direction.STORE, Direction.LOAD
# Offset of the region in the pool.
START = 1000


def ids(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, dtype=np.int64)


def gpu(*blocks: int, sizes: tuple[int, ...], first: tuple[int, ...]) -> GPULoadStoreSpec:
    return GPULoadStoreSpec(blocks, sizes, first)


# Two tensors with padded rows. Group 0 has a page in both (10 and 6 bytes). Group 1 has a page of 5
# bytes in its own tensor. A host block has 3 GPU blocks of the wider group: 48 bytes.
TENSORS = (TensorLayout(8, 10, 16), TensorLayout(9, 8, 8), TensorLayout(4, 5, 7))
GROUPS = ((TensorRef(0, 10), TensorRef(1, 6)), (TensorRef(2, 5),))
LAYOUT = KVLayout(TENSORS, GROUPS, 3)


@pytest.fixture
def block_layout() -> BlockLayout:
    return BlockLayout(LayoutArrays.from_layout(LAYOUT), START, 20)


def test_the_pages_of_a_gpu_block_are_contiguous_in_the_host_block(
    block_layout: BlockLayout,
) -> None:
    spec = gpu(7, 2, 1, 3, sizes=(2, 2), first=(5, 1))
    resolved = block_layout.resolve(STORE, spec, ids(4, 11, 6))
    bases = ids(100_000, 200_000, 300_000)
    parts = [block_layout.copy_batch(run, bases, 1_000_000) for run in resolved.extents]
    got = [row for f in parts for row in zip(f.gpu, f.host, f.size, strict=True)]
    assert got == [row for f in parts for row in f.rows()]
    # Group 0 begins at logical block 5: sub-block 2 of host block 4, then sub-block 0 of 11.
    # Group 1 begins at logical block 1: sub-blocks 1 and 2 of host block 6, 5 bytes each.
    pool = 1_000_000 + START
    assert got == [
        (100_000 + 7 * 16, pool + 4 * 48 + 2 * 16, 10),
        (200_000 + 7 * 8, pool + 4 * 48 + 2 * 16 + 10, 6),
        (100_000 + 2 * 16, pool + 11 * 48, 10),
        (200_000 + 2 * 8, pool + 11 * 48 + 10, 6),
        (300_000 + 1 * 7, pool + 6 * 48 + 1 * 5, 5),
        (300_000 + 3 * 7, pool + 6 * 48 + 2 * 5, 5),
    ]
    assert block_layout.count_bytes(resolved.extents) == 2 * 16 + 2 * 5
    assert block_layout.end_offset(resolved.extents) == START + 11 * 48 + 16


def test_a_spec_without_sizes_is_one_group_from_its_start() -> None:
    layout = KVLayout(TENSORS[:1], ((TensorRef(0, 10),),), 2)
    plain, explicit = GPULoadStoreSpec([3, 1, 5]), gpu(3, 1, 5, sizes=(3,), first=(0,))
    runs = [
        BlockLayout(LayoutArrays.from_layout(layout), START, 9)
        .resolve(LOAD, spec, ids(8, 0))
        .extents[0]
        for spec in (plain, explicit)
    ]
    assert runs[0].gpu_blocks.tolist() == runs[1].gpu_blocks.tolist() == [3, 1, 5]
    offsets = [START + 8 * 20, START + 8 * 20 + 10, START]
    assert runs[0].host_offsets.tolist() == runs[1].host_offsets.tolist() == offsets


GOOD = gpu(0, 1, 2, 3, sizes=(3, 1), first=(2, 0))
GOOD_HOSTS = ids(0, 19, 5)


@pytest.mark.parametrize(
    ("direction", "spec", "hosts", "code", "value"),
    [
        (STORE, GOOD, ids(0, 20, 5), Code.BLOCK_OUT_OF_RANGE, "20"),
        (LOAD, GOOD, ids(0, -1, 5), Code.BLOCK_OUT_OF_RANGE, "-1"),
        # the shorter tensor of group 0 has 8 blocks
        (STORE, gpu(0, 8, 2, 3, sizes=(3, 1), first=(2, 0)), GOOD_HOSTS, "block_out_of_range", "8"),
        (STORE, GOOD, ids(0, 19), Code.SIZE_MISMATCH, "2"),
        (STORE, gpu(0, 1, 2, 3, sizes=(3, 2), first=(2, 0)), GOOD_HOSTS, "size_mismatch", "5"),
        (STORE, gpu(0, 1, 2, 3, sizes=(4,), first=(2,)), GOOD_HOSTS, Code.UNKNOWN_GROUP, "[4]"),
        (STORE, gpu(0, 1, 2, 3, sizes=(3, 1), first=(2,)), GOOD_HOSTS, "unknown_group", "[2]"),
        (STORE, GPULoadStoreSpec([1]), ids(0), Code.UNKNOWN_GROUP, "[1]"),
        (STORE, GOOD, ids(0, 5, 5), Code.DUPLICATE_BLOCK, "5"),
        (LOAD, gpu(0, 2, 2, 3, sizes=(3, 1), first=(2, 0)), GOOD_HOSTS, "duplicate_block", "2"),
    ],
)
def test_a_wrong_transfer_is_refused_with_code_and_value(
    block_layout: BlockLayout,
    direction: Direction,
    spec: GPULoadStoreSpec,
    hosts: np.ndarray[tuple[int], np.dtype[np.int64]],
    code: str,
    value: str,
) -> None:
    with pytest.raises(Refused) as caught:
        block_layout.resolve(direction, spec, hosts)
    assert (caught.value.code, caught.value.value) == (code, value)


def test_groups_that_share_no_tensor_may_load_the_same_block_id() -> None:
    """Group 1 shares a tensor with group 0 and another with group 2. Groups 0 and 2 share none."""
    groups = ((TensorRef(0, 10),), (TensorRef(0, 10), TensorRef(1, 8)), (TensorRef(1, 8),))
    block_layout = BlockLayout(LayoutArrays.from_layout(KVLayout(TENSORS[:2], groups)), 0, 9)
    resolved = block_layout.resolve(LOAD, gpu(3, 3, sizes=(1, 0, 1), first=(0,) * 3), ids(0, 1))
    assert block_layout.count_bytes(resolved.extents) == 18


@pytest.mark.parametrize("again", [None, 5])
def test_a_duplicate_among_very_many_block_ids_is_found(again: int | None) -> None:
    """Here a table of all blocks takes more memory than the ids."""
    layout = KVLayout((TensorLayout(1 << 27, 1, 1),), ((TensorRef(0, 1),),))
    block_layout, blocks = (
        BlockLayout(LayoutArrays.from_layout(layout), 0, 1000),
        np.arange(1000) << 17,
    )
    if again is not None:
        blocks[again + 600] = blocks[again]
        with pytest.raises(Refused) as refused:
            block_layout.resolve(LOAD, GPULoadStoreSpec(blocks), np.arange(1000))
        assert (refused.value.code, refused.value.value) == (Code.DUPLICATE_BLOCK, str(5 << 17))
    else:
        assert block_layout.resolve(LOAD, GPULoadStoreSpec(blocks), np.arange(1000)).extents


def test_directions_follow_from_the_kinds_of_the_sides() -> None:
    device, host = GPULoadStoreSpec([1]), CPULoadStoreSpec([2])
    assert split_spec(device, host)[:2] == (STORE, device)
    assert split_spec(host, device)[:2] == (LOAD, device)
    assert split_spec(device, host)[2] is split_spec(host, device)[2] is host


@pytest.mark.parametrize("spec", [GPULoadStoreSpec([1]), CPULoadStoreSpec([1])])
def test_two_sides_of_one_kind_are_refused(spec: GPULoadStoreSpec | CPULoadStoreSpec) -> None:
    with pytest.raises(Refused) as caught:
        split_spec(spec, spec)
    assert caught.value.code == Code.BAD_SPEC


def test_tensors_that_overlap_share_their_slots() -> None:
    """Attention and state share packed rows: a block of either group is the same memory."""
    layout = KVLayout(
        (TensorLayout(5, 20, 40), TensorLayout(5, 12, 40), TensorLayout(5, 8, 8)),
        ((TensorRef(0, 20),), (TensorRef(1, 12),), (TensorRef(2, 8),)),
    )
    places = [Location(0, 0), Location(0, 24), Location(0, 4096)]
    block_layout = BlockLayout(LayoutArrays.from_layout(layout), 0, 9, places)
    resolved = block_layout.resolve(
        LOAD, gpu(3, 3, 3, sizes=(1, 1, 1), first=(0,) * 3), ids(0, 1, 2)
    )
    attention, state, separate = resolved.gpu_slots.tolist()
    assert attention == state != separate
    other_allocation = BlockLayout(
        LayoutArrays.from_layout(layout), 0, 9, [Location(0, 0), Location(1, 24), Location(0, 4096)]
    )
    resolved = other_allocation.resolve(
        LOAD, gpu(3, 3, 3, sizes=(1, 1, 1), first=(0,) * 3), ids(0, 1, 2)
    )
    assert len(set(resolved.gpu_slots.tolist())) == 3


def test_tensors_inside_another_share_its_memory_and_the_next_tensor_does_not() -> None:
    """The order of the tensors has no effect, also if the first ends before the last begins."""
    outer, inner = TensorLayout(5, 20, 40), TensorLayout(5, 8, 8)
    layout = KVLayout((inner, outer, inner, inner), tuple((TensorRef(n, 8),) for n in range(4)))
    places = [Location(0, 100), Location(0, 0), Location(0, 0), Location(0, outer.span_bytes)]
    resolved = BlockLayout(LayoutArrays.from_layout(layout), 0, 9, places).resolve(
        LOAD, gpu(3, 3, 3, 3, sizes=(1,) * 4, first=(0,) * 4), ids(0, 1, 2, 3)
    )
    middle, around, front, after = resolved.gpu_slots.tolist()
    assert middle == around == front != after


@pytest.mark.parametrize("bad", [-1, 99, -(1 << 62), 1 << 62])
def test_each_of_many_ids_is_checked(bad: int) -> None:
    count = FEW + 2
    layout = KVLayout((TensorLayout(99, 8, 8),), ((TensorRef(0, 8),),))
    block_layout, good = BlockLayout(LayoutArrays.from_layout(layout), START, 99), np.arange(count)
    assert block_layout.resolve(STORE, GPULoadStoreSpec(good), good).gpu_slots.size == count
    changed = good.copy()
    changed[count // 2] = bad
    for blocks, hosts in ((changed, good), (good, changed)):
        for direction in Direction:
            with pytest.raises(Refused) as refused:
                block_layout.resolve(direction, GPULoadStoreSpec(blocks), hosts)
            error = refused.value
            assert (error.code, error.value) == (Code.BLOCK_OUT_OF_RANGE, str(bad))


@pytest.mark.parametrize(
    ("start", "chunk", "within"), [(96, 480, True), (96, 481, False), (100, 480, False)]
)
def test_whether_each_host_block_is_within_one_chunk(start: int, chunk: int, within: bool) -> None:
    """A host block has 48 bytes."""
    assert (
        BlockLayout(LayoutArrays.from_layout(LAYOUT), start, 20).blocks_within_chunks(chunk)
        is within
    )
