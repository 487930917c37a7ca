"""The part of a store that a rank writes. No vLLM needed."""

from __future__ import annotations

from hashlib import sha256
from itertools import groupby, product

import pytest

from kvferry.client.vllm.own_blocks import own_blocks
from kvferry.client.writers import writer_of
from kvferry.proto.keys import OffloadKey
from kvferry.proto.specs import GPULoadStoreSpec


def key_of(group: int, chunk: int) -> OffloadKey:
    return sha256(bytes([group, chunk])).digest()


def places(
    gpu: GPULoadStoreSpec, keys: tuple[OffloadKey, ...], factor: int
) -> dict[OffloadKey, list[tuple[int, int]]]:
    """The sub-blocks and GPU blocks of each key, in the order of semantics of transfers."""
    names, ids = iter(keys), iter(gpu.block_ids.tolist())
    found: dict[OffloadKey, list[tuple[int, int]]] = {}
    for size, index in zip(gpu.group_sizes or (), gpu.block_indices or (), strict=True):
        for _, blocks in groupby(
            range(index % factor, index % factor + size), lambda at: at // factor
        ):
            found[next(names)] = [(at % factor, next(ids)) for at in blocks]
    assert not [*names, *ids]
    return found


@pytest.mark.parametrize("factor", [1, 4])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_each_key_is_written_by_its_writer_with_the_same_blocks(factor: int, ranks: int) -> None:
    for first, sizes in product((0, 3, 9), [(0, 0), (1, 0), (17, 6), (0, 30)]):
        indices = (first, 5)
        keys = tuple(
            key_of(group, chunk)
            for group, (size, index) in enumerate(zip(sizes, indices, strict=True))
            for chunk in range(-(-(size + index % factor) // factor) if size else 0)
        )
        gpu = GPULoadStoreSpec([*range(100, 100 + sum(sizes))], sizes, indices)
        whole = places(gpu, keys, factor)
        together: dict[OffloadKey, list[tuple[int, int]]] = {}
        for rank in range(ranks):
            spec, own = own_blocks(gpu, keys, factor, rank, ranks)
            assert own == tuple(key for key in keys if writer_of(key, ranks) == rank)
            together |= places(spec, own, factor)
        assert together == whole
