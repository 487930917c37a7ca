"""The bytes of each KV cache group of a packed model, as vLLM plans it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvferry.client.vllm.engine_config import BlockSizes
from kvferry.client.vllm.fingerprint import read_fingerprint
from kvferry.client.vllm.packed_groups import ByteRun, PackedGroups, read_packed_groups
from support.vllm_stand_ins import prompt


@pytest.fixture(scope="module")
def model(core: Any) -> Any:
    from support import packed_model

    return packed_model


def test_groups_are_views_of_the_buffer() -> None:
    """The tensor of any layer tells where it is."""
    rows = torch.arange(96, dtype=torch.int8).view(3, 32)
    packed = PackedGroups(3, 32, ((ByteRun(0, 4), ByteRun(16, 8)), (ByteRun(0, 32),)))
    found = packed.canonical(rows.view(torch.float32)[:, 4:6], 2)
    for view, expected in zip(found.tensors, (rows[:, :4], rows[:, 16:24], rows), strict=True):
        assert torch.equal(view, expected)
    assert [len(refs) for refs in found.layout.groups] == [2, 1]


def test_only_the_bytes_of_a_group_are_stored(start: Any) -> None:
    from support.vllm_runner import COMPRESSOR_PAGE, PAGE

    engine = start("latent", "window", "compressor")
    for number in range(4):
        engine.run(prompt(number))
    engine.settle()
    (keys,) = engine.manager.ready_keys
    groups = [int.from_bytes(key[-4:], "big") for key in keys]
    assert set(groups) == {0, 1, 2}
    pages = PAGE, PAGE, COMPRESSOR_PAGE
    assert engine.counted("vllm:kv_offload_store_bytes") == sum(pages[n] for n in groups)


def test_the_scheduler_and_the_workers_read_the_same_fingerprint(core: Any, model: Any) -> None:
    """With any number of blocks. The scheduler knows the spec of one layer of each group."""
    from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config

    config = core.engine_config({"kvferry_salt": "test"})
    prints = []
    for blocks in (24, 48):
        caches = model.plan(config, model.layer_specs(model.SMALL), blocks)
        sizes = tuple(group.kv_cache_spec.block_size for group in caches.kv_cache_groups)
        for planned in (caches, generate_scheduler_kv_cache_config([caches])):
            prints.append(read_fingerprint(config, planned, BlockSizes(sizes, 4, 1)))
    assert len({one.name for one in prints}) == 1
    assert dict(prints[0].extra)["group bytes"] == ",".join(map(str, own_bytes(caches)))
    assert prints[0].host_block_bytes == max(own_bytes(caches))


def own_bytes(caches: Any) -> tuple[int, ...]:
    """Of one GPU block of each group."""
    return tuple(group.kv_cache_spec.page_size_bytes for group in caches.kv_cache_groups)


def test_a_host_block_of_deepseek_v4_has_the_bytes_of_its_group(core: Any, model: Any) -> None:
    caches = model.plan(core.engine_config({}), model.layer_specs(model.FLASH), 100)
    packed = read_packed_groups(caches, caches.kv_cache_groups, "BLHNC")
    assert packed is not None
    assert packed.group_bytes == own_bytes(caches)
    # Of 256 tokens vLLM stores one block of full attention, and of the others those that the
    # window at the end of these tokens needs.
    stored = own = 0
    for group, nbytes in zip(caches.kv_cache_groups, packed.group_bytes, strict=True):
        spec = core.compat.layer_specs(group.kv_cache_spec)[0]
        blocks = (getattr(spec, "sliding_window", None) or spec.block_size) // spec.block_size
        stored, own = stored + blocks, own + blocks * nbytes
    assert stored == 23
    if core.ONE_ALLOCATION:
        assert (own, stored * packed.row_bytes) == (16_470_144, 23_051_520)
