"""The worker's side: vLLM's OffloadingWorker, over a client of the daemon of this GPU.

Tensors are registered once a storage, before any graph is captured, with a timeline. A job's value
of it is written into the compute stream when the job is submitted: behind the kernels launched so
far, those that wrote what is stored, and those that may still read what is loaded over.

A job that the daemon cannot do any more ends as failed, here, at once.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_offload import base as vllm

from kvferry.client.blocking import OffloadClient
from kvferry.client.tensors.canonical import CanonicalKVCaches
from kvferry.client.timeline import Timeline
from kvferry.client.vllm.lasting import Lasting
from kvferry.client.vllm.place import (
    TIMEOUT,
    daemon_of,
    engine_name,
    namespace_options,
)
from kvferry.client.vllm.scheduler import KeysSpec
from kvferry.proto.errors import Gone, KVFerryError
from kvferry.proto.specs import (
    GPULoadStoreSpec,
    KeyLoadStoreSpec,
    KVLayout,
    TensorLayout,
    TensorRef,
    TransferSpec,
)
from kvferry.proto.status import Fingerprint

log = logging.getLogger("kvferry")

FLUSH = 10.0
"""Seconds that jobs have to end before their GPU blocks go to somebody else."""


class Worker(vllm.OffloadingWorker):
    """`config` is vLLM's OffloadingConfig, `kv_caches` its canonical tensors."""

    def __init__(self, config: Any, fingerprint: Fingerprint, kv_caches: Any) -> None:
        self._config, self._fingerprint = config, fingerprint
        self._kv_caches = canonical(kv_caches, config.cache.blocks_per_chunk)
        self._device = self._kv_caches.tensors[0].device
        self._timeline = Timeline.create(self._device)
        self._failed: list[int] = []
        self._lasting = Lasting("the worker's connection", self._register)
        self._client: OffloadClient | None = None
        """The one that has the jobs under way."""
        self._under_way: set[int] = set()

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: KeysSpec) -> bool:
        generation = dst_spec.generation(self._config.parallel.rank)
        keys = KeyLoadStoreSpec(dst_spec.keys, generation)
        return self._submit(job_id, (gpu_side(src_spec), keys))

    def submit_load(self, job_id: int, src_spec: KeysSpec, dst_spec: Any) -> bool:
        return self._submit(job_id, (KeyLoadStoreSpec(src_spec.keys), gpu_side(dst_spec)))

    def get_finished(self) -> list[Any]:
        """Also of jobs that failed, or were lost with their daemon: success is False then."""
        client = self._connected()
        results = [vllm.TransferResult(job_id, False) for job_id in self._failed]
        self._failed.clear()
        for result in () if client is None else client.get_finished():
            if result.error is not None:
                log.info("kvferry: job %d: %s", result.job_id, result.error)
            self._under_way.discard(result.job_id)
            results.append(
                vllm.TransferResult(
                    result.job_id, result.success, result.transfer_size, result.transfer_time
                )
            )
        return results

    def wait(self, job_ids: Collection[int]) -> None:
        """Return when these jobs can touch their GPU blocks no more; bounded."""
        client = self._connected()
        if client is None:
            return
        try:
            client.wait(job_ids, timeout=FLUSH)
        except Gone as error:
            log.warning("kvferry: jobs do not end, giving the connection up: %s", error)
            self._lasting.give_up()  # the daemon ends what is under way; here it is lost

    def shutdown(self) -> None:
        self._lasting.close()
        self._timeline.close()

    def _submit(self, job_id: int, spec: TransferSpec) -> bool:
        client = self._connected()
        if client is None:
            self._failed.append(job_id)
            return True
        try:
            stream = torch.cuda.current_stream(self._device)
            client.transfer_async(job_id, spec, wait_for=self._timeline.signal(stream))
        except KVFerryError as error:
            log.info("kvferry: job %d: %s", job_id, error)
            self._failed.append(job_id)
        else:
            self._under_way.add(job_id)
        return True

    def _connected(self) -> OffloadClient | None:
        """The client there is. Jobs of one that went before it told of them have failed."""
        client = self._lasting.current
        if client is not self._client:
            self._failed += self._under_way
            self._under_way.clear()
            self._client = client
        return client

    def _register(self) -> OffloadClient:
        config = self._config
        rank = config.parallel.rank
        torch.cuda.set_device(self._device)
        client = OffloadClient(
            daemon_of(rank, config.extra_config),
            engine=engine_name(config),
            client=f"vLLM worker {rank}",
            timeout=TIMEOUT,
        )
        try:
            client.open_namespace(self._fingerprint, mirror=False, **namespace_options(config))
            client.register_kv_caches(self._kv_caches, timeline=self._timeline)
        except BaseException:
            client.close()
            raise
        return client


def canonical(kv_caches: Any, factor: int) -> CanonicalKVCaches:
    """vLLM's canonical tensors in our words; the bytes are where they were."""
    tensors = tuple(one.tensor for one in kv_caches.tensors)
    layouts = tuple(
        TensorLayout(tensor.shape[0], one.page_size_bytes, tensor.stride(0) * tensor.element_size())
        for one, tensor in zip(kv_caches.tensors, tensors, strict=True)
    )
    groups = tuple(
        tuple(TensorRef(ref.tensor_idx, ref.page_size_bytes) for ref in refs)
        for refs in kv_caches.group_data_refs
    )
    return CanonicalKVCaches(KVLayout(layouts, groups, factor), tensors)


def gpu_side(spec: Any) -> GPULoadStoreSpec:
    sizes, indices = tuple(spec.group_sizes), tuple(spec.block_indices)
    return GPULoadStoreSpec(np.asarray(spec.block_ids), sizes, indices)
