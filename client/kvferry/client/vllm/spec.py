"""vLLM's OffloadingSpec: what makes the scheduler's half and the worker's half."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload.base import OffloadingSpec

from kvferry.client.vllm.place import fingerprint_of
from kvferry.client.vllm.scheduler import Manager


class KVFerrySpec(OffloadingSpec):
    """For kv_connector_extra_config: spec_name, with spec_module_path "kvferry.client.vllm"."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._fingerprint = fingerprint_of(config)
        self._manager: Manager | None = None
        self._worker: Any = None

    def get_manager(self) -> Manager:
        if self._manager is None:
            self._manager = Manager(
                self.config,
                self._fingerprint,
                events=self.kv_events_config.enable_kv_cache_events,
            )
        return self._manager

    def get_worker(self, kv_caches: Any) -> Any:
        from kvferry.client.vllm.worker import Worker

        if self._worker is None:
            self._worker = Worker(self.config, self._fingerprint, kv_caches)
        return self._worker
