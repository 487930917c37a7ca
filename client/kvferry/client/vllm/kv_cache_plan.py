"""What vLLM planned for its KV cache: offloaded groups, bytes of blocks, layout, equal ranks.

Read from the configuration and the KVCacheConfig, in the scheduler's process and in the workers'
alike: host blocks, the fingerprint and the registered tensors follow from it. Does not import vLLM.
"""

from __future__ import annotations

import os
from typing import Any

from kvferry.client.vllm.model import read_path
from kvferry.client.vllm.packed_groups import PackedGroups, read_packed_groups
from kvferry.client.vllm.packing import packs

# Layers of which all ranks hold the same bytes, in versions of vLLM without `kv_tp_replicas`.
LATENT_SPECS = frozenset({"MLAAttentionSpec", "SlidingWindowMLASpec"})


def offloaded_groups(kv_cache_config: Any) -> list[Any]:
    """The KV cache groups that are offloaded; since vLLM 0.30 some may not be."""
    groups = kv_cache_config.kv_cache_groups
    ids = getattr(kv_cache_config, "prefix_cacheable_group_ids", range(len(groups)))
    return [groups[group_id] for group_id in ids]


def layer_spec(group: Any) -> Any:
    """The spec of a group's first layer: of more the scheduler does not know."""
    spec = getattr(group, "kv_cache_spec", None)
    layers = getattr(spec, "kv_cache_specs", None)
    return next(iter(layers.values())) if layers else spec


def block_bytes(kv_cache_config: Any) -> int:
    """Bytes of one block of all groups on one rank, with padding."""
    tensors = kv_cache_config.kv_cache_tensors
    # With block_stride, the size of each tensor is that of the buffer in which all are (of packed
    # ones before vLLM 0.29, of all since).
    packed = any(getattr(tensor, "block_stride", 0) for tensor in tensors)
    total = tensors[0].size if packed else sum(tensor.size for tensor in tensors)
    return int(total // kv_cache_config.num_blocks)


def packed_groups(vllm_config: Any, kv_cache_config: Any) -> PackedGroups | None:
    """The groups of a packed buffer; None if host blocks are what vLLM's connector copies.

    Ranks of a pipeline have other layers, and the scheduler knows those of rank 0 only: None then.
    """
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        return None
    layout = kv_layout(vllm_config, kv_cache_config)
    return read_packed_groups(kv_cache_config, offloaded_groups(kv_cache_config), layout)


def packs_blocks(vllm_config: Any, kv_cache_config: Any) -> bool:
    """Whether host blocks are packed. Raises Refused (BAD_CONFIG)."""
    return packs(
        vllm_config,
        offloaded_groups(kv_cache_config),
        block_bytes(kv_cache_config),
        rows=packed_groups(vllm_config, kv_cache_config) is not None,
    )


def is_replicated(vllm_config: Any, kv_cache_config: Any) -> bool:
    """Whether all ranks hold the same bytes, as of MLA. The same in the scheduler and in workers.

    Not with pipeline or context parallelism, nor if any KV cache group depends on the rank.
    """
    parallel = vllm_config.parallel_config
    ranks = parallel.tensor_parallel_size
    if ranks == 1 or parallel.world_size != ranks or parallel.decode_context_parallel_size > 1:
        return False
    replicas = getattr(kv_cache_config, "kv_tp_replicas", None)
    if replicas is not None:
        return bool(replicas == ranks)
    # The scheduler knows one layer of each group; a drafting layer may be in the group of others.
    specs = map(layer_spec, offloaded_groups(kv_cache_config))
    return vllm_config.speculative_config is None and all(
        type(spec).__name__ in LATENT_SPECS for spec in specs
    )


def kv_layout(vllm_config: Any, kv_cache_config: Any = None) -> str:
    """The layout that vLLM resolved (since 0.29), as "LBHNC"; else the one that the user set.

    kv_cache_config: None before vLLM has planned it. Before 0.29 the layout follows from that
    setting, the attention backend and the connector.
    """
    resolved = resolved_layout(vllm_config, kv_cache_config)
    return resolved or chosen_layout()


def resolved_layout(vllm_config: Any, kv_cache_config: Any) -> str:
    """The layout that vLLM resolved; empty before 0.29."""
    return str(
        getattr(kv_cache_config, "kv_cache_layout", None)
        or read_path(vllm_config, "cache_config.kv_cache_layout")
    )


def chosen_layout() -> str:
    """The layout that the user set, if any."""
    return os.environ.get("VLLM_KV_CACHE_LAYOUT", "")
