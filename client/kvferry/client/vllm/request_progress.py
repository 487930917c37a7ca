"""What the connector reads and changes of a request's state in vLLM's offloading scheduler.

scheduler: vLLM's OffloadingConnectorScheduler, which has no calls for this. Scheduler's thread.
"""

from __future__ import annotations

from typing import Any

from kvferry.client.vllm import compat


def store_progress(scheduler: Any) -> list[tuple[Any, int]]:
    """The next chunk to store, of each request and KV cache group."""
    requests = scheduler._req_status.values()  # noqa: SLF001 - vLLM has no call
    states = [state for request in requests for state in request.group_states]
    return [(state, state.next_stored_chunk_idx) for state in states]


def keys_to_prefetch(scheduler: Any, request: Any) -> tuple[list[bytes], float]:
    """The keys that a request with this prompt would load, in prefix order, and tokens per key.

    Of a sliding window, only its keys at the end of the prompt; they come last, because a missing
    one must not end the prefix of the others.
    """
    status = scheduler._req_status.get(request.request_id)  # noqa: SLF001 - vLLM has no call
    if status is None:
        return [], 0.0
    status.update_offload_keys()
    keys: list[bytes] = []
    windows: list[bytes] = []
    for group, state in zip(scheduler.config.kv_group_configs, status.group_states, strict=True):
        window = group.sliding_window_size_in_chunks
        if window is None:
            keys += state.offload_keys
        else:
            windows += state.offload_keys[-window:]
    keys += windows
    return keys, request.num_tokens / len(keys) if keys else 0.0


def finish_keys(scheduler: Any, request_id: str) -> None:
    """A request has ended. Mark its keys as used, in prefix order, also those that the GPU's prefix
    cache had; vLLM before 0.31 does so itself. The GPU has them all now.

    Of a sliding window, only the keys that a request with this prefix loads.
    """
    status = scheduler._req_status.get(request_id)  # noqa: SLF001 - vLLM has no call
    if status is None:
        return
    groups = zip(scheduler.config.kv_group_configs, status.group_states, strict=True)
    ends: list[tuple[int, bytes]] = []
    for group, state in groups:
        window = group.sliding_window_size_in_chunks
        first = 0 if window is None else max(0, state.num_hit_chunks - window)
        tokens = group.tokens_per_chunk
        ends += [(n * tokens, key) for n, key in enumerate(state.offload_keys[first:], first + 1)]
    ends.sort()
    new = sum(end > status.req.num_prompt_tokens for end, _ in ends)
    keys = [key for _, key in ends]
    if not compat.TOUCHES_KEYS:
        scheduler.manager.touch_keys(keys, status.req_context, new)
    if (late := scheduler.manager.late_stores) is not None:
        late.spare_keys(keys)


def limit_store_to_computed_tokens(scheduler: Any, request: Any) -> None:
    """Store only those tokens of a finished request whose KV the engine has computed."""
    status = scheduler._req_status.get(request.request_id)  # noqa: SLF001 - vLLM has no call
    if status is None:
        return
    limits = [request.num_computed_tokens]
    if status.max_offload_tokens is not None:
        limits.append(status.max_offload_tokens)
    if compat.STORES_FREED_BLOCKS:
        groups = zip(scheduler.config.kv_group_configs, status.group_states, strict=True)
        limits += [len(state.block_ids) * group.tokens_per_block for group, state in groups]
    status.max_offload_tokens = min(limits)
