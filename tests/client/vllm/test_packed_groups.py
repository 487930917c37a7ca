"""The bytes of each KV cache group of a packed model, planned by vLLM, over a real daemon."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvferry.client.vllm.engine_config import BlockSizes
from kvferry.client.vllm.fingerprint import read_fingerprint
from kvferry.client.vllm.packed_groups import read_packed_groups
from kvferry.client.vllm.scheduler_side import KeysSpec
from kvferry.testing.plugin import StartKvferryd
from support.vllm_stand_ins import finished, wait_connected

BLOCKS = 24


@pytest.fixture(scope="module")
def model(core: Any) -> Any:
    from support import packed_model

    return packed_model


class PackedWorker:
    """The worker's connector with a small model. rows: the buffer. own: bytes of each group."""

    def __init__(self, core: Any, model: Any, directory: object) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

        from kvferry.client.vllm import KVFerryConnector

        config = core.engine_config({"kvferry_dirs": str(directory), "cpu_bytes_to_use": 64 << 20})
        self.caches = model.plan(config, model.layer_specs(model.SMALL), BLOCKS)
        self.rows, layers = model.allocate(self.caches)
        self.connector = KVFerryConnector(config, KVConnectorRole.WORKER, self.caches)
        # So the first layer is not at the start of a row.
        self.connector.register_kv_caches(dict(reversed(layers.items())))
        self.side: Any = self.connector.connector_worker.worker
        wait_connected(self.side.session.client)
        # Of each group, which bytes of a row its layers use.
        self.masks = [self._mask(group, layers) for group in self.caches.kv_cache_groups]

    def _mask(self, group: Any, layers: dict[str, torch.Tensor]) -> torch.Tensor:
        """Written through the layers' own tensors."""
        self.rows.zero_()
        for name in group.layer_names:
            layers[name].view(torch.uint8).fill_(1)
        used: torch.Tensor = self.rows[1] != 0
        return used

    def keys(self, group: int, count: int) -> list[bytes]:
        """Keys of vLLM: a hash and the group."""
        return [bytes([n]) * 32 + group.to_bytes(4, "big") for n in range(count)]

    def close(self) -> None:
        self.connector.shutdown()


@pytest.fixture
def worker(core: Any, model: Any, start_kvferryd: StartKvferryd) -> Iterator[PackedWorker]:
    opened = PackedWorker(core, model, start_kvferryd(pool_size="128MiB").directory)
    yield opened
    opened.close()


def blocks_of(ids: list[list[int]]) -> Any:
    """A GPULoadStoreSpec: the blocks of each group."""
    return SimpleNamespace(
        block_ids=np.concatenate([np.array(each, np.int64) for each in ids]),
        group_sizes=[len(each) for each in ids],
        block_indices=[0] * len(ids),
    )


def test_each_group_gets_its_own_bytes_back_and_no_others(worker: PackedWorker) -> None:
    """Two blocks of each group are stored, and loaded to other blocks in the other order."""
    generator = np.random.default_rng(0)
    noise = generator.integers(-128, 128, tuple(worker.rows.shape), np.int8)
    groups = len(worker.masks)
    sources = [[1 + 2 * group, 2 + 2 * group] for group in range(groups)]
    targets = [[BLOCKS - 1 - 2 * group, BLOCKS - 2 - 2 * group] for group in range(groups)]
    worker.rows.copy_(torch.from_numpy(noise))
    keys = [worker.keys(group, 2) for group in range(groups)]
    worker.side.submit_store(
        1, blocks_of(sources), KeysSpec(tuple(k for each in keys for k in each))
    )
    (stored,) = finished(worker.side, 1).values()
    assert stored.success
    packed = worker.side._config.packed
    assert stored.transfer_size == 2 * sum(packed.group_bytes)
    worker.rows.fill_(77)
    back = KeysSpec(tuple(k for each in keys for k in reversed(each)))
    worker.side.submit_load(2, back, blocks_of(targets))
    assert finished(worker.side, 1)[2].success
    for group, mask in enumerate(worker.masks):
        assert 0 < int(mask.sum()) <= packed.group_bytes[group] <= worker.rows.shape[1]
        end = max(run.end for run in packed.runs[group])
        for source, target in zip(sources[group], reversed(targets[group]), strict=True):
            loaded = worker.rows[target]
            assert torch.equal(loaded[mask], torch.from_numpy(noise)[source][mask])
            assert bool((loaded[end:] == 77).all())
    untouched = set(range(BLOCKS)) - {block for each in targets for block in each}
    assert bool((worker.rows[sorted(untouched)] == 77).all())


def test_the_scheduler_and_the_workers_read_the_same_fingerprint(core: Any, model: Any) -> None:
    """With any number of blocks. The scheduler knows the spec of one layer of each group."""
    from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config

    config = core.engine_config({"kvferry_salt": "test"})
    prints = []
    for blocks in (BLOCKS, 2 * BLOCKS):
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
