"""Both sides of vLLM's offloading connector, with a fake scheduler and without a model or a GPU.

Importing this needs vLLM, or the part of its Python code that the connector imports.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from kvferry.client import shared_empty
from kvferry.client.vllm import KVFerryConnector, compat
from support.time_limits import TIMEOUT
from support.vllm_stand_ins import vllm_config, wait_connected

LAYERS = "layer.0", "layer.1"
TOKENS, HEADS, WIDTH = 16, 1, 8
# Bytes of one layer's block: K and V, in bfloat16.
PAGE = 2 * TOKENS * HEADS * WIDTH * 2


@dataclass
class FakeRequest:
    """The attributes of vLLM's Request that its offloading connector reads."""

    request_id: str
    block_hashes: list[bytes]
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    kv_transfer_params: None = None
    kv_hints: None = None
    lora_request: None = None
    skip_reading_prefix_cache: bool = False
    resumable: bool = False
    status: RequestStatus = RequestStatus.RUNNING
    blocks: list[KVCacheBlock] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.block_hashes) * TOKENS

    num_prompt_tokens = num_tokens

    def is_finished(self) -> bool:
        return bool(RequestStatus.is_finished(self.status))


def prompt(number: int, blocks: int) -> FakeRequest:
    hashes = [number.to_bytes(16, "big") + n.to_bytes(16, "big") for n in range(blocks)]
    return FakeRequest(f"request {number} at {time.monotonic()}", hashes)


class VLLMConnectorEngine:
    """One scheduler and one worker of vLLM with a daemon. `kv`: KV tensors, by layer."""

    def __init__(
        self,
        directory: object,
        name: str = "engine",
        blocks: int = 64,
        layers: int = 2,
        **extra: Any,
    ) -> None:
        self.config = vllm_config(name, {"kvferry_dirs": str(directory), **extra})
        self.caches = kv_cache_config(blocks)
        self.kv = allocate(self.caches)
        self.scheduler = KVFerryConnector(self.config, KVConnectorRole.SCHEDULER, self.caches)
        self.worker = KVFerryConnector(self.config, KVConnectorRole.WORKER, self.caches)
        self.worker.register_kv_caches(self.kv)
        wait_connected(self.scheduler.connector_scheduler.manager._manager)
        wait_connected(self.worker.connector_worker.worker.session.client)
        # Blocks of failed loads, before 0.30.
        self.errors: set[int] = set()
        # Requests whose loads failed, from 0.30 on.
        self.failed: set[str] = set()
        self.received: set[str] = set()
        # Blocks that the model runner sets to zero in each step, when it prepares its input.
        self.zeroed: list[int] = []
        # "prepare" and "load", in the order in which the worker does them.
        self.done: list[str] = []
        self._record_loads()

    # Requests

    def compute(self, request: FakeRequest, block_ids: Sequence[int]) -> None:
        """Prefill a request into these blocks, and wait until its stores have ended."""
        self.scheduler.on_new_request(request)
        self.finish(request, block_ids)
        self.settle()

    def matched(self, request: FakeRequest) -> int | None:
        """The number of tokens of a new request in host memory; None for "ask again"."""
        if request.request_id not in self.scheduler.connector_scheduler._req_status:
            self.scheduler.on_new_request(request)
        found: int | None = self.scheduler.get_num_new_matched_tokens(request, 0)[0]
        return found

    def load(
        self,
        request: FakeRequest,
        block_ids: Sequence[int],
        tokens: int,
        new: Iterable[tuple[FakeRequest, Sequence[int]]] = (),
    ) -> None:
        """Begin to load matched tokens, in a step that also computes `new` requests."""
        blocks = [KVCacheBlock(block_id) for block_id in block_ids]
        self.scheduler.update_state_after_alloc(request, SimpleNamespace(blocks=(blocks,)), tokens)
        self.step(new)

    def received_all(self, request: FakeRequest, seconds: float = TIMEOUT) -> bool:
        """Step until a request's load has ended, with success or not."""
        deadline = time.monotonic() + seconds
        while request.request_id not in self.received and time.monotonic() < deadline:
            self.step()
        return request.request_id in self.received

    def finish(self, request: FakeRequest, block_ids: Sequence[int]) -> None:
        """Compute the rest of a request in one step, and end it in another."""
        self.step(new=[(request, block_ids)])
        request.num_computed_tokens = request.num_tokens
        self.end(request, block_ids, RequestStatus.FINISHED_STOPPED)

    def end(
        self,
        request: FakeRequest,
        block_ids: Sequence[int] = (),
        status: RequestStatus = RequestStatus.FINISHED_ABORTED,
    ) -> None:
        """End a request: it is aborted, or has its last token."""
        request.status = status
        self.scheduler.request_finished(request, list(block_ids))
        self.step(finished=[request])

    # Steps

    def step(
        self,
        new: Iterable[tuple[FakeRequest, Sequence[int]]] = (),
        finished: Iterable[FakeRequest] = (),
        preempted: Iterable[FakeRequest] = (),
    ) -> None:
        """One step of an engine: schedule, execute, process the worker's output."""
        new = list(new)
        output = SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(
                    req_id=request.request_id, block_ids=(list(ids),), num_computed_tokens=0
                )
                for request, ids in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[], new_block_ids=[], resumed_req_ids=set()
            ),
            num_scheduled_tokens={request.request_id: request.num_tokens for request, _ in new},
            total_num_scheduled_tokens=sum(request.num_tokens for request, _ in new),
            finished_req_ids={request.request_id for request in finished},
            preempted_req_ids={request.request_id for request in preempted},
            new_block_ids_to_zero=list(self.zeroed),
            kv_cache_block_copies=None,
            kv_connector_block_state=None,
            partial_tail_offloads=None,
        )
        metadata = self.scheduler.build_connector_meta(output)
        worker = self.worker
        worker.bind_connector_metadata(metadata)
        worker.handle_preemptions(metadata)
        self.done.append("prepare")
        worker.start_load_kv(None)
        worker.wait_for_save()
        if compat.REPORTS_FAILED_REQUESTS:
            results = worker.get_transfer_results(set())
            received, failed = results.finished_recving, results.failed_recving
        else:
            received, failed = worker.get_finished(set())[1], set()
        reported = KVConnectorOutput(
            finished_recving=received,
            invalid_block_ids=worker.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )
        worker.clear_connector_metadata()
        self.errors |= reported.invalid_block_ids
        self.failed |= failed
        self.received |= received
        self.scheduler.update_connector_output(reported)

    def _record_loads(self) -> None:
        offloading: Any = self.worker.connector_worker
        worker = offloading.worker
        load = worker.load

        def record_and_load(*job: Any) -> None:
            self.done.append("load")
            load(*job)

        worker.load = record_and_load

    def settle(self, seconds: float = TIMEOUT) -> None:
        """Step until no transfer is in flight."""
        deadline = time.monotonic() + seconds
        while self.scheduler.has_pending_push_work() and time.monotonic() < deadline:
            self.step()

    def close(self) -> None:
        self.scheduler.shutdown()
        self.worker.shutdown()

    def __enter__(self) -> VLLMConnectorEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def kv_cache_config(blocks: int) -> KVCacheConfig:
    """One group of full attention."""
    spec = FullAttentionSpec(
        block_size=TOKENS, num_kv_heads=HEADS, head_size=WIDTH, dtype=torch.bfloat16
    )
    assert spec.page_size_bytes == PAGE
    return KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=cache_tensors(blocks, dict.fromkeys(LAYERS, spec)),
        kv_cache_groups=[KVCacheGroupSpec(list(LAYERS), spec)],
    )


def kv_cache_config_of_widths(blocks: int, widths: tuple[int, int]) -> KVCacheConfig:
    """The configuration of a worker whose layers are all full attention, with different widths."""
    layers = {
        name: FullAttentionSpec(
            block_size=TOKENS, num_kv_heads=HEADS, head_size=width, dtype=torch.bfloat16
        )
        for name, width in zip(LAYERS, widths, strict=True)
    }
    together = UniformTypeKVCacheSpecs.from_specs(layers)
    assert together is not None
    return KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=cache_tensors(blocks, layers),
        kv_cache_groups=[KVCacheGroupSpec(list(LAYERS), together)],
    )


# From vLLM 0.29 on, all layers are in one allocation.
ONE_ALLOCATION = "layers" in {field.name for field in fields(KVCacheTensor)}


def cache_tensors(blocks: int, layers: dict[str, FullAttentionSpec]) -> list[KVCacheTensor]:
    """One KVCacheTensor per layer. The blocks of a layer are contiguous."""
    if not ONE_ALLOCATION:
        return [
            KVCacheTensor(size=blocks * spec.page_size_bytes, shared_by=[name])
            for name, spec in layers.items()
        ]
    total = blocks * sum(spec.page_size_bytes for spec in layers.values())
    tensors, offset = [], 0
    for name, spec in layers.items():
        page = spec.page_size_bytes
        tensors.append(KVCacheTensor(total, [name], blocks * page, page, offset))
        offset += blocks * page
    return tensors


def allocate(caches: KVCacheConfig) -> dict[str, torch.Tensor]:
    """The tensor of each layer, as vLLM's model runner creates it, in shared memory."""
    if not ONE_ALLOCATION:
        shape = caches.num_blocks, 2, TOKENS, HEADS, WIDTH
        return {name: shared_empty(shape, torch.bfloat16, "cpu") for name in LAYERS}
    from vllm.v1.kv_cache_interface import create_kv_cache_views
    from vllm.v1.kv_cache_layout import KVCacheLayout

    buffer = shared_empty((caches.kv_cache_tensors[0].size,), torch.int8, "cpu")
    views: dict[str, torch.Tensor] = {}
    for tensor in caches.kv_cache_tensors:
        spec = caches.kv_cache_groups[0].kv_cache_spec
        created = create_kv_cache_views(
            buffer, spec, caches.num_blocks, KVCacheLayout.LBHNC, tensor
        )
        views |= zip(tensor.layers, created, strict=True)
    return views
