"""A stand-in for a vLLM whose offloading workers get device pointers instead of block ids.

That is vLLM's pull request 56076 (https://github.com/vllm-project/vllm/pull/56076, open), whose
OffloadingConnectorWorker keeps the canonical KV caches, and resolves the block ids of each job
before it calls `submit_store` or `submit_load` of its worker. In the pull request:

    vllm/v1/kv_offload/base.py             DevicePointers
    vllm/v1/kv_offload/pointer_utils.py    the addresses and their order
    .../kv_connector/v1/offloading/worker.py    the calls

Here a wrapper around the connector's worker does that. Does not import vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest


@dataclass
class DevicePointers:
    """Addresses and bytes (uint64): of each group, for each tensor, for each block.

    group_block_counts, group_data_ref_counts: blocks and tensors of each group. block_indices: as
    in vLLM's GPULoadStoreSpec.
    """

    ptrs: Any
    sizes: Any
    group_block_counts: tuple[int, ...]
    group_data_ref_counts: tuple[int, ...]
    block_indices: tuple[int, ...]


def device_pointers(spec: Any, kv_caches: Any) -> DevicePointers:
    """Those of a GPULoadStoreSpec. kv_caches: vLLM's CanonicalKVCaches."""
    pointers: list[int] = []
    sizes: list[int] = []
    ids = iter(int(block) for block in spec.block_ids)
    for count, refs in zip(spec.group_sizes, kv_caches.group_data_refs, strict=True):
        blocks = [next(ids) for _ in range(count)]
        for ref in refs:
            tensor = kv_caches.tensors[ref.tensor_idx].tensor
            pointers += [tensor.data_ptr() + block * tensor.stride(0) for block in blocks]
            sizes += [ref.page_size_bytes] * count
    assert not [*ids]
    return DevicePointers(
        np.array(pointers, np.uint64),
        np.array(sizes, np.uint64),
        tuple(spec.group_sizes),
        tuple(len(refs) for refs in kv_caches.group_data_refs),
        tuple(spec.block_indices),
    )


class PointerWorker:
    """The connector's worker, whose stores and loads are given pointers."""

    def __init__(self, worker: Any, kv_caches: Any) -> None:
        self._worker, self._kv_caches = worker, kv_caches
        # Jobs of each direction.
        self.stores = self.loads = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> Any:
        self.stores += 1
        pointers = device_pointers(src_spec, self._kv_caches)
        return self._worker.submit_store(job_id, pointers, dst_spec)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> Any:
        self.loads += 1
        pointers = device_pointers(dst_spec, self._kv_caches)
        return self._worker.submit_load(job_id, src_spec, pointers)


def give_pointers(monkeypatch: pytest.MonkeyPatch, connector_worker: Any) -> None:
    """Give pointers to all workers. connector_worker: vLLM's OffloadingConnectorWorker."""

    def init_worker(self: Any, kv_caches: Any) -> None:
        self.worker = PointerWorker(self.spec.get_worker(kv_caches), kv_caches)

    monkeypatch.setattr(connector_worker, "_init_worker", init_worker)
