"""The differences between the versions of vLLM that kvferry supports. Needs vLLM.

Each difference is probed by feature, not by version number; the version in a comment says when it
came. So a newer vLLM works as long as the probes find what they look for.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import base as connector_base
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import config as offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler as vllm_scheduler
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVCacheTensor,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_offload import base

from kvferry.client.tensors.canonical import CanonicalKVCaches
from kvferry.client.vllm import NEWEST, OLDEST, SUPPORTED
from kvferry.client.vllm.eviction_stores import EvictionJob
from kvferry.proto.errors import Code, Refused

log = logging.getLogger("kvferry")

# The medium of events: a string in 0.26, an enum from 0.27 on.
_mediums = getattr(base, "Medium", None)
HOST_MEDIUM: Any = "CPU" if _mediums is None else _mediums.CPU

# From 0.30 on failed requests are reported, whatever their KV cache groups; before, failed blocks,
# which ends the engine if there are several groups.
_transfer_results: Any = getattr(connector_base, "KVConnectorTransferResults", None)
REPORTS_FAILED_REQUESTS = _transfer_results is not None

# Before 0.30 the last token of a finished request is stored, although its KV was never computed. No
# attribute tells that; it changed when the transfer results came.
STORES_LAST_TOKEN = not REPORTS_FAILED_REQUESTS
# In 0.26 blocks are stored that a request no longer has, which fails an assertion.
STORES_FREED_BLOCKS = (
    "group_state"
    not in inspect.signature(vllm_scheduler.RequestOffloadState.storable_chunks).parameters
)

# Before 0.33 the scheduler appends the block table of a session's next input (a resumable request)
# to its last one. In 0.26 the session also keeps the hash of a token that it discards between them.
_NEW = SimpleNamespace(req_id="", block_ids=())
_CACHED = SimpleNamespace(req_ids=(), new_block_ids=(), resumed_req_ids=())
_OUTPUT = SimpleNamespace(scheduled_new_reqs=[_NEW], scheduled_cached_reqs=_CACHED)
STORES_SESSIONS = next(vllm_scheduler.yield_req_data(_OUTPUT))[2]

# From 0.31 on vLLM never calls OffloadingManager.touch.
TOUCHES_KEYS = hasattr(vllm_scheduler.OffloadingConnectorScheduler, "_touch")

# From 0.32 on prompt tokens are counted by the cache that they came from.
try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    HOST_SOURCE: Any = CacheHitSource.HOST
    DISK_SOURCE: Any = CacheHitSource.DISK
except ImportError:
    HOST_SOURCE = DISK_SOURCE = None

# From 0.33 on vLLM notifies connectors before it sleeps and after it has woken up.
CALLS_BEFORE_SLEEP = hasattr(connector_base.KVConnectorBase_V1, "unregister_kv_caches")

# From 0.29 on, which has all layers in one allocation, Mamba states can be offloaded. In 0.26 the
# scheduler takes the longest hit of any KV cache group for computed, with any connector, and only
# NIXL's always loads the state there. In 0.27 and 0.28 a request may read another state after a
# load, in the cache mode "all".
OFFLOADS_MAMBA_STATES = "layers" in {field.name for field in fields(KVCacheTensor)}

# In another module from 0.31 on.
_WINDOW = "get_sliding_window_size_in_chunks"
_window_size: Any = getattr(vllm_scheduler, _WINDOW, None) or getattr(offloading_config, _WINDOW)

# The states that a scheduler's output offers, in some versions before 0.33.
_OFFERS = "partial_tail_offloads"

# From 0.33 on loads may be synchronous, if this key of kv_connector_extra_config is not 0.
SYNC_LOADS = "sync_load_budget_bytes"


def check_version(version: str, connector: type = connector_base.KVConnectorBase_V1) -> None:
    """Raise Refused (BAD_CONFIG) for a vLLM that is too old or misses a hook; warn if it is newer.

    Called when the connector is imported, before vLLM loads a model. connector: vLLM's base class.
    """
    if not hasattr(connector, "bind_gpu_block_pool"):
        message = (
            f"vLLM {version} does not give its block pool to connectors, so blocks could change "
            f"while they are stored; use vLLM {SUPPORTED}"
        )
        raise Refused(Code.BAD_CONFIG, message, "bind_gpu_block_pool")
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or "dev" in version:  # built from a checkout
        log.warning(
            "kvferry: supports vLLM %s, and cannot tell which this is: %s", SUPPORTED, version
        )
        return
    found = int(numbers[1]), int(numbers[2])
    if found < OLDEST:
        message = f"vLLM {version} is too old; kvferry supports vLLM {SUPPORTED}"
        raise Refused(Code.BAD_CONFIG, message, version)
    if found > NEWEST:
        log.warning("kvferry: supports vLLM %s, and was not tested with %s", SUPPORTED, version)


def worker_arguments(spec: Any, vllm_config: Any, kv_cache_config: Any) -> tuple[Any, ...]:
    """The arguments of OffloadingConnectorWorker; vllm_config from 0.27 on."""
    parameters = inspect.signature(OffloadingConnectorWorker.__init__).parameters
    if "vllm_config" in parameters:
        return spec, vllm_config, kv_cache_config
    return spec, kv_cache_config


def transfer_results(received: set[str], failed: set[str]) -> Any:
    """The result of get_transfer_results, which is called from 0.30 on."""
    return _transfer_results(finished_recving=received, failed_recving=failed)


def store_job(store: EvictionJob) -> Any:
    """vLLM's job for a store that belongs to no request. Its chunks are whole."""
    source = base.GPULoadStoreSpec(store.blocks, store.sizes, [0] * len(store.sizes))
    return TransferJob("", source, store.target)


def vllm_kv_caches(kv_caches: CanonicalKVCaches) -> Any:
    """vLLM's form of kvferry's canonical KV caches, from which vLLM may compute pointers."""
    layout = kv_caches.layout
    tensors = [
        base.CanonicalKVCacheTensor(tensor, one.page_size_bytes)
        for tensor, one in zip(kv_caches.tensors, layout.tensors, strict=True)
    ]
    groups = [
        [base.CanonicalKVCacheRef(ref.tensor, ref.page_size_bytes) for ref in refs]
        for refs in layout.groups
    ]
    return base.CanonicalKVCaches(tensors, groups)


def written_blocks(scheduler_output: Any) -> set[int]:
    """GPU blocks that vLLM itself sets to zero or copies to before this step's forward pass."""
    blocks = set(scheduler_output.new_block_ids_to_zero or ())
    for copy in scheduler_output.kv_cache_block_copies or ():
        blocks |= {copy.src_block_id, copy.dst_block_id}
    return blocks


def block_tables(scheduler_output: Any) -> Iterator[tuple[str, Any, bool]]:
    """For each request its name, its block ids per group, and whether these are its whole table."""
    new = {request.req_id for request in scheduler_output.scheduled_new_reqs}
    for name, block_ids, is_full_table in vllm_scheduler.yield_req_data(scheduler_output):
        yield name, block_ids, is_full_table or name in new


def hashed_adapter(lora_request: Any) -> tuple[Any, ...]:
    """What vLLM's block hashes contain of a LoRA adapter: its name, since 0.33 also its path."""
    request: Any = SimpleNamespace(lora_request=lora_request)
    return tuple(kv_cache_utils._gen_lora_extra_hash_keys(request))  # noqa: SLF001 - no call


def limit_offers(scheduler_output: Any, requests: Mapping[str, Any]) -> Any:
    """A scheduler's output that offers no Mamba state beyond its request's max_offload_tokens.

    vLLM asserts that states in the middle of a block are within this limit, which a client sets in
    its request, and takes 0 for no limit (vLLM 52397). requests: vLLM's state of each, by name.
    """
    state = getattr(scheduler_output, "kv_connector_block_state", None)
    owner, name = (state, "boundary_state_offloads") if state else (scheduler_output, _OFFERS)
    offers: dict[str, list[Any]] = getattr(owner, name, None) or {}
    kept = {}
    for request, states in offers.items():
        if (status := requests.get(request)) is not None:
            limit = status.max_offload_tokens
            kept[request] = [one for one in states if limit is None or one[2] <= limit]
    if kept == offers:
        return scheduler_output
    owner = replace(owner, **{name: kept})
    return replace(scheduler_output, kv_connector_block_state=owner) if state else owner


@contextmanager
def without_new_loads(scheduler: Any, preempted: Iterable[str]) -> Iterator[None]:
    """Hide the loads of this step of preempted requests from vLLM before 0.33.

    A reset of its cache can preempt a request that the next step loads again. vLLM asserts that all
    jobs of a preempted request are stores. scheduler: its OffloadingConnectorScheduler.
    """
    new = scheduler._current_batch_load_jobs.keys()  # noqa: SLF001 - no call
    states = [scheduler._req_status.get(request) for request in preempted]  # noqa: SLF001
    hidden = [(state.transfer_jobs, state.transfer_jobs & new) for state in states if state]
    for jobs, loads in hidden:
        jobs.difference_update(loads)
    try:
        yield
    finally:
        for jobs, loads in hidden:
            jobs.update(loads)


def layer_specs(group_spec: Any) -> tuple[Any, ...]:
    """The specs of a group's layers. Workers get all of them, the scheduler only one."""
    if isinstance(group_spec, UniformTypeKVCacheSpecs):
        return tuple(group_spec.kv_cache_specs.values())
    return (group_spec,)


def can_offload(spec: Any) -> bool:
    """Whether vLLM's offloading connector knows which blocks of such a layer a load needs."""
    try:
        _window_size(spec, spec.block_size)
    except AssertionError:
        return False
    return True


def can_offload_local_attention() -> bool:
    """Not in 0.26."""
    shape: dict[str, Any] = {"num_kv_heads": 1, "head_size": 1, "dtype": torch.int8}
    return can_offload(ChunkedLocalAttentionSpec(block_size=1, **shape, attention_chunk_size=1))


def is_host_resident(kv_cache_config: Any) -> bool:
    """Whether a part of the KV cache is in host memory, which is possible from 0.30 on."""
    parts = (*kv_cache_config.kv_cache_groups, *kv_cache_config.kv_cache_tensors)
    return any(getattr(part, "host_resident", False) for part in parts)


def tokens_between_hits(vllm_config: Any, kv_cache_config: Any) -> int | None:
    """Tokens between two positions at which a prefix in vLLM's own cache may end.

    Before 0.32 vLLM gives only those that the user chose.
    """
    resolved: int | None = getattr(kv_cache_config, "cache_hit_alignment_tokens", None)
    chosen: int | None = vllm_config.cache_config.prefix_match_unit
    return chosen if resolved is None else resolved


def is_cuda() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cuda())


def is_in_multi_connector() -> bool:
    """Whether the connector of this process is a MultiConnector. In the worker, once created."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    return isinstance(get_kv_transfer_group(), MultiConnector)


def writes_blocks_early(vllm_config: Any, kv_cache_config: Any) -> bool:
    """Whether vLLM sets blocks to zero, or copies states into them, before handle_preemptions.

    Its model runner v2 (the default from 0.29) does so with Mamba layers and with KV caches of
    several precisions. Then stores hold their blocks (held_blocks.py).
    """
    uses_v2 = getattr(vllm_config, "use_v2_model_runner", False)
    return bool(uses_v2 and getattr(kv_cache_config, "needs_kv_cache_zeroing", False))
