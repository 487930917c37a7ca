"""The connector: vLLM's OffloadingConnector over the daemon, and tolerant of failed transfers.

A failed or lost load is reported together with its finished_recving, so that vLLM computes the
blocks again; a failed store is dropped. vLLM's own connector ends the engine in these cases. All
waits are bounded. Called in the threads in which vLLM calls its connectors.

Loads are submitted in the first call of a step, before the forward pass is launched, so that they
wait for the kernels of earlier steps only. Excepted are loads to blocks that vLLM itself writes
between that call and the forward pass (compat.written_blocks): they are submitted in start_load_kv,
which vLLM calls after those writes, and from 0.29 on after the launch of the forward pass.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from kvferry.client.vllm import compat, supported
from kvferry.client.vllm.adapters import watch_loads
from kvferry.client.vllm.block_owners import BlockOwners
from kvferry.client.vllm.draft_groups import DraftGroups
from kvferry.client.vllm.engine_config import provide_config
from kvferry.client.vllm.eviction_stores import EvictionStores
from kvferry.client.vllm.held_blocks import HeldBlocks
from kvferry.client.vllm.hinted_prefixes import HintedPrefixes
from kvferry.client.vllm.kv_memory import KVMemory, check_sleep_options
from kvferry.client.vllm.late_stores import LateStores
from kvferry.client.vllm.load_conditions import (
    can_load_after,
    drop_invalid_parameters,
    may_load,
)
from kvferry.client.vllm.options import StoreMode
from kvferry.client.vllm.prefill_rate import PrefillRate
from kvferry.client.vllm.request_hints import read_hints
from kvferry.client.vllm.request_progress import (
    finish_keys,
    keys_to_prefetch,
    limit_store_to_computed_tokens,
    store_progress,
)
from kvferry.proto.version import installed_version

log = logging.getLogger("kvferry")

NAME = "KVFerryConnector"
if NAME not in KVConnectorFactory._registry:  # noqa: SLF001 - MultiConnector looks there
    KVConnectorFactory.register_connector(NAME, "kvferry.client.vllm", NAME)

compat.check_version(installed_version("vllm") or "")


class KVFerryConnector(OffloadingConnector):
    """For --kv-transfer-config, with kv_connector_module_path "kvferry.client.vllm"."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        transfer = vllm_config.kv_transfer_config
        supported.check_config(vllm_config, transfer.kv_connector_extra_config)
        supported.check_kv_cache(kv_cache_config)
        if role is KVConnectorRole.SCHEDULER:
            supported.log_excluded_groups(kv_cache_config)
            supported.warn_of_unwritten_copies(vllm_config, kv_cache_config)
            watch_loads()
        supported.limit_chunks(vllm_config, kv_cache_config)
        turn_synchronous_loads_off(vllm_config)
        choose_spec(vllm_config)
        if transfer.kv_load_failure_policy != "recompute":
            log.warning("kvferry: kv_load_failure_policy set to recompute, because loads may fail")
            transfer.kv_load_failure_policy = "recompute"
        with provide_config(vllm_config, kv_cache_config):
            super().__init__(vllm_config, role, kv_cache_config)
        self._writes_blocks_early = compat.writes_blocks_early(vllm_config, kv_cache_config)
        # Used in the scheduler only; the last only in the worker.
        self._prefill_rate = PrefillRate()
        self._block_owners = BlockOwners()
        if role is KVConnectorRole.SCHEDULER:
            self._draft_groups = DraftGroups(self.connector_scheduler)
            self._hinted = HintedPrefixes(self.connector_scheduler)
        self._held: HeldBlocks | None = None
        self._late: LateStores | None = None
        self._fault_tolerant: FaultTolerantWorker | None = None
        if role is KVConnectorRole.WORKER:
            worker: Any = getattr(self, "connector_worker")  # noqa: B009 - its type is unknown here
            arguments = compat.worker_arguments(worker.spec, vllm_config, kv_cache_config)
            self._fault_tolerant = FaultTolerantWorker(*arguments)
            self.connector_worker = self._fault_tolerant
        self._kv_memory = KVMemory(vllm_config)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Called before vLLM loads the weights, if sleep mode is on.

        Raises Refused instead of returning False, because vLLM's error names no remedy.
        """
        check_sleep_options(kv_transfer_config.kv_connector_extra_config)
        return True

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Called before vLLM loads the weights, unless it captures no full CUDA graphs."""
        supported.check_before_weights(extra_config)
        return bool(super().requires_piecewise_for_cudagraph(extra_config))

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Called after vLLM has loaded the weights, since 0.29 before it profiles the memory."""
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        supported.check_config(vllm_config, extra)
        layout: str | None = super().get_required_kvcache_layout(vllm_config)
        return layout

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, *arguments: Any) -> Any:
        """Called in vLLM's front end, where no connector was created."""
        choose_spec(vllm_config)
        metrics = super().build_prom_metrics(vllm_config, *arguments)
        # vLLM fills its deprecated metrics only for its own spec.
        metrics._observe_deprecated_metrics = True  # noqa: SLF001 - vLLM has no option
        return metrics

    # In the scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        scheduler: Any = self.connector_scheduler
        if self._writes_blocks_early:
            self._held = HeldBlocks(gpu_block_pool, scheduler.config.num_workers)
        elif (mode := scheduler.manager.store_mode) in (StoreMode.AUTO, StoreMode.AT_EVICTION):
            noted = EvictionStores(scheduler, gpu_block_pool)
            self._late = LateStores(scheduler.manager, noted, mode)
            scheduler.manager.late_stores = self._late

    def has_pending_block_frees(self) -> bool:
        """Asked by newer versions before they preempt a request."""
        return self._held is not None and self._held.will_free_blocks()

    def has_pending_push_work(self) -> bool:
        late = self._late is not None and self._late.has_work
        return bool(self._held) or bool(self._hinted) or late or super().has_pending_push_work()

    def update_connector_output(self, connector_output: Any) -> None:
        meta = connector_output.kv_connector_worker_meta
        if self._late is not None and meta is not None:
            self._late.report(meta.completed_jobs)
        super().update_connector_output(connector_output)
        if self._held is not None and meta is not None:
            self._held.report(meta.completed_jobs)

    def load_adapter(self, lora_request: Any) -> None:
        """The engine is about to load a LoRA adapter."""
        scheduler: Any = self.connector_scheduler
        scheduler.manager.adapters.load(compat.hashed_adapter(lora_request), lora_request)

    def remove_adapter(self, lora_id: int) -> None:
        scheduler: Any = self.connector_scheduler
        scheduler.manager.adapters.remove(lora_id)

    def on_new_request(self, request: Any) -> None:
        drop_invalid_parameters(request)
        super().on_new_request(request)
        scheduler: Any = self.connector_scheduler
        if lora := request.lora_request:
            hashed = compat.hashed_adapter(lora)
            scheduler.manager.adapters.begin_request(request.request_id, hashed, lora)
        if not compat.STORES_SESSIONS and request.resumable:
            scheduler._req_status[request.request_id].max_offload_tokens = 0  # noqa: SLF001 - no call
        keys, tokens = keys_to_prefetch(scheduler, request)
        if not may_load(scheduler, request):
            keys = []
        seconds = 0.0 if read_hints(request).prefetches else self._prefill_rate.seconds(tokens)
        scheduler.manager.request_arrived(request.request_id, keys, seconds)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        scheduler: Any = self.connector_scheduler
        loads = may_load(scheduler, request) and can_load_after(scheduler, num_computed_tokens)
        scheduler.manager.begin_lookups(request.request_id, may_load=loads)
        matched = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if loads and matched[0] == 0:
            self._draft_groups.count_miss(request.request_id, num_computed_tokens)
        return matched

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._block_owners.allocate_for_load(blocks)
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens:
            scheduler: Any = self.connector_scheduler
            seconds = self._prefill_rate.seconds(num_external_tokens)
            scheduler.manager.attempt(lambda m: m.count_saved(num_external_tokens, seconds))
            if self._late is not None:
                self._late.note_load(request.request_id, num_external_tokens)

    def request_finished(self, request: Any, block_ids: Any) -> Any:
        if compat.STORES_LAST_TOKEN:
            limit_store_to_computed_tokens(self.connector_scheduler, request)
        finished = super().request_finished(request, block_ids)
        self._prefill_rate.end(request.request_id, time.monotonic())
        finish_keys(self.connector_scheduler, request.request_id)
        self._hinted.request_finished(request)
        return finished

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        return self.request_finished(request, block_ids)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        scheduler: Any = self.connector_scheduler
        output = scheduler_output
        resetting = scheduler.manager.is_resetting(output.finished_req_ids or ())
        progress = store_progress(scheduler) if resetting else []
        self._block_owners.begin_step(scheduler, compat.block_tables(output))
        self._block_owners.drop_foreign_blocks(
            scheduler, output.num_scheduled_tokens, output.finished_req_ids or ()
        )
        requests = scheduler._req_status  # noqa: SLF001 - vLLM has no call
        with compat.without_new_loads(scheduler, output.preempted_req_ids or ()):
            metadata = super().build_connector_meta(compat.limit_offers(output, requests))
        for request in output.finished_req_ids or ():
            scheduler.manager.adapters.end_request(request)
        self._draft_groups.end_requests(output.finished_req_ids or ())
        for state, chunk in progress:  # nothing was stored: vLLM offers it again in the next step
            state.next_stored_chunk_idx = chunk
        if self._held is not None:
            self._held.hold(metadata.store_jobs)
            metadata.jobs_to_flush = self._held.jobs_to_wait_for(metadata.jobs_to_flush or set())
        if self._late is not None:
            self._hinted.choose_stores(self._late.noted)
            for job_id, store in self._late.stores_of_step(output.num_scheduled_tokens):
                metadata.store_jobs[job_id] = compat.store_job(store)
        self._hinted.apply()
        observe_prefills(self._prefill_rate, scheduler, scheduler_output)
        metadata.has_no_forward_pass = scheduler_output.total_num_scheduled_tokens == 0
        written = metadata.load_jobs and compat.written_blocks(scheduler_output)
        metadata.late_loads = {
            job_id
            for job_id, job in metadata.load_jobs.items()
            if written and not written.isdisjoint(job.dst_spec.block_ids.tolist())
        }
        return metadata

    def reset_cache(self) -> bool | None:
        result: bool | None = super().reset_cache()
        if self._late is not None:  # vLLM does not know these jobs
            scheduler: Any = self.connector_scheduler
            scheduler._current_batch_jobs_to_flush.update(self._late.noted.jobs)  # noqa: SLF001
        return result

    # In the worker

    def get_mem_pool_context(self) -> Any:
        """Called from 0.31 on, before the KV caches are allocated."""
        return self._kv_memory.allocation_context()

    def unregister_kv_caches(self) -> None:
        """Called before sleep; vLLM has reset all caches, the host's too."""
        assert self._fault_tolerant is not None
        self._fault_tolerant.suspend()
        self._kv_memory.release()

    def restore_kv_caches(self) -> None:
        """Called after sleep."""
        assert self._fault_tolerant is not None
        self._kv_memory.restore()
        self._fault_tolerant.resume()

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Called instead of get_finished from 0.30 on."""
        _, received = self.get_finished(finished_req_ids)
        assert self._fault_tolerant is not None
        return compat.transfer_results(received, self._fault_tolerant.take_failed_requests())

    def get_block_ids_with_load_errors(self) -> set[int]:
        if compat.REPORTS_FAILED_REQUESTS or self._fault_tolerant is None:
            return set()
        return self._fault_tolerant.take_failed_blocks()


class FaultTolerantWorker(OffloadingConnectorWorker):
    """The worker's side, which reports failed jobs; vLLM's own asserts that none fail."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        # Arrays of the GPU blocks that each load writes to.
        self._targets: dict[int, Any] = {}
        self._failed_blocks: list[Any] = []
        self._failed_requests: set[str] = set()
        self._has_no_forward_pass = False

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """vLLM's own method describes packed groups as whole rows: the bytes of all groups."""
        config = self.spec.engine_config
        if config.packed is None:
            super().register_kv_caches(kv_caches)
        else:
            first = next(iter(kv_caches.values()))
            own = config.packed.canonical(first, config.factor)
            self._init_worker(compat.vllm_kv_caches(own))

    def suspend(self) -> None:
        """The KV caches lose their memory."""
        if self.worker is not None:
            self.worker.session.suspend()

    def resume(self) -> None:
        """The KV caches have memory again, at the same addresses."""
        if self.worker is not None:
            self.worker.session.resume()

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """The first call of a step."""
        super().handle_preemptions(kv_connector_metadata)
        self._has_no_forward_pass = kv_connector_metadata.has_no_forward_pass
        for job_id, job in kv_connector_metadata.load_jobs.items():
            if job_id not in kv_connector_metadata.late_loads:
                self._submit_load(job_id, job)

    def start_kv_transfers(self, metadata: Any) -> None:
        """After vLLM has written its blocks."""
        for job_id in metadata.late_loads:
            self._submit_load(job_id, metadata.load_jobs[job_id])

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        assert self.worker is not None
        received: set[str] = set()
        if self._has_no_forward_pass:
            self.worker.wait_next_load()
        meta = self._connector_worker_meta
        for result in self.worker.get_finished():
            request = self._load_jobs.pop(result.job_id, None)
            targets = self._targets.pop(result.job_id, None)
            if result.success:
                stats = meta.transfer_stats.store if targets is None else meta.transfer_stats.load
                # Workers need not measure, and may have nothing to store.
                if result.transfer_size and result.transfer_time is not None:
                    stats.record(result.transfer_size, result.transfer_time)
            elif request is not None:
                self._failed_blocks.append(targets)
                self._failed_requests.add(request)
            meta.mark_completed(result.job_id)
            if request is not None:
                received.add(request)
        return set(), received

    def take_failed_requests(self) -> set[str]:
        """Requests whose loads have failed since the last call of this or of the next method."""
        failed, self._failed_requests, self._failed_blocks = self._failed_requests, set(), []
        return failed

    def take_failed_blocks(self) -> set[int]:
        """GPU blocks of these loads."""
        failed, self._failed_requests, self._failed_blocks = self._failed_blocks, set(), []
        return {block for targets in failed for block in targets.tolist()}

    def _submit_load(self, job_id: int, job: Any) -> None:
        assert self.worker is not None
        self._targets[job_id], self._load_jobs[job_id] = job.dst_spec.block_ids, job.req_id
        self.worker.submit_load(job_id, job.src_spec, job.dst_spec)


def turn_synchronous_loads_off(vllm_config: Any) -> None:
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    if extra.get(compat.SYNC_LOADS):
        log.warning(
            "kvferry: %s set to 0: blocks of a failed synchronous load could be used by other "
            "requests before they are computed again",
            compat.SYNC_LOADS,
        )
        extra[compat.SYNC_LOADS] = 0


def choose_spec(vllm_config: Any) -> None:
    """Let vLLM create a KVFerrySpec."""
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    extra.setdefault("spec_name", "KVFerrySpec")
    extra.setdefault("spec_module_path", "kvferry.client.vllm")


def observe_prefills(rate: PrefillRate, scheduler: Any, scheduler_output: Any) -> None:
    """Measure how fast prompts are computed."""
    now = time.monotonic()
    rate.observe(now)
    rate.forget(scheduler_output.preempted_req_ids or ())
    for new in scheduler_output.scheduled_new_reqs:
        if (status := scheduler._req_status.get(new.req_id)) is not None:  # noqa: SLF001 - no call
            rate.begin(status.req, new.num_computed_tokens, now)
