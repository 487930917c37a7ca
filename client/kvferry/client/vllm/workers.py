"""The worker's half for vLLM 0.25 and 0.26: one worker, with a verb for each direction."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload.base import OffloadingWorker

from kvferry.client.vllm.scheduler import KeysSpec
from kvferry.client.vllm.spec import Spec
from kvferry.client.vllm.worker import WorkerSide


class Worker(WorkerSide, OffloadingWorker):
    def submit_store(self, job_id: int, src_spec: Any, dst_spec: KeysSpec) -> bool:
        self.store(job_id, src_spec, dst_spec)
        return True

    def submit_load(self, job_id: int, src_spec: KeysSpec, dst_spec: Any) -> bool:
        self.load(job_id, src_spec, dst_spec)
        return True


class KVFerrySpec(Spec):
    """For kv_connector_extra_config: spec_name, with spec_module_path "kvferry.client.vllm"."""

    def get_worker(self, kv_caches: Any) -> Worker:
        return Worker(self.place, kv_caches)
