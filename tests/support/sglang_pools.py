"""The pools and allocators of SGLang that a server without a model has, and what its pages contain.

On the CPU the buffers are in shared memory. Needs SGLang.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
from sglang.srt.mem_cache.allocator import (
    PagedTokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import (
    DSATokenToKVPool,
    HybridLinearKVPool,
    HybridReqToTokenPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
    ReqToTokenPool,
)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

WINDOW = 10
# Of the kinds that cannot have others: Mamba layers with larger pages need SGLang's extra buffer.
PAGE_SIZES = {"mamba": 1, "dsa": 64}
# Multipliers that separate the words of pages, buffers and positions.
BUFFER_STEP, WORD_STEP = 0x9E3779B1, 0x85EBCA77


@dataclass(frozen=True)
class ModelShape:
    """What the bytes of a token depend on. latent and rope: of MLA. max_tokens: of a request."""

    layers: int = 3
    heads: int = 2
    head_dim: int = 16
    latent: int = 32
    rope: int = 16
    max_tokens: int = 4096


SMALL = ModelShape()


@dataclass
class Pools:
    """What a server allocates. buffers: pages of full attention layers; window_buffers: of sliding
    windows; states: of Mamba layers, as (pages, words) each, int32; drafts: pools of a model that
    drafts tokens."""

    pool: Any
    allocator: Any
    requests: Any
    components: tuple[ComponentType, ...]
    buffers: Sequence[torch.Tensor]
    window_buffers: Sequence[torch.Tensor] = ()
    states: Sequence[torch.Tensor] = ()
    drafts: tuple[Any, ...] = ()

    def overwrite(self) -> None:
        for rows in (*self.buffers, *self.window_buffers, *self.states):
            rows.zero_()


def make_pools(
    kind: str, pages: int, page_size: int, device: str = "cpu", shape: ModelShape = SMALL
) -> Pools:
    """kind: "mha", "fp8", "mla", "dsa" (MLA with an indexer), "draft" (MHA, and a drafting
    model's), "swa" (one layer of full attention, and two with a sliding window of WINDOW tokens) or
    "mamba" (one, and two with states)."""
    full_only = (ComponentType.FULL,)
    requests: Any = ReqToTokenPool(8, shape.max_tokens, device, enable_memory_saver=False)
    sizes: dict[str, Any] = {
        "size": pages * page_size,
        "page_size": page_size,
        "dtype": torch.float8_e4m3fn if kind == "fp8" else torch.bfloat16,
        "device": device,
        "enable_memory_saver": False,
    }
    heads = {"head_num": shape.heads, "head_dim": shape.head_dim}
    if kind == "swa":
        window_size = sizes["size"] * 3 // 4
        swa = SWAKVPool(
            **sizes,
            **heads,
            size_swa=window_size,
            full_attention_layer_ids=[0],
            swa_attention_layer_ids=[1, 2],
        )
        allocator = SWATokenToKVPoolAllocator(
            sizes["size"], window_size, page_size, swa.dtype, device, swa, need_sort=True
        )
        full, window = swa.full_kv_pool, swa.swa_kv_pool
        return Pools(
            swa,
            allocator,
            requests,
            (ComponentType.FULL, ComponentType.SWA),
            rows_of(page_size, *full.k_buffer, *full.v_buffer),
            rows_of(page_size, *window.k_buffer, *window.v_buffer),
        )
    if kind == "mamba":
        requests = hybrid_requests(device, shape.max_tokens)
        mamba = requests.mamba_pool
        hybrid = HybridLinearKVPool(
            **sizes, **heads, full_attention_layer_ids=[0], mamba_pool=mamba
        )
        tokens = TokenToKVPoolAllocator(sizes["size"], hybrid.dtype, device, hybrid, need_sort=True)
        attention, cache = hybrid.full_kv_pool, mamba.mamba_cache
        states = (cache.temporal, *cache.conv)
        share(states)  # its layers are views
        layers = range(mamba.num_mamba_layers)
        return Pools(
            hybrid,
            tokens,
            requests,
            (ComponentType.FULL, ComponentType.MAMBA),
            rows_of(page_size, *attention.k_buffer, *attention.v_buffer),
            states=rows_of(1, *(each[layer] for each in states for layer in layers)),
        )
    latent = {
        "kv_lora_rank": shape.latent,
        "qk_rope_head_dim": shape.rope,
        "layer_num": shape.layers,
    }
    drafts: tuple[Any, ...] = ()
    index: list[torch.Tensor] = []
    if kind == "mla":
        pool = MLATokenToKVPool(**sizes, **latent)
        buffers = [*pool.kv_buffer]
    elif kind == "dsa":
        pool = DSATokenToKVPool(**sizes, **latent, index_head_dim=128, kv_cache_dim=48)
        buffers, index = [*pool.kv_buffer], [*pool.index_k_with_scale_buffer]
    else:
        pool = MHATokenToKVPool(**sizes, **heads, layer_num=shape.layers)
        buffers = [*pool.k_buffer, *pool.v_buffer]
    if kind == "draft":
        draft = MHATokenToKVPool(**sizes, **heads, layer_num=1)
        drafts = (draft,)
        buffers += [*draft.k_buffer, *draft.v_buffer]
    paged = PagedTokenToKVPoolAllocator(
        sizes["size"], page_size, pool.dtype, device, pool, need_sort=True
    )
    rows = [*rows_of(page_size, *buffers), *rows_of(1, *index)]
    return Pools(pool, paged, requests, full_only, rows, drafts=drafts)


def hybrid_requests(device: str, max_tokens: int) -> HybridReqToTokenPool:
    shape = Mamba2StateShape.create(
        tp_world_size=1,
        intermediate_size=16,
        n_groups=1,
        num_heads=2,
        head_dim=8,
        state_size=4,
        conv_kernel=4,
    )
    return HybridReqToTokenPool(
        size=8,
        mamba_size=24,
        mamba_spec_state_size=8,
        max_context_len=max_tokens,
        device=device,
        enable_memory_saver=False,
        cache_params=Mamba2CacheParams(shape=shape, layers=[1, 2]),
        mamba_layer_ids=[1, 2],
        enable_mamba_extra_buffer=False,
    )


def share(buffers: Iterable[torch.Tensor]) -> None:
    """Move buffers of the CPU to shared memory."""
    for buffer in buffers:
        if buffer.device.type == "cpu" and not buffer.is_shared():  # type: ignore[no-untyped-call]
            buffer.share_memory_()  # type: ignore[no-untyped-call]


def rows_of(slots: int, *buffers: torch.Tensor) -> list[torch.Tensor]:
    """Buffers as (pages, words) of int32. slots: their rows per page."""
    share(buffers)
    found: list[torch.Tensor] = []
    for buffer in buffers:
        pages = buffer.shape[0] // slots
        found.append(buffer[: pages * slots].view(torch.uint8).reshape(pages, -1).view(torch.int32))
    return found


def page_numbers(tokens: Sequence[int], page_size: int, salt: str = "") -> torch.Tensor:
    """A number per page that follows from its tokens and all before; int64."""
    checksum = zlib.crc32(salt.encode())
    numbers = []
    data = np.asarray(tokens, np.int64)
    for start in range(0, len(tokens), page_size):
        checksum = zlib.crc32(data[start : start + page_size].tobytes(), checksum)
        numbers.append(checksum)
    return torch.tensor(numbers, dtype=torch.int64)


def contents(numbers: torch.Tensor, buffer: int, words: int) -> torch.Tensor:
    """What the pages with these numbers contain in a buffer: (pages, words), int32. Words differ,
    so a part that is at another place is noticed. As bfloat16 they can be packed."""
    positions = torch.arange(words, device=numbers.device) * WORD_STEP
    rows: torch.Tensor = numbers[:, None] + buffer * BUFFER_STEP + positions
    return (rows & 0x83FF83FF | 0x3C003C00).to(torch.int32)
