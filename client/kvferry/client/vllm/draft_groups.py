"""Prompts that are computed because only their drafting layers' KV is missing. In the scheduler.

A hit of vLLM ends where any KV cache group has none. Loading the target's KV alone would be wrong:
vLLM takes the blocks of all groups for computed. The drafting layers would read KV of another
prompt, and vLLM's cache and host memory would keep it as that of this prompt.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

log = logging.getLogger("kvferry")

# The counter among vLLM's metrics.
DRAFT_MISSES = "vllm:kv_offload_draft_misses"


class DraftGroups:
    """Counts requests that find the target's KV but none of a drafting group; warns once.

    scheduler: vLLM's OffloadingConnectorScheduler.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        # One kind only: no drafting group, or one that has the target's layers, too.
        kinds = {group.is_eagle_group for group in scheduler.config.kv_group_configs}
        self._may_miss = len(kinds) == 2
        self._has_warned = False
        self._counted: set[str] = set()

    def count_miss(self, request: str, computed_tokens: int) -> None:
        """Called if a request has found nothing after these tokens."""
        if not self._may_miss or request in self._counted:
            return
        found = {True: True, False: True}
        status = self._scheduler._req_status[request]  # noqa: SLF001 - vLLM has no call
        groups = zip(self._scheduler.config.kv_group_configs, status.group_states, strict=True)
        for group, state in groups:
            keys = state.offload_keys[computed_tokens // group.tokens_per_chunk :]
            if group.sliding_window_size_in_chunks is None:
                keys = keys[:1]
            found[group.is_eagle_group] &= any(map(self._scheduler.manager.has_key, keys))
        if found[True] or not found[False]:
            return
        self._counted.add(request)
        self._scheduler._connector_stats.increase_counter(DRAFT_MISSES)  # noqa: SLF001 - no call
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "kvferry: host memory has a prompt's KV of the target model, but none of its "
                "drafting layers, so the prompt is computed. If these blocks were evicted, "
                "increase cpu_bytes_to_use. vLLM's metric %s counts such requests",
                DRAFT_MISSES,
            )

    def end_requests(self, requests: Collection[str]) -> None:
        self._counted.difference_update(requests)
