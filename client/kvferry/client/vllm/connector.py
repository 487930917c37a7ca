"""The connector: vLLM's OffloadingConnector over the daemon, and tolerant of failed transfers.

A failed or lost load is reported together with its finished_recving, so that vLLM computes the
blocks again; a failed store is dropped. vLLM's own connector ends the engine in these cases, and
for some aborted requests. All waits are bounded. Called in the threads in which vLLM calls its
connectors.
"""

from __future__ import annotations

import logging
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from kvferry.client.vllm.engine_config import provide_config

log = logging.getLogger("kvferry")

NAME = "KVFerryConnector"
if NAME not in KVConnectorFactory._registry:  # noqa: SLF001 - MultiConnector looks there
    KVConnectorFactory.register_connector(NAME, "kvferry.client.vllm", NAME)


class KVFerryConnector(OffloadingConnector):
    """For --kv-transfer-config, with kv_connector_module_path "kvferry.client.vllm"."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        transfer = vllm_config.kv_transfer_config
        extra = transfer.kv_connector_extra_config
        extra.setdefault("spec_name", "KVFerrySpec")
        extra.setdefault("spec_module_path", "kvferry.client.vllm")
        if transfer.kv_load_failure_policy != "recompute":
            log.warning("kvferry: kv_load_failure_policy set to recompute, because loads may fail")
            transfer.kv_load_failure_policy = "recompute"
        with provide_config(vllm_config, kv_cache_config):
            super().__init__(vllm_config, role, kv_cache_config)
        self._fault_tolerant: FaultTolerantWorker | None = None
        if role is KVConnectorRole.WORKER:
            worker: Any = getattr(self, "connector_worker")  # noqa: B009 - its type is unknown here
            self._fault_tolerant = FaultTolerantWorker(worker.spec, kv_cache_config)
            self.connector_worker = self._fault_tolerant

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        scheduler: Any = self.connector_scheduler
        scheduler.manager.begin_lookups(request.request_id)
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def request_finished(self, request: Any, block_ids: Any) -> Any:
        limit_store_to_computed_tokens(self.connector_scheduler, request)
        return super().request_finished(request, block_ids)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        limit_store_to_computed_tokens(self.connector_scheduler, request)
        return super().request_finished_all_groups(request, block_ids)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        metadata = super().build_connector_meta(scheduler_output)
        metadata.has_no_forward_pass = scheduler_output.total_num_scheduled_tokens == 0
        zeroes = getattr(scheduler_output, "new_block_ids_to_zero", None)
        metadata.load_before_step = metadata.has_no_forward_pass and not zeroes
        return metadata

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self._fault_tolerant is None else self._fault_tolerant.take_load_errors()


class FaultTolerantWorker(OffloadingConnectorWorker):
    """The worker's side, which reports failed jobs; vLLM's own asserts that none fail."""

    def __init__(self, spec: Any, kv_cache_config: Any) -> None:
        super().__init__(spec, kv_cache_config)
        # GPU blocks that each load writes to.
        self._targets: dict[int, set[int]] = {}
        self._errors: set[int] = set()
        self._has_no_forward_pass = False
        # The metadata of the step whose transfers were started last.
        self._started: Any = None

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """The first call of a step: without a forward pass, loads can start at once."""
        super().handle_preemptions(kv_connector_metadata)
        if kv_connector_metadata.load_before_step:
            self.start_kv_transfers(kv_connector_metadata)

    def start_kv_transfers(self, metadata: Any) -> None:
        if metadata is self._started:
            return
        self._started = metadata
        for job_id, entry in metadata.load_jobs.items():
            self._targets[job_id] = set(entry.dst_spec.block_ids.tolist())
        self._has_no_forward_pass = metadata.has_no_forward_pass
        super().start_kv_transfers(metadata)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        assert self.worker is not None
        received: set[str] = set()
        if self._has_no_forward_pass:
            self.worker.wait_next_load()
        meta = self._connector_worker_meta
        for result in self.worker.get_finished():
            targets = self._targets.pop(result.job_id, None)
            if result.success:
                stats = meta.transfer_stats.store if targets is None else meta.transfer_stats.load
                stats.record(result.transfer_size, result.transfer_time)
            elif targets is not None:
                self._errors |= targets
            meta.mark_completed(result.job_id)
            request = self._load_jobs.pop(result.job_id, None)
            if request is not None:
                received.add(request)
        return set(), received

    def take_load_errors(self) -> set[int]:
        errors, self._errors = self._errors, set()
        return errors


def limit_store_to_computed_tokens(scheduler: Any, request: Any) -> None:
    """Limit what is stored of a request to the tokens whose KV was computed.

    vLLM stores a finished request up to its last token. A request that was aborted while it waits
    or loads does not have these blocks, which fails an assertion and ends the engine. The KV of the
    last sampled token is never computed.
    """
    status = scheduler._req_status.get(request.request_id)  # noqa: SLF001 - vLLM has no call
    if status is None:
        return
    groups = zip(scheduler.config.kv_group_configs, status.group_states, strict=True)
    limits = [len(state.block_ids) * group.tokens_per_block for group, state in groups]
    if status.max_offload_tokens is not None:
        limits.append(status.max_offload_tokens)
    status.max_offload_tokens = min(request.num_computed_tokens, *limits)
