"""A store and a load into other blocks copy the same bytes, and change no other byte.

`check_moved` compares all GPU memory. The worker's kernels first write the expected bytes into the
destination blocks, and a snapshot of all memory is taken. Then the kernels overwrite the
destination blocks. After the load the memory must equal the snapshot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from kvferry.client import (
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    LocalDaemon,
    OffloadClient,
    shared_empty,
)
from kvferry.proto.specs import MAX_BLOCK_IDS
from kvferry.testing.engine import GroupOptions, SmallEngine, StartSmallEngine

WRITTEN, OVERWRITTEN = 1, 2
SHAPES: dict[str, dict[str, Any]] = {
    "blocks first": {"form": "blocks_first"},
    "blocks first, HND": {"form": "blocks_first_hnd", "dtype": "float16"},
    "K and V split": {"form": "split", "dtype": "float32"},
    "K and V split, HND": {"form": "split_hnd"},
    "K and V separate": {"form": "separate"},
    "MLA": {"form": "mla", "groups": (GroupOptions(3, (4, 1, 72)),)},
    "cross-layer": {"form": "cross_layer", "groups": (GroupOptions(5),)},
    "interleaved layers": {"form": "interleaved", "groups": (GroupOptions(3),)},
    "hidden padding": {"form": "padded"},
    "declared padding": {"form": "tail", "dtype": "int8"},
    "kernel blocks": {"form": "blocks_first", "kernel_blocks": 2},
    "kernel blocks, split": {"form": "split_hnd", "kernel_blocks": 4},
    "kernel blocks, padded": {"form": "padded", "kernel_blocks": 2},
    "share_memory_": {"form": "split", "memory": "share_memory"},
    "odd page": {"form": "mla", "dtype": "uint8", "groups": (GroupOptions(3, (7, 1, 11)),)},
    "daemon-owned": {"daemon_owned": True},
    "daemon-owned, padded": {"daemon_owned": True, "row_padding": 96},
}
TWO_GROUPS = (GroupOptions(2, (4, 2, 8)), GroupOptions(3, (2, 1, 8)))


def check_moved(
    engine: SmallEngine,
    src: Sequence[Sequence[int]],
    host: Sequence[int],
    dst: Sequence[Sequence[int]],
    firsts: Sequence[int],
) -> None:
    """Store src[group] of every group to `host`, load it into dst[group], compare all memory."""
    worker, sizes = engine.worker, [len(ids) for ids in src]
    worker.scribble(7)
    for group, (origin, target) in enumerate(zip(src, dst, strict=True)):
        worker.write(origin, WRITTEN, group=group)
        worker.write(target, WRITTEN, group=group, like=origin)
    wanted = worker.snapshot()
    flat = [[i for ids in side for i in ids] for side in (src, dst)]
    value = worker.signal()
    jobs = [engine.store(flat[0], host, wait_for=value, sizes=sizes, firsts=firsts)]
    engine.finish(*jobs)
    for group, target in enumerate(dst):
        value = worker.write(target, OVERWRITTEN, group=group)
    jobs.append(engine.load(host, flat[1], wait_for=value, sizes=sizes, firsts=firsts))
    results = engine.finish(*jobs)
    nbytes = sum(
        n * sum(size for _, size in parts) for n, parts in zip(sizes, engine.parts, strict=True)
    )
    assert [(r.success, r.transfer_size, r.error) for r in results] == [(True, nbytes, None)] * 2
    assert [r.transfer_type for r in results] == [("GPU", "CPU"), ("CPU", "GPU")]
    assert all(r.transfer_time > 0 for r in results)
    for actual, expected in zip(worker.snapshot(), wanted, strict=True):
        assert np.array_equal(actual, expected)


def shuffled(*counts: int, total: int = 32) -> list[list[int]]:
    """Disjoint lists of ids in random order."""
    ids = np.random.default_rng(5).permutation(total).tolist()
    ends = np.cumsum(counts).tolist()
    return [ids[end - n : end] for n, end in zip(counts, ends, strict=True)]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_layout(start_engine: StartSmallEngine, daemon: LocalDaemon, shape: str) -> None:
    groups = (GroupOptions(2, (8, 2, 8)),)
    engine = start_engine(daemon, **{"groups": groups, **SHAPES[shape]}, block_size_factor=2)
    src, dst = shuffled(9, 9)
    check_moved(engine, [src], [5, 0, 3, 8, 1], [dst], [0])


@pytest.mark.parametrize(
    ("sizes", "firsts", "hosts"),
    [((6, 6), (0, 0), 4), ((5, 4), (2, 7), 5), ((0, 5), (0, 1), 2), ((7, 0), (3, 2), 3)],
)
def test_groups(
    start_engine: StartSmallEngine,
    daemon: LocalDaemon,
    sizes: tuple[int, int],
    firsts: tuple[int, int],
    hosts: int,
) -> None:
    engine = start_engine(daemon, groups=TWO_GROUPS, block_size_factor=3)
    a, b, c, d = shuffled(*sizes, *sizes)
    check_moved(engine, [a, b], shuffled(hosts)[0], [c, d], firsts)


def test_the_longest_list_of_blocks(kvferryd: LocalDaemon) -> None:
    """The most ids that a spec may have, for blocks of one byte."""
    tensor = shared_empty((MAX_BLOCK_IDS, 1), torch.uint8)
    content = torch.arange(MAX_BLOCK_IDS).remainder(251).to(torch.uint8)
    tensor[:, 0] = content
    ids = np.random.default_rng(1).permutation(MAX_BLOCK_IDS)
    src, dst = GPULoadStoreSpec(ids), CPULoadStoreSpec(np.arange(MAX_BLOCK_IDS))
    with OffloadClient(kvferryd.directory) as client:
        client.register_kv_caches(
            {"layer": tensor}, num_blocks=MAX_BLOCK_IDS, host_bytes=MAX_BLOCK_IDS
        )
        client.transfer_async(1, (src, dst))
        client.wait([1])
        tensor.zero_()
        client.transfer_async(2, (dst, src))
        client.wait([2])
        assert [result.success for result in client.get_finished()] == [True, True]
    assert torch.equal(tensor[:, 0], content)
