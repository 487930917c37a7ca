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
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sglang.srt import runtime_context
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InitLoadBackParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import match_kv_cache, release_kv_cache
from sglang.srt.mem_cache.memory_pool import (
    MHATokenToKVPool,
    MLATokenToKVPool,
    ReqToTokenPool,
)
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
LAYERS, MAX_TOKENS = 3, 4096


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


def dense_pool(kind: str, pages: int, page_size: int) -> Any:
    """A pool of full attention layers on the CPU, in shared memory. kind: "mha", "fp8" or "mla"."""
    size = pages * page_size
    if kind == "mla":
        pool = MLATokenToKVPool(
            size=size,
            page_size=page_size,
            dtype=torch.bfloat16,
            kv_lora_rank=32,
            qk_rope_head_dim=16,
            layer_num=LAYERS,
            device="cpu",
            enable_memory_saver=False,
        )
        share(pool.kv_buffer)
        return pool
    pool = MHATokenToKVPool(
        size=size,
        page_size=page_size,
        dtype=torch.float8_e4m3fn if kind == "fp8" else torch.bfloat16,
        head_num=2,
        head_dim=16,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )
    share([*pool.k_buffer, *pool.v_buffer])
    return pool


def share(buffers: Sequence[torch.Tensor]) -> None:
    for buffer in buffers:
        buffer.share_memory_()  # type: ignore[no-untyped-call]


class TreeServer:
    """The cache of one server. core: "python" or "rust", the tree's. extra: options of the linker.

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
        **extra: Any,
    ) -> None:
        self.page_size = server_args.page_size
        self.pool = dense_pool(kind, pages, self.page_size)
        self.requests = ReqToTokenPool(8, MAX_TOKENS, "cpu", enable_memory_saver=False)
        self.allocator = PagedTokenToKVPoolAllocator(
            pages * self.page_size,
            self.page_size,
            self.pool.dtype,
            "cpu",
            self.pool,
            need_sort=True,
        )
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.requests,
            token_to_kv_pool_allocator=self.allocator,
            page_size=self.page_size,
            tree_components=(ComponentType.FULL,),
            tree_core_backend=core,
        )
        self.cache = UnifiedRadixCache(params)
        config = {
            "linker": "KVFerryLinker",
            "linker_module_path": "kvferry.client.sglang",
            "linker_extra_config": {"kvferry_dirs": [str(runtime_dir)], **extra},
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
        match_kv_cache(req, self.cache, fill_ids, max_prefix_len=len(tokens) - 1)
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
        self.cache.evict(EvictParams(num_tokens=self.allocator.size))
        for buffer in self._buffers():
            buffer.zero_()

    def close(self) -> None:
        self.cache.release_host_resources()

    def _buffers(self) -> list[torch.Tensor]:
        if hasattr(self.pool, "kv_buffer"):
            return list(self.pool.kv_buffer)
        return [*self.pool.k_buffer, *self.pool.v_buffer]

    def _compute(self, req: Req, tokens: Sequence[int], on_device: int, salt: str) -> bool:
        """Compute a request whose prefix is on the device or is loaded. Returns whether the load
        has failed."""
        index = self.cache.ready_to_load_host_cache()
        self.counter.set_consumer(index)
        prefix = self.cache.prefix_device_indices(req)
        new = self._allocate(len(tokens) - len(prefix))
        slots = torch.cat([prefix, new])
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
        self.failed += failed
        self._write(slots, wanted, kept, pages)
        return failed

    def _allocate(self, tokens: int) -> torch.Tensor:
        size = -(-tokens // self.page_size) * self.page_size
        if size > self.allocator.available_size():
            self.drain()
            self.cache.evict(EvictParams(num_tokens=size - self.allocator.available_size()))
        slots: torch.Tensor | None = self.allocator.alloc(size)
        assert slots is not None
        return slots[:tokens].to(torch.int64)

    def _compare(self, slots: torch.Tensor, wanted: np.ndarray[Any, Any]) -> None:
        pages = slots[:: self.page_size][: len(wanted)].numpy() // self.page_size
        for layer, buffer in enumerate(self._buffers()):
            found = page_rows(buffer, self.page_size)[pages]
            expected = (wanted + layer).astype(np.uint8)[:, None]
            self.wrong += int((found != expected).any(axis=1).sum())
        self.compared += len(wanted)

    def _write(
        self, slots: torch.Tensor, wanted: np.ndarray[Any, Any], first: int, pages: int
    ) -> None:
        numbers = slots[:: self.page_size].numpy()[first:pages] // self.page_size
        for layer, buffer in enumerate(self._buffers()):
            rows = page_rows(buffer, self.page_size)
            rows[numbers] = (wanted[first:pages] + layer).astype(np.uint8)[:, None]

    def _release(self, req: Req, *, checkpoint: bool) -> None:
        req.finished_reason = FINISH_LENGTH(length=0)
        req.finished_len = 0
        release_kv_cache(req, self.cache, checkpoint=checkpoint)


def page_rows(buffer: torch.Tensor, page_size: int) -> np.ndarray[Any, Any]:
    """A buffer as (pages, bytes)."""
    pages = buffer.shape[0] // page_size
    rows = buffer[: pages * page_size].view(torch.uint8).reshape(pages, -1)
    result: np.ndarray[Any, Any] = rows.numpy()
    return result


def contents(tokens: Sequence[int], page_size: int, salt: str = "") -> np.ndarray[Any, Any]:
    """A number per page that follows from its tokens and all before."""
    checksum = zlib.crc32(salt.encode())
    numbers = []
    data = np.asarray(tokens, np.int64)
    for start in range(0, len(tokens), page_size):
        checksum = zlib.crc32(data[start : start + page_size].tobytes(), checksum)
        numbers.append(checksum)
    return np.asarray(numbers, np.uint32)
