"""A model runner without a model: it writes KV that names its prefix, and checks what it reads.

The KV of a token is a hash of its prefix, a Mamba state that of all tokens up to it, and the KV of
a drafting layer includes the next token. Each KV cache group has its own hashes. Before a step is
computed, everything that its attention and its Mamba layers would read is compared. As vLLM's model
runner does, it sets new blocks to zero, copies blocks, and copies the states of Mamba layers in
"align" mode to the block of the step. Called in the scheduler's thread. Importing needs vLLM.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

# From vLLM 0.29 on, all layers are in one allocation.
ONE_ALLOCATION = "layers" in {field.name for field in fields(KVCacheTensor)}
# Tokens of a block, of a window, and of a chunk of local attention.
TOKENS, WINDOW, LOCAL = 16, 40, 48
# Bytes of a token: a hash. Of a block, of each group but "compressor".
WIDTH = 4
PAGE = TOKENS * WIDTH
# A compressor's block is smaller: in tokens, whose hash it has twice, and in bytes.
COMPRESSOR_TOKENS, COMPRESSOR_WINDOW = 4, 8
COMPRESSOR_PAGE = COMPRESSOR_TOKENS * 2 * WIDTH
# Tokens between two positions at which a prefix can end in a model with "partial states".
PREFIX_UNIT = 4
# Mamba states in vLLM's cache mode "align".
ALIGNED = "aligned states", "partial states"
# The block ids of a request, per group.
Tables: TypeAlias = Callable[[str], tuple[list[int], ...]]
HEAD: dict[str, Any] = {"num_kv_heads": 1, "head_size": WIDTH // 2, "dtype": torch.int8}
STATE: dict[str, Any] = {"block_size": TOKENS, "shapes": ((TOKENS,),), "dtypes": (torch.float32,)}


def specs(drafts: int) -> dict[str, KVCacheSpec]:
    """The kinds of KV cache groups. drafts: tokens that are drafted per step.

    "narrow" has another precision than "window"; "draft" is the layer of a drafting model. The
    states of a compressor are those of DeepSeek V4. "partial states" are also kept at the last
    multiple of PREFIX_UNIT tokens in a prompt, in the middle of a block.
    """
    aligned = MambaSpec(**STATE, mamba_cache_mode="align", num_speculative_blocks=drafts)
    return {
        "full": FullAttentionSpec(TOKENS, **HEAD),
        "draft": FullAttentionSpec(TOKENS, **HEAD),
        "window": SlidingWindowSpec(TOKENS, **HEAD, sliding_window=WINDOW),
        "narrow": SlidingWindowSpec(TOKENS, **HEAD | {"dtype": torch.uint8}, sliding_window=WINDOW),
        "local": ChunkedLocalAttentionSpec(TOKENS, **HEAD, attention_chunk_size=LOCAL),
        "latent": MLAAttentionSpec(TOKENS, **HEAD | {"head_size": WIDTH}),
        "compressor": SlidingWindowMLASpec(
            block_size=COMPRESSOR_TOKENS,
            num_kv_heads=1,
            head_size=2,
            dtype=torch.float32,
            sliding_window=COMPRESSOR_WINDOW,
        ),
        "aligned states": aligned,
        "partial states": aligned,
        "all states": MambaSpec(**STATE, mamba_cache_mode="all", num_speculative_blocks=drafts),
    }


class CheckedRunner:
    """A worker whose KV blocks contain what was computed, and that compares what is read.

    groups: names of `specs`. rows: the KV cache that all groups share, (blocks, PAGE) bytes.

    rng: decides how many drafted tokens are accepted. optimistic: the scheduler does not know it
    when it schedules the next step. `wrong` describes reads of something else than was computed;
    `compared` counts the blocks read. `weights`: a number that all KV depends on. It may change
    while no request has blocks.
    """

    def __init__(
        self,
        groups: tuple[str, ...],
        rows: torch.Tensor,
        rng: random.Random,
        optimistic: bool = False,
    ) -> None:
        self._groups, self._rng, self._optimistic = groups, rng, optimistic
        self._rows: NDArray[np.uint32] = rows.numpy().view(np.uint32)
        # Of each group, the hashes in a block: (blocks, tokens, copies).
        self._slots = {group: _slots(self._rows, group) for group in groups}
        self._requests: dict[str, RunningRequest] = {}
        self.wrong: list[str] = []
        self.reads = self.compared = 0
        self.weights = 1

    def prepare(self, output: Any, requests: dict[str, Any], tables: Tables) -> None:
        """Write what vLLM writes before the forward pass. requests: vLLM's, by name."""
        for block in output.new_block_ids_to_zero or ():
            self._rows[block] = 0
        for copy in output.kv_cache_block_copies or ():
            self._rows[copy.dst_block_id] = self._rows[copy.src_block_id]
        for new in output.scheduled_new_reqs:
            self._start(requests[new.req_id], new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for name, tokens in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            if name in cached.resumed_req_ids:
                self._start(requests[name], tokens)
            elif not self._optimistic:
                self._requests[name].computed = tokens
        for name, count in output.num_scheduled_tokens.items():
            running = self._requests[name]
            column = (running.computed + count - 1) // TOKENS
            if running.column != column:
                for group, table in zip(self._groups, tables(name), strict=True):
                    if group in ALIGNED and running.column >= 0:
                        source = table[running.column + running.offset]
                        self._rows[table[column]] = self._rows[source]
                running.column, running.offset = column, 0

    def compute(self, output: Any, tables: Tables) -> dict[str, list[int]]:
        """Compare what the step reads, and write its KV. Returns the sampled tokens by request."""
        sampled = {}
        for name, count in output.num_scheduled_tokens.items():
            running = self._requests[name]
            begin, end = running.computed, running.computed + count
            drafts = len((output.scheduled_spec_decode_tokens or {}).get(name, ()))
            accepted = self._rng.randrange(drafts + 1) if drafts else 0
            known = end - drafts + accepted
            for group, table in zip(self._groups, tables(name), strict=True):
                if group.endswith("states"):
                    self._compute_states(running, group, table, end, drafts)
                else:
                    self._read_tokens(running, group, table)
                    self._write_tokens(running, group, table, (begin, known, end))
            running.computed = known
            if drafts:
                running.offset = accepted
                self._keep_aligned_state(running, tables(name))
            first = end - drafts  # position of the first sampled token
            sampled[name] = (
                [position % 100 for position in range(first, known + 1)]
                if end >= running.prefill
                else []
            )
        return sampled

    def _start(self, request: Any, computed: int) -> None:
        self._requests[request.request_id] = RunningRequest(request, computed, self.weights)

    def _read_tokens(self, running: RunningRequest, group: str, table: list[int]) -> None:
        end = running.computed
        first = {
            "window": max(0, end - WINDOW + 1),
            "narrow": max(0, end - WINDOW + 1),
            "local": end // LOCAL * LOCAL,
            "compressor": max(0, end - COMPRESSOR_WINDOW + 1),
        }.get(group, 0)
        positions = np.arange(first, end)
        if group == "draft":
            # The next token of a block's last one is not in its key, so vLLM reads it from any
            # block with this key: a wrong draft is only not accepted.
            positions = positions[positions % TOKENS < TOKENS - 1]
        slots = self._slots[group]
        tokens = slots.shape[1]
        blocks = np.asarray(table)[positions // tokens]
        hashes = running.hashes(group)[positions, np.newaxis]
        self._compare(running, group, blocks, slots[blocks, positions % tokens], hashes)

    def _write_tokens(
        self, running: RunningRequest, group: str, table: list[int], step: tuple[int, int, int]
    ) -> None:
        """step: first position, the first one that is not accepted, and the end."""
        first, known, end = step
        positions = np.arange(first, end)
        hashes = running.hashes(group)[positions]
        hashes[known - first :] ^= np.uint32(1)
        slots = self._slots[group]
        tokens = slots.shape[1]
        blocks = np.asarray(table)[positions // tokens]
        slots[blocks, positions % tokens] = hashes[:, np.newaxis]

    def _compute_states(
        self, running: RunningRequest, group: str, table: list[int], end: int, drafts: int
    ) -> None:
        """Of drafted tokens, each state is in a block of its own."""
        begin, aligned = running.computed, group in ALIGNED
        hashes = running.hashes(group)
        if begin:
            column = running.column + running.offset if aligned else (begin - 1) // TOKENS
            block = np.asarray(table)[[column]]
            self._compare(running, group, block, self._rows[block], hashes[begin - 1])
        if aligned:
            for number in range(drafts + 1):
                state = hashes[end - drafts + number - 1]
                self._rows[table[running.column + number]] = state
        else:
            for column in range(begin // TOKENS, -(-end // TOKENS)):
                self._rows[table[column]] = hashes[min(end, (column + 1) * TOKENS) - 1]

    def _keep_aligned_state(self, running: RunningRequest, tables: Any) -> None:
        """Copy the state at a block's end to that block, if more tokens were accepted."""
        aligned = running.computed // TOKENS * TOKENS
        offset = running.offset - (running.computed - aligned)
        if offset < 0:
            return
        column = aligned // TOKENS - 1
        for group, table in zip(self._groups, tables, strict=True):
            if group in ALIGNED:
                self._rows[table[column]] = self._rows[table[running.column + offset]]
        if column == running.column:
            running.offset = 0

    def _compare(
        self,
        running: RunningRequest,
        group: str,
        blocks: NDArray[np.int64],
        found: NDArray[np.uint32],
        wanted: Any,
    ) -> None:
        self.reads += 1
        self.compared += len(set(blocks.tolist()))
        if not blocks.all() or not (found == wanted).all():
            self.wrong.append(f"{running.name} in {group}, at {running.computed} tokens: {blocks}")


def _slots(rows: NDArray[np.uint32], group: str) -> NDArray[np.uint32]:
    if group == "compressor":
        rows = rows[:, : COMPRESSOR_PAGE // WIDTH]
        return rows.reshape(-1, COMPRESSOR_TOKENS, 2, copy=False)
    return rows[:, :, np.newaxis]


class RunningRequest:
    """A request in the runner. computed: tokens. prefill: tokens until it samples.

    column, offset: the block of its Mamba state, and how many drafted tokens later the state is.
    """

    def __init__(self, request: Any, computed: int, weights: int) -> None:
        self.name, self.computed, self.prefill = request.request_id, computed, request.num_tokens
        self.column, self.offset = (computed - 1) // TOKENS, 0
        prompt = request.prompt_token_ids
        last = len(prompt) + request.max_tokens + 2 * TOKENS
        tokens = [*prompt, *(position % 100 for position in range(len(prompt), last))]
        prefix, hashes = weights, []
        for token in tokens:
            prefix = zlib.crc32(int(token).to_bytes(4, "little"), prefix)
            hashes.append(prefix)
        self._hashes = np.array(hashes, np.uint32)

    def hashes(self, group: str) -> NDArray[np.uint32]:
        """The KV of each position in a group; of states, after this position's token."""
        hashes = np.roll(self._hashes, -1) if group == "draft" else self._hashes
        return hashes ^ np.uint32(zlib.crc32(group.encode()))
