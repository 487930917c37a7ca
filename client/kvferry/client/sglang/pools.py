"""The KV pools of an SGLang server, in canonical form: what is offloaded, and what one key names.

The tree names slots of three *sources*: pages of the full attention layers (kv), pages of the
sliding window layers (swa), and one state of the Mamba layers (mamba). Each source has a buffer per
layer (or two: K and V); pools that share the slots of another, such as an indexer's or a drafting
model's, belong to its source.

All host blocks of a namespace have one size. A page and a state may differ by orders of magnitude,
so the buffers of a larger source are divided into several KV cache groups of about the same bytes.
A key names the bytes of one group, so a page of such a source has several keys, and counts only if
all of them are found.

If full attention is the only source, its buffers are in the order of their layers, and a load may
name a section of them (KVLayout.sections): the first layers are computed while later ones are
copied.

Needs SGLang. Called when a server starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.memory_pool import (
    DSATokenToKVPool,
    HybridLinearKVPool,
    MambaPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from kvferry.client.engines.options import PackMode
from kvferry.client.sglang.packing import packs
from kvferry.client.tensors.canonical import CanonicalKVCaches
from kvferry.proto.errors import Code, Refused
from kvferry.proto.keys import OffloadKey, offload_key
from kvferry.proto.specs import MAX_GROUPS, KVLayout, TensorLayout, TensorRef


@dataclass(frozen=True, slots=True)
class Source:
    """The buffers whose slots the tree names with one kind of index.

    name: a value of SGLang's PoolName. buffers: of (blocks, values) each. slots: of the tree, per
    block: a page's tokens, or 1. groups: its KV cache groups.
    """

    name: str
    buffers: tuple[torch.Tensor, ...]
    slots: int
    groups: range = range(0)

    def keys(self, hashes: Iterable[str]) -> list[tuple[OffloadKey, ...]]:
        """The keys of each page: one per group. hashes: SGLang's, hexadecimal."""
        groups = self.groups
        return [
            tuple([offload_key(digest, group) for group in groups])
            for digest in map(bytes.fromhex, hashes)
        ]


# Sections of a load: the first layer waits for an eighth of the copy. A copy of half a GiB takes
# 10 ms of the link, and a job less than a millisecond.
SECTIONS = 8


@dataclass(frozen=True, slots=True)
class OffloadedPools:
    """sources: in the order of their groups. replicated: whether all ranks hold the same bytes.
    layers: whose buffers are in order, and may be loaded by sections; 1: loads arrive whole."""

    sources: tuple[Source, ...]
    kv_caches: CanonicalKVCaches
    replicated: bool
    layers: int = 1

    def source(self, name: str) -> Source:
        return next(source for source in self.sources if source.name == name)


def read_pools(
    kvcache: Any, params: Any, page_size: int, mode: PackMode = PackMode.AUTO
) -> OffloadedPools:
    """The pools of a server. params: SGLang's CacheInitParams. Raises Refused (BAD_CONFIG)."""
    target = [Source("kv", tuple(_attention(kvcache, page_size)), page_size)]
    replicated = isinstance(kvcache, MLATokenToKVPool)
    if isinstance(kvcache, SWAKVPool):
        pages = tuple(_pages(kvcache.swa_kv_pool, page_size))
        target.append(Source("swa", pages, page_size))
    if (mamba := getattr(params.req_to_token_pool, "mamba_pool", None)) is not None:
        target.append(Source("mamba", tuple(_states(mamba, params.req_to_token_pool)), 1))
    drafts = [*params.mtp_draft_device_pools, *params.sidecar_draft_device_pools]
    for draft in drafts:
        kv = target[0]
        buffers = (*kv.buffers, *_pages(draft, page_size))
        target[0] = Source(kv.name, buffers, kv.slots)
        replicated = replicated and isinstance(draft, MLATokenToKVPool)
    layers = 1
    if len(target) == 1 and not drafts and type(kvcache) in (MHATokenToKVPool, MLATokenToKVPool):
        layers = kvcache.layer_num
    return canonical_pools(target, replicated=replicated, packed=packs(mode, target), layers=layers)


def canonical_pools(
    sources: Sequence[Source], *, replicated: bool, packed: bool, layers: int = 1
) -> OffloadedPools:
    """Number the buffers, and divide those of each source into groups of about the same bytes."""
    sources = [
        Source(each.name, tuple(buffer.view(torch.int8) for buffer in each.buffers), each.slots)
        for each in sources
    ]
    block_bytes = _host_block_bytes(sources)
    tensors: list[torch.Tensor] = []
    groups: list[tuple[TensorRef, ...]] = []
    divided: list[Source] = []
    for source in sources:
        first = len(groups)
        refs: list[TensorRef] = []
        for buffer in source.buffers:
            nbytes = buffer.shape[1]
            if refs and sum(ref.page_size_bytes for ref in refs) + nbytes > block_bytes:
                groups.append(tuple(refs))
                refs = []
            refs.append(TensorRef(len(tensors), nbytes))
            tensors.append(buffer)
        groups.append(tuple(refs))
        numbers = range(first, len(groups))
        divided.append(Source(source.name, source.buffers, source.slots, numbers))
    layouts = tuple(
        TensorLayout(tensor.shape[0], tensor.shape[1], tensor.stride(0)) for tensor in tensors
    )
    sections = min(SECTIONS, layers)
    layout = KVLayout(layouts, tuple(groups), packed=packed, sections=sections)
    kv_caches = CanonicalKVCaches(layout, tuple(tensors))
    return OffloadedPools(tuple(divided), kv_caches, replicated, layers)


def _host_block_bytes(sources: Sequence[Source]) -> int:
    """The bytes of the smallest source's block, or as many as MAX_GROUPS groups need."""
    sizes = [[buffer.shape[1] for buffer in source.buffers] for source in sources]
    largest = max(map(max, sizes))
    fewest = MAX_GROUPS - len(sources)
    return max(min(map(sum, sizes)), largest, 2 * sum(map(sum, sizes)) // fewest)


def _attention(kvcache: Any, page_size: int) -> Iterator[torch.Tensor]:
    """The buffers that the tree names as KV."""
    if type(kvcache) is SWAKVPool:
        return _pages(kvcache.full_kv_pool, page_size)
    if type(kvcache) is HybridLinearKVPool:
        return _pages(kvcache.full_kv_pool, page_size)
    return _pages(kvcache, page_size)


def _pages(pool: Any, page_size: int) -> Iterator[torch.Tensor]:
    """The buffers of one pool, by page."""
    kind = type(pool)
    if pool.page_size != page_size:
        raise _unsupported(kind, f"pages of {pool.page_size} tokens, not {page_size}")
    if pool.post_capture_active:
        message = (
            "CUDA IPC cannot share KV pools that are allocated after CUDA graphs; start the server "
            "without SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"
        )
        raise Refused(Code.BAD_CONFIG, message, kind.__name__)
    if kind is MHATokenToKVPool:
        if pool.kv_cache_layout != "nhd":
            raise _unsupported(kind, f"the layout {pool.kv_cache_layout}")
        scales = pool.k_scale_buffer, getattr(pool, "native_k_scale_buffer", None)
        if any(scale is not None for scale in scales):
            raise _unsupported(kind, "scales beside its KV; use --kv-cache-dtype auto or fp8_e4m3")
        layers = zip(pool.k_buffer, pool.v_buffer, strict=True)
        buffers = list(chain.from_iterable(layers))
    elif kind in (MLATokenToKVPool, DSATokenToKVPool):
        buffers = [*pool.kv_buffer]
    else:
        raise _unsupported(kind, "a layout of its own")
    for buffer in buffers:
        yield _rows(buffer, page_size, pool)
    for buffer in getattr(pool, "index_k_with_scale_buffer", ()):
        yield _rows(buffer, 1, pool)


def _states(mamba: Any, req_to_token_pool: Any) -> Iterator[torch.Tensor]:
    """The states of the Mamba layers, by slot."""
    if type(mamba) is not MambaPool:
        raise _unsupported(type(mamba), "a layout of its own")
    for name in ("mamba_ckpt_pool", "short_conv_pool", "ngram_pool"):
        side = getattr(req_to_token_pool, name, None)
        if side is not None and getattr(side, "enabled", True):
            raise _unsupported(type(mamba), f"a {name} beside it")
    if mamba.replayssm_write_pos is not None:
        raise _unsupported(type(mamba), "inputs that are not in its states yet (replayssm)")
    cache = mamba.mamba_cache
    for state in (cache.temporal, *cache.conv):
        if state.numel():
            for layer in range(mamba.num_mamba_layers):
                yield _rows(state[layer], 1, mamba)


def _rows(buffer: torch.Tensor, slots: int, pool: Any) -> torch.Tensor:
    """A buffer as (blocks, values). slots: rows of the buffer per block."""
    if not buffer.is_contiguous():
        raise _unsupported(type(pool), f"a buffer with the strides {buffer.stride()}")
    blocks = buffer.shape[0] // slots
    return buffer[: blocks * slots].reshape(blocks, -1)


def _unsupported(kind: type, what: str) -> Refused:
    message = (
        f"this server's KV pool {kind.__name__} has {what}, which kvferry does not offload; start "
        "the server without --enable-unified-cache-external-linker"
    )
    return Refused(Code.BAD_CONFIG, message, kind.__name__)


def pool_names(pools: OffloadedPools) -> dict[PoolName, Source]:
    """What SGLang reads of a linker: by name, the pools whose transfers it takes."""
    return {PoolName(source.name): source for source in pools.sources}
