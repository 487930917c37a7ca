"""vLLM's own scheduler and KV cache manager over the connector, with a runner that checks its KV.

The steps are done in the order of vLLM's model runner, v1 or v2. A wrong, missing or late block is
detected in the step that uses it (vllm_runner.py). Importing this needs vLLM.
"""

from __future__ import annotations

import random
import time
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvferry.client import OffloadClient, shared_empty
from kvferry.client.vllm import compat
from kvferry.proto.status import NamespaceStatus
from kvferry.testing.engine import until
from support.time_limits import TIMEOUT
from support.vllm_plan import engine_config, layer_of, plan_caches, set_cache_layout
from support.vllm_runner import ONE_ALLOCATION, PAGE, CheckedRunner
from support.vllm_stand_ins import wait_connected


class EngineCore:
    """One scheduler and one worker.

    groups: names in vllm_runner.specs, of a layer each. blocks: of the GPU. overlaps: asynchronous
    scheduling: a step is scheduled before the output of the last one is known. drafts: tokens that
    are drafted per step. Among the options are:

    extra: options of kvferry beside `kvferry_options`.
    configure: a function that changes the VllmConfig.
    pipeline: two batches are in flight, without asynchronous scheduling.
    retention: tokens between windows and states that are kept; without it, all are kept.
    folder, longest, batch: of the model, of a request, and of a step, in tokens.
    others: of vLLM's KVTransferConfig, instead of what `kvferry_transfer` gives.
    """

    def __init__(
        self,
        directory: object,
        groups: tuple[str, ...] = ("full", "window"),
        blocks: int = 128,
        host_bytes: int = 1 << 20,
        overlaps: bool = False,
        drafts: int = 0,
        **options: Any,
    ) -> None:
        extra, configure = options.pop("extra", {}), options.pop("configure", None)
        pipeline, retention = options.pop("pipeline", False), options.pop("retention", None)
        if drafts:
            options["drafts"] = drafts
        config = engine_config(kvferry_options(directory, host_bytes) | extra, **options)
        set_cache_layout(config, groups)
        self._set_up(config, groups)
        if configure is not None:
            configure(config)
        caches = self._plan_caches(groups, blocks, drafts)
        if retention is not None:
            config.cache_config.prefix_cache_retention_interval = retention
            caches.prefix_cache_retention_interval = retention
        config.cache_config.num_gpu_blocks = blocks
        scheduler_block, hash_block = resolve_kv_cache_block_sizes(caches, config)
        if "partial states" in groups:  # as vLLM resolves it
            caches.hash_block_size = caches.cache_hit_alignment_tokens = hash_block
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(hash_block, sha256)
        config.scheduler_config.async_scheduling = overlaps
        self.scheduler = (AsyncScheduler if overlaps else Scheduler)(
            config,
            caches,
            StructuredOutputManager(config),
            block_size=scheduler_block,
            hash_block_size=hash_block,
            log_stats=True,
        )
        self.worker: Any = KVConnectorFactory.create_connector(
            config, KVConnectorRole.WORKER, caches
        )
        # All groups share one buffer: a block belongs to one of them at a time.
        rows = register_rows(self.worker, groups, blocks)
        self.runner: Any = CheckedRunner(groups, rows, random.Random(1), overlaps and drafts > 0)
        # Whether blocks are set to zero and copied before the connector waits for stores.
        self.writes_early = bool(config.use_v2_model_runner)
        self._wait_connected()
        self._drafts = drafts
        self._batches_in_flight = int(overlaps or pipeline)
        self._is_closed = False
        # The scheduler's output and the model's output of steps that have run.
        self._ran: list[tuple[Any, ModelRunnerOutput]] = []
        self._numbers = iter(range(1 << 30))
        # Chunks that were loaded.
        self.loaded = 0
        # For each finished request, the number of tokens found in a cache.
        self.finished: dict[str, int] = {}
        self._found: dict[str, int] = {}
        # For each finished request, the kv_transfer_params that its client receives.
        self.transfers: dict[str, Any] = {}
        # Tokens that the connector provided, by source, from 0.32 on.
        self.sources: dict[str, int] = {}
        # The connector's values of vLLM's metrics, as reported after steps.
        self.connector_stats: list[dict[str, Any]] = []

    def _set_up(self, config: VllmConfig, groups: tuple[str, ...]) -> None:
        """Called before the connectors are created."""

    def _plan_caches(self, groups: tuple[str, ...], blocks: int, drafts: int) -> KVCacheConfig:
        return plan_caches(groups, blocks, drafts)

    def _wait_connected(self) -> None:
        wait_connected(self.manager)
        wait_connected(kvferry_of(self.worker).connector_worker.worker.session.client)

    def add(self, prompt: list[int], tokens: int = 4, lora: Any = None, **transfer: Any) -> str:
        """Add a request for `tokens` tokens, with a LoRARequest. Returns its name.

        transfer: its kv_transfer_params.
        """
        name = f"request-{next(self._numbers)}"
        parameters = SamplingParams(
            max_tokens=tokens, ignore_eos=True, extra_args={"kv_transfer_params": transfer or None}
        )
        self.scheduler.add_request(
            Request(name, prompt, parameters, None, lora_request=lora, block_hasher=self._hasher)
        )
        return name

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def waits_for_loads(self) -> bool:
        """Whether requests that do not run have blocks, for a load in flight or complete.

        vLLM cannot preempt these. An aborted one keeps its blocks until its load has ended.
        """
        blocks = self.scheduler.kv_cache_manager.get_block_ids
        waiting = self.scheduler.requests.keys() - {r.request_id for r in self.scheduler.running}
        return any(any(blocks(name)) for name in waiting)

    def run(self, *prompts: list[int], seconds: float = TIMEOUT) -> list[int]:
        """Run requests. Returns the number of tokens of each that were found in a cache."""
        names = [self.add(prompt) for prompt in prompts]
        self.run_until(lambda: all(name in self.finished for name in names), seconds)
        return [self.finished[name] for name in names]

    def run_anew(self, *prompts: list[int]) -> list[int]:
        """Run requests when all stores have ended, with an empty GPU cache."""
        self.settle()
        assert self.scheduler.kv_cache_manager.reset_prefix_cache()
        return self.run(*prompts)

    def run_until_idle(self) -> None:
        """Run steps as long as vLLM's core loop does."""
        while self._ran or self.scheduler.has_requests():
            if self.scheduler.has_requests():
                self.step()
            else:
                self.finish_steps()

    def run_until(self, condition: Any, seconds: float = TIMEOUT) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "requests hang"
            self.step()

    def settle(self) -> None:
        """Run steps until all transfers and resets have ended: the scheduler has the key events.

        The worker has another connection. Until the daemon has replied to the scheduler, its
        touches may arrive after later stores, and key events may be on their way.
        """
        self.step()
        connector = self.scheduler.connector
        self.run_until(lambda: not connector.has_pending_push_work())
        for client in self.manager._clients:
            client.status()
        until(self.is_reset)

    def is_reset(self) -> bool:
        """Whether the daemon has done all resets."""
        self.manager.poll()
        return not self.manager.is_resetting

    @property
    def manager(self) -> Any:
        """The scheduler's OffloadingManager."""
        return kvferry_of(self.scheduler.connector).connector_scheduler.manager._manager

    def namespace(self) -> NamespaceStatus:
        """As the daemon reports it."""
        with OffloadClient(self.manager.clients[0].directory, engine="observer") as client:
            (status,) = client.namespaces()
        return status

    def known_chunks(self) -> int:
        """The chunks in host memory that can be looked up. Those of another engine come later."""
        self.manager.poll()
        return len(self.manager.ready_keys[0])

    @property
    def wrong(self) -> list[str]:
        wrong: list[str] = self.runner.wrong
        return wrong

    def step(self) -> None:
        output = self.scheduler.schedule()
        self._ran.append((output, self.execute(output)))
        if len(self._ran) > self._batches_in_flight:
            self._update(*self._ran.pop(0))

    def execute(self, output: Any) -> ModelRunnerOutput:
        """The worker's part of a step. output: the scheduler's."""
        metadata, worker = output.kv_connector_metadata, self.worker
        for each in getattr(metadata, "metadata", (metadata,)):  # of each in a MultiConnector
            loads = getattr(each, "load_jobs", {}).values()
            self.loaded += sum(self._count_chunks(job.src_spec) for job in loads)
        requests, tables = self.scheduler.requests, self.scheduler.kv_cache_manager.get_block_ids
        if self.writes_early:
            self.runner.prepare(output, requests, tables)
        worker.handle_preemptions(metadata)
        worker.bind_connector_metadata(metadata)
        if not self.writes_early:
            self.runner.prepare(output, requests, tables)
        if not ONE_ALLOCATION:  # before 0.29
            worker.start_load_kv(None)
        for new in output.scheduled_new_reqs:
            self._found.setdefault(new.req_id, new.num_computed_tokens)
        sampled = self.runner.compute(output, tables)
        if ONE_ALLOCATION:
            worker.start_load_kv(None)
        worker.wait_for_save()
        result = ModelRunnerOutput(
            req_ids=list(sampled),
            req_id_to_index={name: number for number, name in enumerate(sampled)},
            sampled_token_ids=list(sampled.values()),
            kv_connector_output=self._connector_output(output.finished_req_ids),
        )
        worker.clear_connector_metadata()
        return result

    def finish_steps(self) -> None:
        """Process the outputs of all steps that have run: no batch is in flight then."""
        while self._ran:
            self._update(*self._ran.pop(0))

    def _update(self, output: Any, result: ModelRunnerOutput) -> None:
        for each in self.scheduler.update_from_output(output, result).values():
            self._count_stats(each.scheduler_stats)
            for request in each.outputs:
                if request.finish_reason is not None:
                    self.transfers[request.request_id] = request.kv_transfer_params
                    self.finished[request.request_id] = self._found.get(request.request_id, 0)
        if self._drafts:
            names = [
                name
                for name, tokens in zip(result.req_ids, result.sampled_token_ids, strict=True)
                if tokens
            ]
            drafted = [[7] * self._drafts for _ in names]
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafted))

    def _count_chunks(self, source: Any) -> int:
        return len(source.keys)

    def close(self) -> None:
        if not self._is_closed:
            self.scheduler.connector.shutdown()
            self.worker.shutdown()
        self._is_closed = True

    def counted(self, name: str) -> int:
        """The sum of a counter of the connector, over its labels."""
        found = [stats["data"].get(name, 0) for stats in self.connector_stats if "data" in stats]
        return sum(sum(one.values()) if isinstance(one, dict) else one for one in found)

    def _count_stats(self, stats: Any) -> None:
        if values := getattr(stats, "kv_connector_stats", None):
            self.connector_stats.append(values)
        hits = getattr(stats, "connector_prefix_cache_stats", None)
        for source, tokens in getattr(hits, "hits_by_source", {}).items():
            self.sources[source.value] = self.sources.get(source.value, 0) + tokens

    def _connector_output(self, finished: set[str]) -> KVConnectorOutput:
        return connector_output(self.worker, finished)


def register_rows(worker: Any, groups: tuple[str, ...], blocks: int) -> torch.Tensor:
    """Register a KV cache that all groups share: (blocks, PAGE)."""
    rows = shared_empty((blocks, PAGE), torch.int8, "cpu")
    worker.register_kv_caches({group: layer_of(rows, group) for group in groups})
    return rows


def connector_output(worker: Any, finished: set[str]) -> KVConnectorOutput:
    """What a worker reports of its connector after a step."""
    reported = KVConnectorOutput()
    if compat.REPORTS_FAILED_REQUESTS:
        results = worker.get_transfer_results(finished)
        reported.finished_sending = results.finished_sending
        reported.finished_recving = results.finished_recving
        reported.failed_recving = results.failed_recving
    else:
        reported.finished_sending, reported.finished_recving = worker.get_finished(finished)
    reported.invalid_block_ids = worker.get_block_ids_with_load_errors()
    reported.kv_connector_worker_meta = worker.build_connector_worker_meta()
    return reported


def kvferry_options(directory: object, host_bytes: int) -> dict[str, Any]:
    """The kv_connector_extra_config of kvferry."""
    return {
        "kvferry_dirs": str(directory),
        "cpu_bytes_to_use": host_bytes,
        "kvferry_salt": "test",
    }


def kvferry_of(connector: Any) -> Any:
    """Our connector, which may be in a MultiConnector."""
    children = getattr(connector, "_connectors", [connector])
    (ours,) = [child for child in children if hasattr(child, "_prefill_rate")]
    return ours
