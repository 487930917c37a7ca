"""kvferry refuses models and options that it cannot serve, and says what to change.

vLLM passes its configuration to no method of a connector before it has loaded the weights. So only
options are checked before that, the configuration once vLLM passes it, and the KV cache groups when
vLLM has planned them. NAMES.md lists the methods and when vLLM calls them. Needs vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, MambaSpec

from kvferry.client.vllm import compat
from kvferry.client.vllm.engine_config import check_layout
from kvferry.client.vllm.kv_cache_plan import chosen_layout, kv_layout, offloaded_groups
from kvferry.client.vllm.kv_memory import check_sleep_mode
from kvferry.client.vllm.options import BLOCKS_PER_CHUNK, TOKENS_PER_CHUNK, check_options
from kvferry.client.vllm.vllm_log import vllm_log
from kvferry.proto.errors import Code, Refused

log = logging.getLogger("kvferry")


def check_before_weights(extra: Mapping[str, Any]) -> None:
    """Raise Refused (BAD_CONFIG) for what is wrong with every model.

    extra: the kv_connector_extra_config of kvferry.
    """
    check_options(extra)
    check_layout(chosen_layout())


def check_config(vllm_config: Any, extra: Mapping[str, Any]) -> None:
    """Raise Refused (BAD_CONFIG) if the bytes of this model's KV could not be right.

    extra: the kv_connector_extra_config of kvferry. Its values are checked, too.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    check_options(extra, vllm_config.parallel_config.world_size)
    check_layout(kv_layout(vllm_config))
    check_sleep_mode(vllm_config, extra)
    attention = getattr(vllm_config, "attention_config", None)
    if getattr(attention, "hisparse_config", None) is not None:
        raise _host_resident()
    caches_prefixes = bool(cache.enable_prefix_caching)
    if not caches_prefixes and not getattr(model, "is_prefix_caching_supported", True):
        message = (
            "vLLM caches no prefixes of this model, so none can be offloaded; start vLLM without "
            "--kv-transfer-config"
        )
        raise Refused(Code.BAD_CONFIG, message, model.model)
    if getattr(model, "is_hybrid", False):
        _check_hybrid(caches_prefixes)
    is_local = getattr(model, "attention_chunk_size", None) is not None
    scheduler = getattr(vllm_config, "scheduler_config", None)
    one_group = getattr(scheduler, "disable_hybrid_kv_cache_manager", False)
    if is_local and not one_group and not compat.can_offload_local_attention():
        raise _local_attention()


def check_kv_cache(kv_cache_config: Any) -> None:
    """Raise Refused (BAD_CONFIG) for KV cache groups whose bytes could not be right."""
    if compat.is_host_resident(kv_cache_config):
        raise _host_resident()
    for group in offloaded_groups(kv_cache_config):
        for spec in compat.layer_specs(group.kv_cache_spec):
            _check_layer(spec)


def limit_chunks(vllm_config: Any, kv_cache_config: Any) -> None:
    """Use one block per chunk for Mamba states in the cache mode "align", and warn if more are set.

    In that mode vLLM keeps the states of a few blocks only, so a larger chunk is never complete,
    and nothing would be found. In the mode "all" every block has one. Called before vLLM reads the
    options.
    """
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    groups = offloaded_groups(kv_cache_config)
    layers = [layer for group in groups for layer in compat.layer_specs(group.kv_cache_spec)]
    states = [layer for layer in layers if isinstance(layer, MambaSpec)]
    if not any(state.mamba_cache_mode == "align" for state in states):
        return
    tokens = {layer.block_size for layer in layers}
    for key, one_block in ((TOKENS_PER_CHUNK, tokens), (BLOCKS_PER_CHUNK, {1})):
        if (value := extra.get(key)) is not None and int(value) not in one_block:
            del extra[key]
            log.warning(
                "kvferry: %s = %s is ignored, and a chunk is one block: larger chunks of a model "
                "with Mamba layers would never be found. Remove %s",
                *(key, value, key),
            )


def log_excluded_groups(kv_cache_config: Any) -> None:
    """Say which KV cache groups are not offloaded: vLLM computes or replays what they hold."""
    offloaded = offloaded_groups(kv_cache_config)
    excluded = [
        f"{type(group.kv_cache_spec).__name__} of {group.layer_names[0]}"
        for group in kv_cache_config.kv_cache_groups
        if all(group is not other for other in offloaded)
    ]
    if excluded:
        names = ", ".join(excluded)
        vllm_log.info("kvferry: not offloaded, as vLLM does not cache them: %s", names)


def warn_of_unwritten_copies(vllm_config: Any, kv_cache_config: Any) -> None:
    """Warn if requests may begin inside a cached block, as with --prefix-match-unit.

    vLLM copies that block before the step's forward pass. It hashes blocks when it schedules the
    requests that fill them, so the block may be one that a request of the same step has yet to
    write. Its Mamba groups exclude these blocks (cached_blocks_this_step), its attention groups do
    not. This also happens without a connector. kvferry stores the KV computed from such a copy.
    """
    tokens = compat.tokens_between_hits(vllm_config, kv_cache_config)
    specs = [
        spec
        for group in offloaded_groups(kv_cache_config)
        for spec in compat.layer_specs(group.kv_cache_spec)
    ]
    if tokens is None or not any(isinstance(spec, MambaSpec) for spec in specs):
        return
    context = vllm_config.parallel_config.decode_context_parallel_size
    block = max(
        spec.block_size * (context if getattr(spec, "dcp_sharded", False) else 1) for spec in specs
    )
    if tokens < block:
        log.warning(
            "kvferry: vLLM may compute with wrong KV, also without a connector: prefixes end every "
            "%d tokens, inside blocks of %d, and a request may copy such a block before another "
            "one of the same step has written it; start vLLM without --prefix-match-unit and with "
            "--decode-context-parallel-size 1",
            tokens,
            block,
        )


def _check_layer(spec: Any) -> None:
    name = type(spec).__name__
    if isinstance(spec, MambaSpec):
        _check_hybrid(caches_prefixes=spec.mamba_cache_mode != "none")
    elif not compat.can_offload(spec):
        if isinstance(spec, ChunkedLocalAttentionSpec):
            raise _local_attention()
        message = f"vLLM cannot offload {name}; start it without --kv-transfer-config"
        raise Refused(Code.BAD_CONFIG, message, name)
    elif getattr(spec, "non_causal", False):
        message = (
            "tokens of this model attend to later ones, so their KV depends on more than their "
            "prefix; start vLLM without --kv-transfer-config"
        )
        raise Refused(Code.BAD_CONFIG, message, name)


def _check_hybrid(caches_prefixes: bool) -> None:
    if not compat.OFFLOADS_MAMBA_STATES:
        message = (
            "models with Mamba layers may read wrong states with a connector of this vLLM; use "
            "vLLM 0.29 to 0.33"
        )
        raise Refused(Code.BAD_CONFIG, message, "Mamba layers")
    if not caches_prefixes:
        message = (
            "Mamba states are kept for offloading only with vLLM's prefix caching; start vLLM "
            "with --enable-prefix-caching"
        )
        raise Refused(Code.BAD_CONFIG, message, "enable_prefix_caching")


def _local_attention() -> Refused:
    message = (
        "this vLLM cannot offload groups of chunked local attention; use vLLM 0.28 to 0.33, or "
        "start it with --disable-hybrid-kv-cache-manager"
    )
    return Refused(Code.BAD_CONFIG, message, "attention_chunk_size")


def _host_resident() -> Refused:
    message = (
        "kvferry does not support a KV cache that is partly in host memory; start vLLM without "
        "hisparse_config in --attention-config"
    )
    return Refused(Code.BAD_CONFIG, message, "host_resident")
