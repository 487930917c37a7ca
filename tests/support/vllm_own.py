"""vLLM's own offloading connector, scheduler and host cache, with a worker that copies on a CPU.

It copies when vLLM's connector submits a transfer. On a GPU vLLM's worker copies later, but not
before the kernels that were launched until then. Importing this needs vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from support.vllm_core import EngineCore


class OwnSpec(CPUOffloadingSpec):
    """vLLM's manager of host memory; chunks are blocks."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        return OwnWorker(kv_caches, self.num_chunks)


class OwnWorker(OffloadingWorker):
    """All groups share one tensor, as in vllm_core.py."""

    def __init__(self, kv_caches: CanonicalKVCaches, chunks: int) -> None:
        (shared,) = kv_caches.tensors
        self._rows: NDArray[np.int8] = shared.tensor.numpy()
        self._host = np.zeros((chunks, self._rows.shape[1]), np.int8)
        self._ended: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._host[dst_spec.block_ids] = self._rows[src_spec.block_ids]
        return self._end(job_id)

    def submit_load(
        self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False
    ) -> bool:
        self._rows[dst_spec.block_ids] = self._host[src_spec.block_ids]
        return self._end(job_id)

    def get_finished(self) -> list[TransferResult]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: Iterable[int]) -> None:
        """All have ended."""

    def _end(self, job_id: int) -> bool:
        self._ended.append(TransferResult(job_id, True))
        return True


class OwnEngineCore(EngineCore):
    """An EngineCore with vLLM's own connector. chunks: of host memory."""

    def __init__(self, groups: tuple[str, ...], chunks: int, **options: Any) -> None:
        extra = {
            "spec_name": "OwnSpec",
            "spec_module_path": "support.vllm_own",
            "cpu_bytes_to_use": chunks * OwnSpec.BLOCK_SIZE_ALIGNMENT,
        }
        own: dict[str, Any] = {
            "kv_connector": "OffloadingConnector",
            "kv_connector_module_path": None,
        }
        super().__init__("", groups, **options, **own, kv_connector_extra_config=extra)

    def _wait_connected(self) -> None: ...

    def _count_chunks(self, source: Any) -> int:
        return len(source.block_ids)
