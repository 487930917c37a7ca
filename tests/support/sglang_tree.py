"""A server's cache without a model: SGLang's tree, pools, allocator and wrapper, and a daemon.

`TreeServer.run` does for one request what SGLang's scheduler does: match, load back, allocate,
compute (here: write contents that follow from the tokens), insert, release. What a match promises
is compared with those contents when its layers are read. On a GPU, as in SGLang, the computing is
queued in the forward stream, and nothing waits for it. Needs SGLang.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from sglang.srt import runtime_context
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InitLoadBackParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import match_kv_cache, release_kv_cache
from sglang.srt.mem_cache.unified_cache.linker_factory import create_unified_cache_linker
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs

from kvferry.client.sglang.linker import KVFerryLinker
from support.eventually import wait_until
from support.sglang_pools import (
    PAGE_SIZES,
    SMALL,
    WINDOW,
    ModelShape,
    contents,
    make_pools,
    page_numbers,
)

CONFIG = """{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
"intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
"num_hidden_layers": 3, "vocab_size": 1000, "max_position_embeddings": 4096,
"torch_dtype": "bfloat16", "rms_norm_eps": 1e-5}"""


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


class TreeServer:
    """The cache of one server. core: "python" or "rust", the tree's. extra: options of the linker.
    group: of the ranks of a server; runtime_dir is then of this rank's daemon. device: "cpu" or
    "cuda".

    compared: pages that matches promised; loaded: of these, by a load; wrong: buffers of them with
    other contents. failed: requests whose load failed. before_forward: called in the forward stream
    before a request is computed.
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
        device: str = "cpu",
        shape: ModelShape = SMALL,
        **extra: Any,
    ) -> None:
        self.page_size = PAGE_SIZES.get(kind, server_args.page_size)
        size = pages if kind == "dsa" else pages * server_args.page_size // self.page_size
        self.pools = make_pools(kind, size, self.page_size, device, shape)
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
        self.device, self._layers = device, shape.layers
        self.forward_stream = new_stream() if device == "cuda" else None
        self.before_forward: Callable[[], object] = lambda: None
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
            forward_stream=self.forward_stream,
        )
        assert isinstance(linker, KVFerryLinker)
        self.linker = linker
        self.cache.init_cache_linker(linker)
        self.counter = self.cache.linker.layer_done_counter
        self.pool.register_layer_transfer_counter(self.counter)
        self.compared = self.loaded = self.failed = 0
        self._wrong = torch.zeros((), dtype=torch.int64, device=device)
        self._rids = itertools.count()
        if connected:
            self.wait_connected()

    @property
    def wrong(self) -> int:
        """Waits for all that is computed."""
        if self.forward_stream is not None:
            self.forward_stream.synchronize()
        return int(self._wrong)

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
        self.evict(len(self.requests.req_to_token[0]))
        with self.forward():
            self.pools.overwrite()

    def close(self) -> None:
        self.cache.release_host_resources()

    def _compute(self, req: Req, tokens: Sequence[int], on_device: int, salt: str) -> bool:
        """Compute a request whose prefix is on the device or is loaded. Returns whether the load
        has failed."""
        index = self.cache.ready_to_load_host_cache()
        prefix = self.cache.prefix_device_indices(req)
        slots = torch.cat([prefix, self._allocate(prefix, len(tokens))])
        self.requests.alloc([req])
        self.requests.write((req.kv.req_pool_idx, slice(0, len(slots))), slots.to(torch.int32))
        req.extend_end = len(tokens)
        req.kv.kv_allocated_len = req.kv.kv_committed_len = len(tokens)
        pages = len(tokens) // self.page_size
        numbers = page_numbers(tokens[: pages * self.page_size], self.page_size, salt)
        wanted = numbers.to(self.device)
        kept = len(prefix) // self.page_size
        with self.forward(slots, wanted):
            self.before_forward()
            self.counter.set_consumer(index)
            wrong, numbered = torch.zeros_like(self._wrong), [*enumerate(self.pools.buffers)]
            for layer in range(self._layers):  # each as soon as SGLang would read it
                self.counter.wait_until(layer)
                its = dict(numbered[layer :: self._layers])
                wrong += self._compare_pages(slots, wanted[:kept], its)
            wrong += self._compare_window(slots, wanted[:kept])
            wrong += self._compare_state(req, wanted[:kept])
            self._write(slots, wanted, kept, pages)
            for layer, states in enumerate(self.pools.states):
                new = contents(wanted[-1:], layer, states.shape[1])
                states.index_copy_(0, req.kv.mamba_pool_idx.reshape(1), new)
        failed = bool(self.cache.finish_external_linker_loads([req]))
        if not failed:
            with self.forward():
                self._wrong += wrong
            self.compared += kept
            self.loaded += kept - on_device // self.page_size
        self.failed += failed
        return failed

    @contextmanager
    def forward(self, *tensors: torch.Tensor) -> Iterator[None]:
        """Queue kernels in the forward stream, behind the current one. tensors: that they use."""
        if self.forward_stream is None:
            yield
            return
        scheduling = torch.cuda.current_stream()
        with torch.cuda.stream(self.forward_stream):
            self.forward_stream.wait_stream(scheduling)
            yield
        for tensor in tensors:
            tensor.record_stream(self.forward_stream)

    def _allocate(self, prefix: torch.Tensor, tokens: int) -> torch.Tensor:
        """The slots of a request behind its prefix."""
        self.evict(tokens - len(prefix) + self.page_size)
        if self.page_size == 1:
            single: torch.Tensor = self.allocator.alloc(tokens - len(prefix))
            return single.to(torch.int64)
        before, after = torch.tensor([len(prefix)]), torch.tensor([tokens])
        last = prefix[-1:] if len(prefix) else torch.tensor([-1], device=self.device)
        slots = self.allocator.alloc_extend(
            before.to(self.device),
            before,
            after.to(self.device),
            after,
            last,
            tokens - len(prefix),
        )
        assert slots is not None
        result: torch.Tensor = slots.to(torch.int64)
        return result

    def evict(self, tokens: int) -> None:
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

    def _compare_window(self, slots: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Compare the last pages of a prefix with those of the sliding window layers."""
        buffers = self.pools.window_buffers
        if not buffers or not len(wanted):
            return torch.zeros_like(self._wrong)
        last = -(-WINDOW // self.page_size)
        window = slots[: len(wanted) * self.page_size][-last * self.page_size :]
        places = self.allocator.translate_loc_from_full_to_swa(window)
        return self._compare_pages(places, wanted[-last:], dict(enumerate(buffers)))

    def _compare_state(self, req: Req, wanted: torch.Tensor) -> torch.Tensor:
        """Compare the state of a request with that of the end of its prefix."""
        wrong = torch.zeros_like(self._wrong)
        if not self.pools.states or not len(wanted):
            return wrong
        target = req.kv.mamba_pool_idx.reshape(1)
        if req.kv.mamba_cow_src_index is not None:  # the forward pass begins with this copy
            self.requests.mamba_pool.copy_from(req.kv.mamba_cow_src_index, target)
            req.kv.mamba_cow_src_index = None
        for layer, states in enumerate(self.pools.states):
            wrong += count_wrong(states[target], wanted[-1:], layer)
        return wrong

    def _compare_pages(
        self, slots: torch.Tensor, wanted: torch.Tensor, buffers: Mapping[int, torch.Tensor]
    ) -> torch.Tensor:
        wrong = torch.zeros_like(self._wrong)
        pages = slots[:: self.page_size][: len(wanted)] // self.page_size
        for number, buffer in buffers.items():
            wrong += count_wrong(buffer[pages], wanted, number)
        return wrong

    def _write(self, slots: torch.Tensor, wanted: torch.Tensor, first: int, pages: int) -> None:
        """Compute the pages behind a prefix."""
        new = slots[first * self.page_size : pages * self.page_size]
        self._write_pages(new, wanted[first:pages], self.pools.buffers)
        if self.pools.window_buffers:
            places = self.allocator.translate_loc_from_full_to_swa(new)
            self._write_pages(places, wanted[first:pages], self.pools.window_buffers)

    def _write_pages(
        self, slots: torch.Tensor, wanted: torch.Tensor, buffers: Sequence[torch.Tensor]
    ) -> None:
        pages = slots[:: self.page_size] // self.page_size
        for number, buffer in enumerate(buffers):
            buffer[pages] = contents(wanted, number, buffer.shape[1])

    def _release(self, req: Req, *, checkpoint: bool) -> None:
        req.finished_reason = FINISH_LENGTH(length=0)
        req.finished_len = 0
        release_kv_cache(req, self.cache, checkpoint=checkpoint)


def new_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def count_wrong(rows: torch.Tensor, wanted: torch.Tensor, buffer: int) -> torch.Tensor:
    """How many pages of a buffer do not have the contents that belong to their numbers."""
    return (rows != contents(wanted, buffer, rows.shape[1])).any(dim=1).sum()
