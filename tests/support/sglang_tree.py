"""A server's cache without a model: SGLang's tree, pools, allocator and wrapper, and a daemon.

`TreeServer.run` does for one request what SGLang's scheduler does: match, load back, allocate,
compute (here: write contents that follow from the tokens), insert, release. What a match promises
is compared with those contents when its layers are read. Needs SGLang, and no GPU.
"""

from __future__ import annotations

import itertools
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from sglang.srt import runtime_context
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.mem_cache.allocator import (
    PagedTokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InitLoadBackParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import match_kv_cache, release_kv_cache
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
from sglang.srt.mem_cache.unified_cache.linker_factory import create_unified_cache_linker
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs

from kvferry.client.sglang.linker import KVFerryLinker
from support.eventually import wait_until

CONFIG = """{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
"intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
"num_hidden_layers": 3, "vocab_size": 1000, "max_position_embeddings": 4096,
"torch_dtype": "bfloat16", "rms_norm_eps": 1e-5}"""
LAYERS, MAX_TOKENS, WINDOW = 3, 4096, 10
# Of the kinds that cannot have others: Mamba layers with larger pages need SGLang's extra buffer.
PAGE_SIZES = {"mamba": 1, "dsa": 64}
Rows: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]


@cache
def publish_server_args(directory: Path, page_size: int) -> ServerArgs:
    """The configuration of this process. directory: of a model, which is created."""
    (directory / "config.json").write_text(CONFIG)
    server_args = ServerArgs(
        model_path=str(directory),
        device="cpu",
        page_size=page_size,
        skip_tokenizer_init=True,
        enable_unified_cache_external_linker=True,
        unified_cache_external_linker_backend="dynamic",
        unified_cache_external_linker_config={
            "linker": "KVFerryLinker",
            "linker_module_path": "kvferry.client.sglang",
        },
    )
    runtime_context.publish(server_args, role="scheduler")
    return server_args


@dataclass
class Pools:
    """What a server allocates. buffers: pages of full attention layers; window_buffers: of sliding
    windows; states: of Mamba layers; drafts: pools of a model that drafts tokens."""

    pool: Any
    allocator: Any
    requests: Any
    components: tuple[ComponentType, ...]
    buffers: Sequence[Rows]
    window_buffers: Sequence[Rows] = ()
    states: Sequence[Rows] = ()
    drafts: tuple[Any, ...] = ()

    def overwrite(self) -> None:
        for rows in (*self.buffers, *self.window_buffers, *self.states):
            rows[:] = 0


def make_pools(kind: str, pages: int, page_size: int) -> Pools:
    """On the CPU, in shared memory. kind: "mha", "fp8", "mla", "dsa" (MLA with an indexer), "draft"
    (MHA, and a drafting model's), "swa" (one layer of full attention, and two with a sliding window
    of WINDOW tokens) or "mamba" (one, and two with states)."""
    full_only = (ComponentType.FULL,)
    requests: Any = ReqToTokenPool(8, MAX_TOKENS, "cpu", enable_memory_saver=False)
    sizes: dict[str, Any] = {
        "size": pages * page_size,
        "page_size": page_size,
        "dtype": torch.float8_e4m3fn if kind == "fp8" else torch.bfloat16,
        "device": "cpu",
        "enable_memory_saver": False,
    }
    heads = {"head_num": 2, "head_dim": 16}
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
            sizes["size"], window_size, page_size, swa.dtype, "cpu", swa, need_sort=True
        )
        full, window = swa.full_kv_pool, swa.swa_kv_pool
        pools = Pools(
            swa,
            allocator,
            requests,
            (ComponentType.FULL, ComponentType.SWA),
            rows_of(page_size, *full.k_buffer, *full.v_buffer),
            rows_of(page_size, *window.k_buffer, *window.v_buffer),
        )
    elif kind == "mamba":
        requests = hybrid_requests()
        mamba = requests.mamba_pool
        hybrid = HybridLinearKVPool(
            **sizes, **heads, full_attention_layer_ids=[0], mamba_pool=mamba
        )
        tokens = TokenToKVPoolAllocator(sizes["size"], hybrid.dtype, "cpu", hybrid, need_sort=True)
        attention, cache = hybrid.full_kv_pool, mamba.mamba_cache
        for states in (cache.temporal, *cache.conv):
            states.share_memory_()  # its layers are views
        layers = range(mamba.num_mamba_layers)
        pools = Pools(
            hybrid,
            tokens,
            requests,
            (ComponentType.FULL, ComponentType.MAMBA),
            rows_of(page_size, *attention.k_buffer, *attention.v_buffer),
            states=rows_of(
                1, *(each[layer] for each in (cache.temporal, *cache.conv) for layer in layers)
            ),
        )
    else:
        latent = {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "layer_num": LAYERS}
        drafts: tuple[Any, ...] = ()
        index: list[torch.Tensor] = []
        if kind == "mla":
            pool = MLATokenToKVPool(**sizes, **latent)
            buffers = [*pool.kv_buffer]
        elif kind == "dsa":
            pool = DSATokenToKVPool(**sizes, **latent, index_head_dim=128, kv_cache_dim=48)
            buffers, index = [*pool.kv_buffer], [*pool.index_k_with_scale_buffer]
        else:
            pool = MHATokenToKVPool(**sizes, **heads, layer_num=LAYERS)
            buffers = [*pool.k_buffer, *pool.v_buffer]
        if kind == "draft":
            draft = MHATokenToKVPool(**sizes, **heads, layer_num=1)
            drafts = (draft,)
            buffers += [*draft.k_buffer, *draft.v_buffer]
        paged = PagedTokenToKVPoolAllocator(
            sizes["size"], page_size, pool.dtype, "cpu", pool, need_sort=True
        )
        rows = [*rows_of(page_size, *buffers), *rows_of(1, *index)]
        pools = Pools(pool, paged, requests, full_only, rows, drafts=drafts)
    return pools


def hybrid_requests() -> HybridReqToTokenPool:
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
        max_context_len=MAX_TOKENS,
        device="cpu",
        enable_memory_saver=False,
        cache_params=Mamba2CacheParams(shape=shape, layers=[1, 2]),
        mamba_layer_ids=[1, 2],
        enable_mamba_extra_buffer=False,
    )


class TreeServer:
    """The cache of one server. core: "python" or "rust", the tree's. extra: options of the linker.
    group: of the ranks of a server; runtime_dir is then of this rank's daemon.

    compared: pages that matches promised; wrong: buffers of them with other contents. failed:
    requests whose load failed.
    """

    def __init__(
        self,
        server_args: ServerArgs,
        runtime_dir: Path,
        *,
        kind: str = "mha",
        core: str = "python",
        pages: int = 64,
        connected: bool = True,
        group: Any = None,
        **extra: Any,
    ) -> None:
        self.page_size = PAGE_SIZES.get(kind, server_args.page_size)
        size = pages if kind == "dsa" else pages * server_args.page_size // self.page_size
        self.pools = make_pools(kind, size, self.page_size)
        self.pool, self.allocator = self.pools.pool, self.pools.allocator
        self.requests = self.pools.requests
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.requests,
            token_to_kv_pool_allocator=self.allocator,
            page_size=self.page_size,
            tp_cache_group=group,
            sliding_window_size=WINDOW if kind == "swa" else None,
            tree_components=self.pools.components,
            tree_core_backend=core,
            sidecar_draft_device_pools=self.pools.drafts,
        )
        self.cache = UnifiedRadixCache(params)
        ranks = 1 if group is None else torch.distributed.get_world_size(group)
        directories = [str(runtime_dir)] * ranks
        config = {
            "linker": "KVFerryLinker",
            "linker_module_path": "kvferry.client.sglang",
            "linker_extra_config": {"kvferry_dirs": directories, **extra},
        }
        linker = create_unified_cache_linker(
            server_args,
            params,
            backend="dynamic",
            config=config,
            components=set(self.cache.components),
        )
        assert isinstance(linker, KVFerryLinker)
        self.linker = linker
        self.cache.init_cache_linker(linker)
        self.counter = self.cache.linker.layer_done_counter
        self.pool.register_layer_transfer_counter(self.counter)
        self.compared = self.wrong = self.failed = 0
        self._rids = itertools.count()
        if connected:
            self.wait_connected()

    def wait_connected(self) -> None:
        def connected() -> bool:
            self.step()
            client = self.linker._session.client
            return client is not None and client.connected and client.namespace.mirror.complete

        wait_until(connected)

    # Requests

    def run(self, tokens: Sequence[int], *, abort: bool = False, salt: str = "") -> int:
        """Run one request; returns how many of its tokens were loaded. abort: the client leaves
        after the load is queued."""
        req = self.match(tokens, salt=salt)
        on_device, loaded = req.prefix_len, 0
        if req.host_hit_length:
            loaded, req.last_node = self.cache.init_load_back(
                InitLoadBackParams(
                    best_match_node=req.best_match_node,
                    host_hit_length=req.host_hit_length,
                    req=req,
                )
            )
            req.prefix_len += loaded
        req.lock = self.cache.lock(req.last_node)
        if abort:
            slots = self.cache.prefix_device_indices(req)[on_device:]
            self.cache.release_aborted_request(req.cache_request_handle)
            self.allocator.free(slots)
            self.cache.unlock(req.lock)
            return loaded
        failed = self._compute(req, tokens, on_device, salt)
        self._release(req, checkpoint=not failed)
        self.step()
        return 0 if failed else loaded

    def match(self, tokens: Sequence[int], *, salt: str = "") -> Req:
        """Look a new request up."""
        req = Req(
            f"r{next(self._rids)}",
            "",
            array("q", tokens),
            SamplingParams(max_new_tokens=1),
            vocab_size=1000,
            cache_salt=salt or None,
        )
        req.refresh_fill_ids()
        fill_ids = req.full_untruncated_fill_ids
        has_states = bool(self.pools.states)
        match_kv_cache(
            req, self.cache, fill_ids, cow_mamba=has_states, max_prefix_len=len(tokens) - 1
        )
        req.kv.cache_protected_len = req.prefix_len
        return req

    def step(self) -> None:
        self.cache.check_hicache_events()

    def drain(self) -> None:
        """Wait until all stores have ended."""

        def idle() -> bool:
            self.step()
            return not self.cache.linker.pending_offloads

        wait_until(idle)

    def flush(self) -> None:
        """As SGLang's flush_cache of an idle server."""
        self.drain()
        self.cache.reset()
        manager = self.linker._manager
        assert manager is not None
        while manager.is_resetting:
            self.step()
        self.requests.clear()
        self.allocator.clear()

    def evict_all(self) -> None:
        """Evict all from the device, and overwrite it."""
        self.drain()
        self._evict(len(self.requests.req_to_token[0]))
        self.pools.overwrite()

    def close(self) -> None:
        self.cache.release_host_resources()

    def _compute(self, req: Req, tokens: Sequence[int], on_device: int, salt: str) -> bool:
        """Compute a request whose prefix is on the device or is loaded. Returns whether the load
        has failed."""
        index = self.cache.ready_to_load_host_cache()
        self.counter.set_consumer(index)
        prefix = self.cache.prefix_device_indices(req)
        slots = torch.cat([prefix, self._allocate(prefix, len(tokens))])
        self.requests.alloc([req])
        self.requests.write((req.kv.req_pool_idx, slice(0, len(slots))), slots.to(torch.int32))
        req.extend_end = len(tokens)
        req.kv.kv_allocated_len = req.kv.kv_committed_len = len(tokens)
        for layer in range(LAYERS):
            self.counter.wait_until(layer)
        pages = len(tokens) // self.page_size
        wanted = contents(tokens[: pages * self.page_size], self.page_size, salt)
        kept = len(prefix) // self.page_size
        failed = bool(self.cache.finish_external_linker_loads([req]))
        if not failed:
            self._compare(slots, wanted[:kept])
            self._compare_state(req, wanted[:kept])
        self.failed += failed
        self._write(slots, wanted, kept, pages)
        for layer, states in enumerate(self.pools.states):
            states[int(req.kv.mamba_pool_idx)] = (wanted[-1] + layer).astype(np.uint8)
        return failed

    def _allocate(self, prefix: torch.Tensor, tokens: int) -> torch.Tensor:
        """The slots of a request behind its prefix."""
        self._evict(tokens - len(prefix) + self.page_size)
        if self.page_size == 1:
            single: torch.Tensor = self.allocator.alloc(tokens - len(prefix))
            return single.to(torch.int64)
        before, after = torch.tensor([len(prefix)]), torch.tensor([tokens])
        last = prefix[-1:] if len(prefix) else torch.tensor([-1])
        slots = self.allocator.alloc_extend(
            before, before, after, after, last, tokens - len(prefix)
        )
        assert slots is not None
        result: torch.Tensor = slots.to(torch.int64)
        return result

    def _evict(self, tokens: int) -> None:
        """Evict from the device until it has room for so many tokens, as far as it can."""
        allocator = self.allocator
        if not self.pools.window_buffers:
            short = EvictParams(num_tokens=max(0, tokens - allocator.available_size()))
        else:
            short = EvictParams(
                num_tokens=max(0, tokens - allocator.full_available_size()),
                swa_num_tokens=max(0, tokens - allocator.swa_available_size()),
            )
        if short.num_tokens or short.swa_num_tokens:
            self.drain()
            self.cache.evict(short)

    def _compare(self, slots: torch.Tensor, wanted: np.ndarray[Any, Any]) -> None:
        """Compare the pages of a prefix: all of full attention, the last of a window."""
        self._compare_pages(slots, wanted, self.pools.buffers)
        if self.pools.window_buffers and len(wanted):
            last = -(-WINDOW // self.page_size)
            window = slots[: len(wanted) * self.page_size][-last * self.page_size :]
            places = self.allocator.translate_loc_from_full_to_swa(window)
            self._compare_pages(places, wanted[-last:], self.pools.window_buffers)
        self.compared += len(wanted)

    def _compare_state(self, req: Req, wanted: np.ndarray[Any, Any]) -> None:
        """Compare the state of a request with that of the end of its prefix."""
        if not self.pools.states or not len(wanted):
            return
        if req.kv.mamba_cow_src_index is not None:  # the forward pass begins with this copy
            target = req.kv.mamba_pool_idx.unsqueeze(0)
            self.requests.mamba_pool.copy_from(req.kv.mamba_cow_src_index, target)
            req.kv.mamba_cow_src_index = None
        for layer, states in enumerate(self.pools.states):
            found = states[int(req.kv.mamba_pool_idx)]
            self.wrong += int((found != (wanted[-1] + layer).astype(np.uint8)).any())

    def _compare_pages(
        self,
        slots: torch.Tensor,
        wanted: np.ndarray[Any, Any],
        buffers: Sequence[Rows],
    ) -> None:
        pages = slots[:: self.page_size][: len(wanted)].numpy() // self.page_size
        for layer, buffer in enumerate(buffers):
            found = buffer[pages]
            expected = (wanted + layer).astype(np.uint8)[:, None]
            self.wrong += int((found != expected).any(axis=1).sum())

    def _write(
        self, slots: torch.Tensor, wanted: np.ndarray[Any, Any], first: int, pages: int
    ) -> None:
        """Compute the pages behind a prefix."""
        new = slots[first * self.page_size : pages * self.page_size]
        self._write_pages(new, wanted[first:pages], self.pools.buffers)
        if self.pools.window_buffers:
            places = self.allocator.translate_loc_from_full_to_swa(new)
            self._write_pages(places, wanted[first:pages], self.pools.window_buffers)

    def _write_pages(
        self,
        slots: torch.Tensor,
        wanted: np.ndarray[Any, Any],
        buffers: Sequence[Rows],
    ) -> None:
        pages = slots[:: self.page_size].numpy() // self.page_size
        for layer, buffer in enumerate(buffers):
            buffer[pages] = (wanted + layer).astype(np.uint8)[:, None]

    def _release(self, req: Req, *, checkpoint: bool) -> None:
        req.finished_reason = FINISH_LENGTH(length=0)
        req.finished_len = 0
        release_kv_cache(req, self.cache, checkpoint=checkpoint)


def rows_of(slots: int, *buffers: torch.Tensor) -> list[Rows]:
    """Buffers as (pages, bytes), moved to shared memory. slots: their rows per page."""
    found: list[Rows] = []
    for buffer in buffers:
        if not buffer.is_shared():  # type: ignore[no-untyped-call]
            buffer.share_memory_()  # type: ignore[no-untyped-call]
        pages = buffer.shape[0] // slots
        found.append(buffer[: pages * slots].view(torch.uint8).reshape(pages, -1).numpy())
    return found


def contents(tokens: Sequence[int], page_size: int, salt: str = "") -> np.ndarray[Any, Any]:
    """A number per page that follows from its tokens and all before."""
    checksum = zlib.crc32(salt.encode())
    numbers = []
    data = np.asarray(tokens, np.int64)
    for start in range(0, len(tokens), page_size):
        checksum = zlib.crc32(data[start : start + page_size].tobytes(), checksum)
        numbers.append(checksum)
    return np.asarray(numbers, np.uint32)
