"""KV cache configurations of vLLM, and the fingerprint of an engine with such a configuration."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from kvferry.client import Fingerprint
from kvferry.client.vllm.engine_config import BlockSizes
from kvferry.client.vllm.fingerprint import read_fingerprint
from support.vllm_stand_ins import vllm_config

TWO_MIB = 2 << 20
BLOCKS = BlockSizes((16,), 16, 1)
BF16 = SimpleNamespace(dtype="torch.bfloat16", kv_quant_mode=0)
FP8 = SimpleNamespace(dtype="torch.uint8", kv_quant_mode=1)
SPARSE = SimpleNamespace(dtype="torch.uint8", cache_dtype_str="fp8_ds_mla", kv_quant_mode=1)
NVFP4 = SimpleNamespace(dtype="torch.uint8", kv_quant_mode=5)


def caches(*specs: Any, num_blocks: int = 10, stride: int = 0, **fields: Any) -> Any:
    """A KVCacheConfig of vLLM before 0.29: a tensor per layer, or packed ones with a stride."""
    tensors = [
        SimpleNamespace(
            size=TWO_MIB // 2 * num_blocks,
            shared_by=[name],
            block_stride=stride,
            offset=n * stride // 2,
        )
        for n, name in enumerate("ab")
    ]
    groups = [
        SimpleNamespace(layer_names=["a", "b"], kv_cache_spec=spec) for spec in specs or (BF16,)
    ]
    return SimpleNamespace(
        num_blocks=num_blocks, kv_cache_tensors=tensors, kv_cache_groups=groups, **fields
    )


def one_buffer(layout: str, num_blocks: int = 10, page: int = 4096, offset: int = 0) -> Any:
    """A KVCacheConfig of vLLM 0.29 and newer: all layers in one buffer."""
    block_outermost = layout.startswith("B")
    tensor = SimpleNamespace(
        size=2 * page * num_blocks,
        layers=["a", "b"],
        layer_stride=page if block_outermost else page * num_blocks,
        block_stride=2 * page if block_outermost else page,
        offset=offset,
    )
    groups = [SimpleNamespace(layer_names=["a", "b"], kv_cache_spec=BF16)]
    return SimpleNamespace(
        num_blocks=num_blocks,
        kv_cache_tensors=[tensor],
        kv_cache_groups=groups,
        kv_cache_layout=layout,
    )


def nothing(config: Any) -> None:
    pass


def read(
    kv_cache_config: Any = None,
    blocks: BlockSizes = BLOCKS,
    change: Callable[[Any], None] = nothing,
    **extra: Any,
) -> Fingerprint:
    config = vllm_config("engine", extra)
    change(config)
    return read_fingerprint(config, kv_cache_config or caches(), blocks)
