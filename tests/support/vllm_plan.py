"""vLLM's configuration of an engine over the connector, and the KV cache of its groups.

groups: names in vllm_runner.specs, of a layer each. Importing this needs vLLM.
"""

from __future__ import annotations

import json
import os
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor

from support.vllm_runner import (
    ALIGNED,
    COMPRESSOR_PAGE,
    COMPRESSOR_TOKENS,
    ONE_ALLOCATION,
    PAGE,
    PREFIX_UNIT,
    TOKENS,
    WIDTH,
    specs,
)


def kvferry_transfer(options: dict[str, Any]) -> dict[str, Any]:
    """Arguments of KVTransferConfig."""
    return {
        "kv_connector": "KVFerryConnector",
        "kv_connector_module_path": "kvferry.client.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": options,
    }


@cache
def _model(directory: str | None = None, longest: int = 4096) -> ModelConfig:
    """The configuration of a model whose weights are not loaded.

    directory: for its files; processes may use one at the same time. longest: tokens of a request.
    """
    folder = Path(directory or tempfile.mkdtemp(prefix="kvferry-model-"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "vocab_size": 1000,
        "max_position_embeddings": longest,
        "torch_dtype": "bfloat16",
    }
    written = folder / f"{os.getpid()}.json"
    written.write_text(json.dumps(config))
    written.rename(folder / "config.json")
    return ModelConfig(model=str(folder), skip_tokenizer_init=True, max_model_len=longest, seed=0)


def engine_config(
    options: dict[str, Any],
    drafts: int = 0,
    folder: str | None = None,
    longest: int = 4096,
    batch: int = 256,
    **transfer: Any,
) -> VllmConfig:
    model = _model(folder, longest)
    return VllmConfig(
        model_config=model,
        speculative_config=SpeculativeConfig(
            method="eagle",
            model=model.model,
            num_speculative_tokens=drafts,
            target_model_config=model,
            target_parallel_config=ParallelConfig(),
        )
        if drafts
        else None,
        scheduler_config=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=batch,
            max_model_len=longest,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
        cache_config=CacheConfig(block_size=TOKENS, enable_prefix_caching=True),
        kv_transfer_config=KVTransferConfig(**kvferry_transfer(options) | transfer),
        device_config=DeviceConfig("cpu"),
    )


def set_cache_layout(config: VllmConfig, groups: tuple[str, ...]) -> None:
    """As vLLM does after it has loaded the model."""
    cache = config.cache_config
    if ONE_ALLOCATION:
        cache.kv_cache_layout = "BLHNC" if "compressor" in groups else "LBHNC"
    if any(group.endswith("states") for group in groups):
        cache.mamba_cache_mode = "align" if any(group in ALIGNED for group in groups) else "all"
        cache.mamba_block_size = TOKENS
    if "partial states" in groups:  # --prefix-match-unit
        cache.prefix_match_unit = PREFIX_UNIT


def layer_of(rows: torch.Tensor, group: str) -> Any:
    """A layer's KV cache in the form in which vLLM gives it to connectors."""
    if group.endswith("states"):
        return rows
    if group == "compressor":
        rows = rows[:, :COMPRESSOR_PAGE].view(torch.float32)
        shape: tuple[int, ...] = COMPRESSOR_TOKENS, 2
    else:
        shape = TOKENS, WIDTH
    shape = (1, *shape) if ONE_ALLOCATION else shape
    return rows.view(rows.shape[0], *shape)


def plan_caches(groups: tuple[str, ...], blocks: int, drafts: int) -> KVCacheConfig:
    drafting = groups[0] if drafts and len(groups) == 1 else "draft"
    return KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=_tensors(groups, blocks * PAGE, packed="compressor" in groups),
        kv_cache_groups=[
            # The layers that draft are in a group of their own, or in the only one.
            KVCacheGroupSpec([name], specs(drafts)[name], is_eagle_group=name == drafting)
            for name in groups
        ],
    )


def _tensors(groups: tuple[str, ...], size: int, packed: bool) -> list[KVCacheTensor]:
    """packed: as vLLM packs groups whose blocks have different sizes, into rows of PAGE bytes."""
    if ONE_ALLOCATION:
        pages = {name: COMPRESSOR_PAGE if name == "compressor" else PAGE for name in groups}
        strides = {name: page if packed else size for name, page in pages.items()}
        return [KVCacheTensor(size, [name], strides[name], PAGE) for name in groups]
    if not packed:
        return [KVCacheTensor(size=size, shared_by=list(groups))]
    # Before 0.29 a tensor is a slot of the row.
    large = [name for name in groups if name != "compressor"]
    return [
        KVCacheTensor(size=size, shared_by=list(groups), block_stride=PAGE),
        KVCacheTensor(size=size, shared_by=large, offset=COMPRESSOR_PAGE, block_stride=PAGE),
    ]
