"""The worker's half for vLLM 0.24: a handler for each direction, and here one for both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm.v1.kv_offload.base import GPULoadStoreSpec
from vllm.v1.kv_offload.worker.worker import OffloadingHandler

from kvferry.client.vllm.scheduler import KeysSpec
from kvferry.client.vllm.spec import Spec
from kvferry.client.vllm.worker import WorkerSide


class Handler(WorkerSide, OffloadingHandler):
    def transfer_async(self, job_id: int, spec: tuple[Any, Any]) -> bool:
        source, destination = spec
        if isinstance(source, KeysSpec):
            self.load(job_id, source, destination)
        else:
            self.store(job_id, source, destination)
        return True


class KVFerrySpec(Spec):
    """For kv_connector_extra_config: spec_name, with spec_module_path "kvferry.client.vllm"."""

    def get_handlers(self, kv_caches: Any) -> Iterator[tuple[Any, Any, Handler]]:
        handler = Handler(self.place, kv_caches)
        yield GPULoadStoreSpec, KeysSpec, handler
        yield KeysSpec, GPULoadStoreSpec, handler
