"""The worker's side: the jobs of vLLM's OffloadingWorker, over the session of this rank.

Like the scheduler's side, this does not import vLLM, and no method raises.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from typing import Any

import numpy as np

from kvferry.client.engines.connecting import CONNECT_TIMEOUT
from kvferry.client.engines.rank_session import WAIT_TIMEOUT, RankIdentity, RankSession
from kvferry.client.jobs import TransferResult
from kvferry.client.tensors.canonical import CanonicalKVCaches
from kvferry.client.vllm.device_pointers import DevicePointerReader
from kvferry.client.vllm.engine_config import EngineConfig
from kvferry.client.vllm.load_eta import LoadEta
from kvferry.client.vllm.own_blocks import own_blocks
from kvferry.client.vllm.scheduler_side import KeysSpec
from kvferry.client.vllm.vllm_log import vllm_log
from kvferry.proto.errors import KVFerryError
from kvferry.proto.results import Outcome
from kvferry.proto.sizes import format_size
from kvferry.proto.specs import (
    Direction,
    GPULoadStoreSpec,
    KeyLoadStoreSpec,
    KVLayout,
    TensorLayout,
    TensorRef,
)

log = logging.getLogger("kvferry")

# Seconds between two polls for a load that is about to complete.
POLL_INTERVAL = 20e-6


class WorkerSide:
    """The connector in a vLLM worker: submits transfers and reports those that ended.

    kv_caches: vLLM's CanonicalKVCaches, or kvferry's. Other arguments: as RankSession.
    """

    def __init__(
        self,
        config: EngineConfig,
        kv_caches: Any,
        *,
        wait_timeout: float = WAIT_TIMEOUT,
        connect_timeout: float = CONNECT_TIMEOUT,
    ) -> None:
        self._config = config
        if not isinstance(kv_caches, CanonicalKVCaches):
            kv_caches = canonical_kv_caches(kv_caches, config.factor, config.packs)
        self._load_eta = LoadEta()
        self._has_loaded = False
        self._pointers = DevicePointerReader(kv_caches)
        self._has_refused = False
        self.session = RankSession(
            RankIdentity(
                "the worker",
                config.engine,
                f"vLLM worker {config.rank}",
                config.fingerprint,
                config.options,
                config.find_daemon,
                log=vllm_log,
            ),
            kv_caches,
            wait_timeout=wait_timeout,
            connect_timeout=connect_timeout,
        )

    def store(self, job_id: int, blocks: Any, keys: KeysSpec) -> None:
        """blocks: vLLM's GPULoadStoreSpec or DevicePointers."""
        gpu = self._gpu_spec(job_id, blocks, Direction.STORE)
        if gpu is None:
            return
        names, rank = keys.keys, self._config.rank
        if keys.writers > 1:
            gpu, names = own_blocks(gpu, names, self._config.factor, rank, keys.writers)
        if not names:
            kind = Direction.STORE.transfer_type
            done = TransferResult(job_id, True, 0, 0.0, kind, Outcome.DONE)
            self.session.note_result(done)
            return
        host = KeyLoadStoreSpec(names, keys.epoch(rank), keys.keep)
        self.session.submit(job_id, (gpu, host), Direction.STORE)

    def load(self, job_id: int, keys: KeysSpec, blocks: Any) -> None:
        """blocks: as `store`."""
        gpu = self._gpu_spec(job_id, blocks, Direction.LOAD)
        if gpu is None:
            return
        self.session.submit(job_id, (KeyLoadStoreSpec(keys.keys), gpu), Direction.LOAD)
        self._load_eta.load_submitted(job_id, self._nbytes(gpu), time.monotonic())

    def get_finished(self) -> list[TransferResult]:
        """Results of completed jobs. success is False for failed and lost jobs."""
        results = self.session.get_finished()
        now = time.monotonic()
        for result in results:
            self._load_eta.job_completed(
                result.job_id, result.transfer_size, result.transfer_time, now
            )
            if not self._has_loaded:
                self._log_first_load(result)
        return results

    def wait_next_load(self) -> None:
        """In a step without a forward pass: if a load is about to complete, wait for it."""
        now = time.monotonic()
        deadline = now + self._load_eta.wait_seconds(now)
        while time.monotonic() < deadline and not self.session.poll():
            time.sleep(POLL_INTERVAL)

    def wait(self, job_ids: Collection[int]) -> None:
        """Return when these jobs no longer access their GPU blocks."""
        self.session.wait(job_ids)

    def shutdown(self) -> None:
        self.session.shutdown()

    def _log_first_load(self, result: TransferResult) -> None:
        """Ranks load the same chunks: the first one logs it."""
        if not result.success or result.transfer_type != Direction.LOAD.transfer_type:
            return
        self._has_loaded = True
        if self._config.rank == 0:
            size, ms = format_size(result.transfer_size), 1000 * result.transfer_time
            vllm_log.info("kvferry: first load from host memory: %s in %.2f ms", size, ms)

    def _gpu_spec(self, job_id: int, blocks: Any, direction: Direction) -> GPULoadStoreSpec | None:
        """None if these are no blocks of the registered tensors: the job has failed then."""
        if (ids := getattr(blocks, "block_ids", None)) is not None:
            sizes, indices = tuple(blocks.group_sizes), tuple(blocks.block_indices)
            return GPULoadStoreSpec(np.asarray(ids), sizes, indices)
        try:
            return self._pointers.gpu_spec(blocks)
        except KVFerryError as error:
            if not self._has_refused:
                self._has_refused = True
                log.warning("kvferry: transfers of this vLLM fail: %s", error)
            self.session.note_failure(job_id, direction, error)
            return None

    def _nbytes(self, blocks: GPULoadStoreSpec) -> int:
        layout = self.session.kv_caches.layout
        sizes = blocks.group_sizes or (len(blocks.block_ids),)
        return sum(size * layout.group_bytes(group) for group, size in enumerate(sizes))


def canonical_kv_caches(kv_caches: Any, factor: int, packed: bool) -> CanonicalKVCaches:
    """Convert vLLM's CanonicalKVCaches to kvferry's; no bytes are copied."""
    tensors = tuple(canonical.tensor for canonical in kv_caches.tensors)
    layouts = tuple(
        TensorLayout(tensor.shape[0], one.page_size_bytes, tensor.stride(0) * tensor.element_size())
        for one, tensor in zip(kv_caches.tensors, tensors, strict=True)
    )
    groups = tuple(
        tuple(TensorRef(ref.tensor_idx, ref.page_size_bytes) for ref in refs)
        for refs in kv_caches.group_data_refs
    )
    return CanonicalKVCaches(KVLayout(layouts, groups, factor, packed), tensors)
