"""The KV cache of a model like DeepSeek V4, planned and allocated by vLLM's own code.

Layers attend to a window of 128 tokens and to compressed tokens: four to a state (with an indexer),
or 128. Compressors keep float32 states of the last tokens. vLLM packs all of it into rows of one
buffer. Importing this needs vLLM.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
)

from kvferry.client import shared_empty
from support.vllm_runner import ONE_ALLOCATION

# The ratios of compression of the layers of DeepSeek V4 Flash; 1: only the window.
FLASH = (1, 1, *(4, 128) * 20, 4)
# The same kinds of layers in fewer numbers.
SMALL = (1, 4, 128, 4)

_names = {field.name for field in fields(MLAAttentionSpec)}
_RATIO = "tokens_per_state" if "tokens_per_state" in _names else "compress_ratio"


def layer_specs(ratios: tuple[int, ...]) -> dict[str, Any]:
    """The specs of all caches, by name, as the model's layers give them for fp8_ds_mla."""
    specs: dict[str, Any] = {}
    for n, ratio in enumerate(ratios):
        packed = _tokens(64)
        specs[f"{n}.window"] = SlidingWindowMLASpec(**packed, sliding_window=128)
        if ratio > 1:
            specs[f"{n}.latent"] = MLAAttentionSpec(**_tokens(256), **{_RATIO: ratio})
            specs[f"{n}.states"] = _states(512, ratio)
        if ratio == 4:
            indexer = {"head_size": 132, "dtype": torch.uint8, "alignment": 576}
            specs[f"{n}.indexer"] = MLAAttentionSpec(
                block_size=256, num_kv_heads=1, **indexer, **{_RATIO: ratio}
            )
            specs[f"{n}.indexer states"] = _states(128, ratio)
    return specs


def _tokens(block_size: int) -> dict[str, Any]:
    shape = {"block_size": block_size, "num_kv_heads": 1, "head_size": 512, "dtype": torch.uint8}
    shape |= {"cache_dtype_str": "fp8_ds_mla", "alignment": 576, "model_version": "deepseek_v4"}
    if "state_content_bytes" in _names:
        shape["state_content_bytes"] = 584
    return shape


def _states(width: int, ratio: int) -> Any:
    """The states of a compressor: of the tokens of two windows that overlap, if ratio is 4."""
    windows = 2 if ratio == 4 else 1
    return SlidingWindowMLASpec(
        block_size=4 if ratio == 4 else 8,
        num_kv_heads=1,
        head_size=2 * windows * width,
        dtype=torch.float32,
        sliding_window=windows * ratio,
        alignment=576,
    )


def plan(config: Any, specs: dict[str, Any], blocks: int) -> KVCacheConfig:
    """The worker's configuration, with `blocks` GPU blocks. config: a VllmConfig."""
    config.cache_config.num_gpu_blocks_override = blocks
    config.scheduler_config.disable_hybrid_kv_cache_manager = False
    if not ONE_ALLOCATION:
        groups = kv_cache_utils.get_kv_cache_groups(config, specs)
        return kv_cache_utils.get_kv_cache_config_from_groups(config, groups, 1 << 40)
    from vllm.v1.core import kv_cache_planning

    config.cache_config.kv_cache_layout = "BLHNC"
    groups = kv_cache_planning.get_kv_cache_groups(config, specs)
    planned = kv_cache_planning.get_kv_cache_config_from_groups(config, groups, 1 << 40)
    planned.kv_cache_layout = "BLHNC"
    return planned


def allocate(caches: KVCacheConfig) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The buffer as rows, (blocks, row bytes), in shared memory, and the tensor of each layer."""
    buffer = shared_empty((caches.kv_cache_tensors[0].size,), torch.int8, "cpu")
    rows = buffer.view(caches.num_blocks, -1)
    specs = {
        name: spec
        for group in caches.kv_cache_groups
        for name, spec in group.kv_cache_spec.kv_cache_specs.items()
    }
    layers: dict[str, torch.Tensor] = {}
    for tensor in caches.kv_cache_tensors:
        if not ONE_ALLOCATION:
            for name in tensor.shared_by:
                end = tensor.offset + specs[name].page_size_bytes
                layers[name] = rows[:, tensor.offset : end]
            continue
        from vllm.v1.kv_cache_interface import create_kv_cache_views
        from vllm.v1.kv_cache_layout import KVCacheLayout

        created = create_kv_cache_views(
            buffer, specs[tensor.layers[0]], caches.num_blocks, KVCacheLayout.BLHNC, tensor
        )
        layers |= zip(tensor.layers, created, strict=True)
    return rows, layers
