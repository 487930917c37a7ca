"""The subclasses of vLLM's OffloadingSpec, OffloadingManager and OffloadingWorker."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.cpu.common import CPUOffloadingMetrics

from kvferry.client.engines.connection_log import ConnectionLog
from kvferry.client.vllm import compat
from kvferry.client.vllm.draft_groups import DRAFT_MISSES
from kvferry.client.vllm.engine_config import (
    BlockSizes,
    EngineConfig,
    chunk_factor,
    provided_config,
    read_engine_config,
)
from kvferry.client.vllm.hinted_prefixes import HINT_COUNTERS
from kvferry.client.vllm.kv_cache_plan import offloaded_groups
from kvferry.client.vllm.options import StoreMode
from kvferry.client.vllm.scheduler_side import KeysSpec, SchedulerSide
from kvferry.client.vllm.vllm_log import vllm_log
from kvferry.client.vllm.worker_side import WorkerSide
from kvferry.proto.keys import Lookup

log = logging.getLogger("kvferry")

LOOKUP_CODES = {result: base.LookupResult[result.name] for result in Lookup}


class KVFerryManager(SchedulerSide, base.OffloadingManager):
    def __init__(self, config: EngineConfig, *, events: bool) -> None:
        super().__init__(config, LOOKUP_CODES, events=events)
        notes = (f"store {config.store_mode.value}",)
        self._connection_log = ConnectionLog(vllm_log, config.chunk_tokens, notes)
        self._connection_log.update(self._manager)

    def on_schedule_end(self, context: Any = None) -> None:
        super().on_schedule_end(context)
        self._connection_log.update(self._manager)

    def on_new_request(self, req_context: Any) -> Any:
        return base.RequestOffloadingContext()

    def get_stats(self) -> Any:
        """Fill the metrics of vLLM's host tier. A pinned block counts as read by a transfer."""
        usage, sizes = self.usage(), self.take_store_sizes()
        if usage is None and not sizes:
            return None
        stats = OffloadingConnectorStats()
        for size in sizes:
            stats.observe_histogram(CPUOffloadingMetrics.CPU_ALLOCATION_SIZE, size)
        if usage is not None:
            for name, blocks in (
                (CPUOffloadingMetrics.CPU_CACHE_USAGE_PERC, usage.pending + usage.pinned),
                (CPUOffloadingMetrics.CPU_CACHE_WRITE_USAGE_PERC, usage.pending),
                (CPUOffloadingMetrics.CPU_CACHE_READ_USAGE_PERC, usage.pinned),
            ):
                stats.set_gauge(name, min(1.0, blocks / usage.blocks))
        return stats

    def get_load_source(self, key: Any, req_context: Any) -> Any:
        below = self.was_below(key, req_context.req_id)
        return compat.DISK_SOURCE if below else compat.HOST_SOURCE

    def take_events(self) -> list[Any]:
        return [
            base.OffloadingEvent(list(e.keys), compat.HOST_MEDIUM, e.removed)
            for e in self.events() or ()
        ]


class KVFerryWorker(WorkerSide, base.OffloadingWorker):
    def submit_store(self, job_id: int, src_spec: Any, dst_spec: KeysSpec) -> bool:
        self.store(job_id, src_spec, dst_spec)
        return True

    def submit_load(
        self, job_id: int, src_spec: KeysSpec, dst_spec: Any, expedited: bool = False
    ) -> bool:
        """expedited needs nothing: loads are started in order, before stores."""
        self.load(job_id, src_spec, dst_spec)
        return True


class KVFerrySpec(base.OffloadingSpec):
    """For kv_connector_extra_config: spec_name, with spec_module_path "kvferry.client.vllm"."""

    blocks_per_chunk: int

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG003 - vLLM's signature
        """Those of vLLM's host tier, without the number of skipped stores, which the daemon has.

        And the number of requests whose drafting layers alone missed, and what became of hints.
        """
        from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

        definitions: dict[str, Any] = CPUOffloadingSpec.build_metric_definitions({})
        definitions[DRAFT_MISSES] = base.OffloadingCounterMetadata(
            "Requests that found the target model's KV but not that of its drafting layers."
        )
        for name, text in HINT_COUNTERS.items():
            definitions[name] = base.OffloadingCounterMetadata(text)
        return definitions

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        vllm_config, kv_cache_config = provided_config()
        blocks = self._choose_block_sizes(vllm_config, kv_cache_config)
        config = read_engine_config(vllm_config, kv_cache_config, blocks)
        if compat.writes_blocks_early(vllm_config, kv_cache_config):
            config = replace(config, store_mode=StoreMode.AT_ONCE)
        self.engine_config = config
        self._manager: KVFerryManager | None = None
        if len(kv_cache_config.kv_cache_groups) > 1 and not compat.REPORTS_FAILED_REQUESTS:
            log.warning(
                "kvferry: this model has several KV cache groups, and this vLLM cannot recompute "
                "failed loads of such a model: if the daemon is killed during a load, the engine "
                "ends. vLLM 0.30 and newer can"
            )

    def get_manager(self) -> KVFerryManager:
        if self._manager is None:
            events = self.kv_events_config.enable_kv_cache_events
            self._manager = KVFerryManager(self.engine_config, events=events)
        return self._manager

    def get_worker(self, kv_caches: Any) -> KVFerryWorker:
        return KVFerryWorker(self.engine_config, kv_caches)

    def _choose_block_sizes(self, vllm_config: Any, kv_cache_config: Any) -> BlockSizes:
        """Block sizes, with the chunk that kvferry chooses; vLLM reads blocks_per_chunk."""
        configured = BlockSizes(
            tuple(self.tokens_per_block), self.tokens_per_hash, self.blocks_per_chunk
        )
        kinds = [group.kv_cache_spec for group in offloaded_groups(kv_cache_config)]
        full = all(
            isinstance(layer, FullAttentionSpec)
            for kind in kinds
            for layer in compat.layer_specs(kind)
        )
        factor = chunk_factor(vllm_config, kv_cache_config, configured, full=full)
        self.blocks_per_chunk = factor
        return BlockSizes(configured.tokens, configured.hash_tokens, factor)
