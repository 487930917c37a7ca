"""Which requests may load KV from host memory. Used in the scheduler's thread.

scheduler: vLLM's OffloadingConnectorScheduler. request: vLLM's Request.
"""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger("kvferry")


def drop_invalid_parameters(request: Any) -> None:
    """vLLM ends the engine if a request's kv_transfer_params are not a dictionary."""
    if not isinstance(parameters := request.kv_transfer_params, dict | None):
        log.warning(
            "kvferry: request %s has kv_transfer_params of type %s, which are ignored; send a "
            "dictionary",
            request.request_id,
            type(parameters).__name__,
        )
        request.kv_transfer_params = None


def may_load(scheduler: Any, request: Any) -> bool:
    """Whether the request may load what it finds in host memory."""
    allowed: bool = scheduler.manager.adapters.may_use_keys(request.request_id)
    return allowed and not loads_from_prefill_engine(request)


def can_load_after(scheduler: Any, computed_tokens: int) -> bool:
    """Whether vLLM can load what follows these tokens.

    It asserts that they end at a block of each group, also where its own cache gives it a prefix
    that does not (vLLM 50454).
    """
    groups = scheduler.config.kv_group_configs
    return not any(computed_tokens % group.tokens_per_block for group in groups)


def loads_from_prefill_engine(request: Any) -> bool:
    """Whether another connector of a MultiConnector, such as NIXL, loads the whole prompt.

    MultiConnector lets the first connector with tokens load, so a part of the prompt in host memory
    would end that transfer. The other connector clears this key when it begins: if its load fails,
    the request looks up what host memory has.
    """
    return bool((request.kv_transfer_params or {}).get("do_remote_prefill"))
