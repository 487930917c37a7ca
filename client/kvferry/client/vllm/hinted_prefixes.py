"""What hints of finished requests do: their prefixes are retained or released in host memory.

    request_finished      the keys and GPU blocks of the prefix are noted
    next step             vLLM stores the last chunks; the GPU's other chunks of a prefix that is
                          retained are stored, too, and those of a released one are not any more
    stores have ended     Retain or Release is sent

GPU blocks of a released prefix stay as they are: vLLM's block pool can only drop them from its
cache, which would take a prompt's common head from all other requests, too. Called in the
scheduler's thread. Does not import vLLM.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvferry.client.manager import OffloadingManager
from kvferry.client.retentions import Retention
from kvferry.client.vllm.eviction_stores import EvictionStores
from kvferry.client.vllm.request_hints import RequestHints, read_hints
from kvferry.proto.keys import OffloadKey

log = logging.getLogger("kvferry")

# The counters among vLLM's metrics, and what they count.
HINT_COUNTERS = {
    "vllm:kv_offload_hints_accepted": "Chunks that hints of requests retained or released.",
    "vllm:kv_offload_hints_clipped": "Chunks not retained, because a share is used up.",
    "vllm:kv_offload_hints_missing": "Chunks not retained, because host memory lacks them.",
    "vllm:kv_offload_hints_refused": "Hints with a wrong payload, or too many at once.",
    "vllm:kv_offload_hints_unknown": "Hints named kvferry.* of an unknown name or version.",
}
ACCEPTED, CLIPPED, MISSING, REFUSED, UNKNOWN = HINT_COUNTERS
# Prefixes that wait for stores, and answers that are waited for, at most.
MAX_PENDING = 1024
# A prefix waits so many seconds for its stores. Then the daemon retains the chunks that it has.
STORE_SECONDS = 5.0


@dataclass(slots=True)
class HintedPrefix:
    """The keys of a finished request, and its GPU blocks until the next step."""

    request: str
    hints: RequestHints
    keys: list[OffloadKey]
    blocks: list[int]
    until: float


class HintedPrefixes:
    """scheduler: vLLM's OffloadingConnectorScheduler."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._pending: list[HintedPrefix] = []
        self._unanswered: list[tuple[str, Retention]] = []

    def __bool__(self) -> bool:
        """Whether prefixes wait for their stores."""
        return bool(self._pending)

    def request_finished(self, request: Any) -> None:
        """A request has ended, and has its GPU blocks still."""
        hints = read_hints(request)
        status = self._scheduler._req_status.get(request.request_id)  # noqa: SLF001 - no call
        self._count(UNKNOWN, hints.unknown)
        self._count(REFUSED, hints.refused)
        if hints.unknown or hints.refused:
            log.debug("kvferry: ignored hints of request %s: %s", request.request_id, hints)
        if status is None or not (hints.seconds or hints.releases):
            return
        manager = self._scheduler.manager
        if len(self._pending) >= MAX_PENDING or not manager.adapters.may_use_keys(
            request.request_id
        ):
            self._count(REFUSED, 1)
            return
        keys = self._keys(status, hints.tokens)
        blocks = [block for state in status.group_states for block in state.block_ids if block]
        until = time.monotonic() + STORE_SECONDS
        self._pending.append(HintedPrefix(request.request_id, hints, keys, blocks, until))

    def choose_stores(self, stores: EvictionStores) -> None:
        """Store what is retained now, and not at its eviction; and what is released never."""
        for prefix in self._pending:
            if prefix.hints.seconds:
                stores.store_soon(prefix.blocks, prefix.keys)
            else:
                stores.forget_chunks(prefix.blocks, prefix.keys)
            prefix.blocks = []

    def apply(self) -> None:
        """Retain and release the prefixes whose stores have ended. At the end of each step."""
        if self._pending:
            pending, self._pending = self._pending, []
            for prefix in pending:
                self._scheduler.manager.attempt(partial(self._apply, prefix))
        if self._unanswered:
            self._count_answers()

    def _apply(self, prefix: HintedPrefix, manager: OffloadingManager) -> None:
        keys, hints = prefix.keys, prefix.hints
        if manager.is_storing(keys) and time.monotonic() < prefix.until:
            self._pending.append(prefix)
        elif hints.releases:
            manager.release(keys, hints.label)
            self._count(ACCEPTED, len(keys))
            log.debug("kvferry: released %d chunks of %s", len(keys), prefix.request)
        else:
            sent = manager.retain(keys, hints.seconds, hints.label)
            self._unanswered += [(prefix.request, each) for each in sent]

    def _keys(self, status: Any, tokens: int | None) -> list[OffloadKey]:
        """The keys that a request with this prefix loads, in prefix order.

        vLLM stores windows before the last token of a prompt, which each request computes, and at
        the end of the answer.
        """
        scheduler, request = self._scheduler, status.req
        computed = max(request.num_prompt_tokens, request.num_tokens - 1)
        stored = scheduler._calc_num_offloadable_tokens(status, computed)  # noqa: SLF001 - no call
        most = stored if tokens is None else min(stored, tokens)
        ends: list[tuple[int, OffloadKey]] = []
        groups = zip(scheduler.config.kv_group_configs, status.group_states, strict=True)
        for group, state in groups:
            size, window = group.tokens_per_chunk, group.sliding_window_size_in_chunks
            count = min(len(state.offload_keys), most // size)
            boundary = (min(most, request.num_prompt_tokens) - 1) // size
            first = 0 if window is None else max(0, boundary - window)
            ends += [((n + 1) * size, state.offload_keys[n]) for n in range(first, count)]
        ends.sort()
        return [key for _, key in ends]

    def _count_answers(self) -> None:
        self._scheduler.manager.attempt(OffloadingManager.poll)
        unanswered, self._unanswered = self._unanswered[-MAX_PENDING:], []
        for request, one in unanswered:
            if not one.done:
                self._unanswered.append((request, one))
                continue
            self._count(ACCEPTED, one.kept)
            self._count(CLIPPED, one.clipped)
            self._count(MISSING, one.missing + one.refused)
            log.debug("kvferry: retained chunks of request %s: %s", request, one)

    def _count(self, counter: str, number: int) -> None:
        if number:
            self._scheduler._connector_stats.increase_counter(counter, number)  # noqa: SLF001 - no call
