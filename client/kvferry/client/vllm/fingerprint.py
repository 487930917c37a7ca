"""The fingerprint of an engine: all of vLLM's configuration that changes the bytes of its KV.

Called when an engine starts, in the scheduler's process and in the workers'. All must read the
same, so nothing is used that a worker changes when it creates the model. Options are read by their
path; one that a version of vLLM lacks adds nothing.

The fingerprint contains the options that change the format of KV (dtypes, layouts, sizes), and
those that change the function that the model computes, its precision included. It does not contain
options that choose another kernel, schedule or collective for the same function at the same
precision. tests/support/vllm_fields.py has a table of all fields of vLLM's configuration.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from kvferry.client.engines.model_files import digest, hub_snapshot
from kvferry.client.vllm.kv_cache_plan import (
    block_bytes,
    is_replicated,
    kv_layout,
    layer_spec,
    offloaded_groups,
    packed_groups,
    packs_blocks,
    resolved_layout,
)
from kvferry.client.vllm.model import model_fields, read_path
from kvferry.client.vllm.packed_groups import PackedGroups
from kvferry.proto.fingerprint import Fingerprint
from kvferry.proto.packing import packed_bytes
from kvferry.proto.version import installed_version

if TYPE_CHECKING:
    from kvferry.client.vllm.engine_config import BlockSizes

log = logging.getLogger("kvferry")

# The options of each field of the fingerprint.
OPTIONS: dict[str, tuple[str, ...]] = {
    "attention": (
        # A backend determines what a page holds and, before vLLM 0.29, the layout.
        "attention_config.backend",
        "attention_config.backend_per_kind",
        "attention_config.use_trtllm_attention",
        "attention_config.indexer_kv_dtype",
        "attention_config.use_fp4_indexer_cache",
        "attention_config.use_non_causal",
        "attention_config.disable_flashinfer_q_quantization",
        "attention_config.use_prefill_query_quantization",
    ),
    "mamba": (
        "cache_config.mamba_cache_mode",
        "cache_config.mamba_cache_dtype",
        "cache_config.mamba_ssm_cache_dtype",
        "cache_config.use_kda_recoverssm",
        "mamba_config.enable_stochastic_rounding",
        "mamba_config.stochastic_rounding_philox_rounds",
    ),
    "diffusion": (
        "diffusion_config.canvas_length",
        "diffusion_config.max_denoising_steps",
    ),
    "model code": (
        "model_config.model_impl",
        "model_config.code_revision",
        "model_config.model_class_overrides",
    ),
}
# Environment variables that change the format of KV or the precision of weights.
ENVIRONMENT = (
    "VLLM_SSM_CONV_STATE_LAYOUT",
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG",
    "VLLM_MARLIN_INPUT_DTYPE",
)
# Texts of options that are not set, or have their default.
UNSET = frozenset({"", "0", "None", "auto", "none", "SD"})

# Values of vLLM's cache_dtype that do not name the format: the layers choose it, and a worker's
# layers write what they chose over the configured value. Their specs name it in both processes.
DTYPES_CHOSEN_BY_LAYERS = frozenset(
    {
        "auto",
        "float16",
        "bfloat16",
        "fp8",
        "fp8_e4m3",
        "fp8_ds_mla",
        "nvfp4",
        "nvfp4_ds_mla",
    }
)
# Fields of a layer's KVCacheSpec that change the bytes of a page, or what they mean.
SPEC_FIELDS = (
    "block_size",
    "num_kv_heads",
    "head_size",
    "head_size_v",
    "dtype",
    "kv_quant_mode",
    "cache_dtype_str",
    "num_head_slots",
    "state_content_bytes",
    "tokens_per_state",
    "compress_ratio",
    "storage_block_size",
    "tq_slot_size",
    "indexes_kv_by_block_stride",
    "sliding_window",
    "attention_chunk_size",
    "rswa_window",
    "sink_len",
    "non_causal",
    "model_version",
    "cache_role",
    "shapes",
    "dtypes",
    "mamba_type",
    "mamba_cache_mode",
    "tp_replicated",
    "dcp_sharded",
)


def read_fingerprint(vllm_config: Any, kv_cache_config: Any, blocks: BlockSizes) -> Fingerprint:
    """The fingerprint of this rank; in the scheduler, of rank 0. Replicated ranks have the same."""
    parallel = vllm_config.parallel_config
    algorithm = read_path(vllm_config, "cache_config.prefix_caching_hash_algo")
    layout = kv_layout(vllm_config, kv_cache_config)
    groups = offloaded_groups(kv_cache_config)
    rows = packed_groups(vllm_config, kv_cache_config)
    nbytes = block_bytes(kv_cache_config) if rows is None else max(rows.group_bytes)
    pack = packs_blocks(vllm_config, kv_cache_config)
    model = str(vllm_config.model_config.model)
    return Fingerprint(
        model=hub_snapshot(model).name or model,
        host_block_bytes=(packed_bytes(nbytes) if pack else nbytes) * blocks.factor,
        revision=read_path(vllm_config, "model_config.revision"),
        dtype=read_path(vllm_config, "model_config.dtype"),
        kv_dtype=_kv_dtype(vllm_config, groups),
        kv_layout=layout,
        block_size=blocks.hash_tokens,
        rank=0 if is_replicated(vllm_config, kv_cache_config) else parallel.rank,
        world_size=parallel.world_size,
        hash_algorithm=algorithm,
        hash_seed=_hash_seed(algorithm, vllm_config.kv_transfer_config.engine_id),
        key_bytes=_hash_bytes(algorithm) + 4,
        extra=(
            ("tokens per block", ",".join(map(str, blocks.tokens))),
            ("blocks per chunk", str(blocks.factor)),
            ("layers", str(sum(len(group.layer_names) for group in groups))),
            ("pages", _pages(vllm_config, kv_cache_config, layout)),
            *_group_bytes(rows),
            *([("packing", "12.25 bits")] if pack else []),
            ("model runner v2", read_path(vllm_config, "use_v2_model_runner")),
            ("quantization", read_path(vllm_config, "model_config.quantization")),
            ("load format", read_path(vllm_config, "load_config.load_format")),
            ("compute capability", _capability(vllm_config, kv_cache_config)),
            ("parallel", _ranks(parallel)),
            ("context parallel", _context_parallel(parallel)),
            ("replayssm", _replayssm(vllm_config)),
            ("additional config", _additional(vllm_config)),
            ("environment", _short(_settings(os.environ, ENVIRONMENT))),
            ("vllm", installed_version("vllm") or ""),
            *((name, _options(vllm_config, paths)) for name, paths in OPTIONS.items()),
            *model_fields(vllm_config),
        ),
    )


def _capability(vllm_config: Any, kv_cache_config: Any) -> str:
    """The GPU's compute capability, if vLLM may choose the KV's layout or precision by it.

    It chooses the layout by it, if it has not resolved one (before 0.29), and the precision at
    which a quantized model computes. Otherwise GPUs of all kinds share.
    """
    resolved = resolved_layout(vllm_config, kv_cache_config)
    if resolved and not read_path(vllm_config, "model_config.quantization"):
        return ""
    try:
        from vllm.platforms import current_platform
    except ImportError:
        return ""
    capability = current_platform.get_device_capability()
    return "" if capability is None else str(capability.as_version_str())


def _pages(vllm_config: Any, kv_cache_config: Any, layout: str) -> str:
    """The contents of pages, and their places in a block that holds the pages of all layers.

    It depends on the attention backend that vLLM chose, which the scheduler does not know. Ranks of
    a pipeline have other layers, and the scheduler knows those of rank 0 only: nothing then.
    """
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        return ""
    facts = [str(_spec_facts(group)) for group in offloaded_groups(kv_cache_config)]
    if not layout.startswith("L"):  # else strides depend on the number of blocks
        facts += map(str, _placement(kv_cache_config))
    return digest(*facts)


def _group_bytes(packed: PackedGroups | None) -> Iterator[tuple[str, str]]:
    """The bytes of host blocks, if vLLM's connector copies others: no field otherwise."""
    if packed is not None:
        yield "group bytes", _short(",".join(map(str, packed.group_bytes)))


def _spec_facts(group: Any) -> list[str]:
    spec = layer_spec(group)
    values = ((name, getattr(spec, name, None)) for name in SPEC_FIELDS)
    return [type(spec).__name__, *(f"{name}={v}" for name, v in values if v is not None)]


def _placement(kv_cache_config: Any) -> Iterator[tuple[int, ...]]:
    for tensor in kv_cache_config.kv_cache_tensors:
        layers = getattr(tensor, "layers", ())  # since vLLM 0.29
        layer_stride = tensor.layer_stride if len(layers) > 1 else 0
        block_stride, offset = (getattr(tensor, name, 0) for name in ("block_stride", "offset"))
        yield len(layers), layer_stride, block_stride, offset


def _kv_dtype(vllm_config: Any, groups: list[Any]) -> str:
    """The dtypes of KV. What the configuration does not name is read from the layers' specs."""
    configured = read_path(vllm_config, "cache_config.cache_dtype")
    if configured in DTYPES_CHOSEN_BY_LAYERS:
        configured = ""
    kinds = [configured] if configured else []
    # Ranks of a pipeline may begin with layers of other kinds; there the bytes of a block decide.
    if vllm_config.parallel_config.pipeline_parallel_size == 1:
        for spec in map(layer_spec, groups):
            names = ("dtypes",) if hasattr(spec, "dtypes") else ("dtype", "cache_dtype_str")
            values = (getattr(spec, name, None) for name in (*names, "kv_quant_mode"))
            kinds.append(" ".join(str(value) for value in values if value is not None))
    return _short(", ".join(dict.fromkeys(kinds)).replace("torch.", ""))


def _ranks(parallel: Any) -> str:
    return f"tp{parallel.tensor_parallel_size} pp{parallel.pipeline_parallel_size}"


def _context_parallel(parallel: Any) -> str:
    """Sizes, and consecutive tokens per rank. vLLM copies the dcp to the cp option late."""
    sizes = parallel.prefill_context_parallel_size, parallel.decode_context_parallel_size
    if sizes == (1, 1):
        return ""
    dcp = getattr(parallel, "dcp_kv_cache_interleave_size", 1)
    cp = getattr(parallel, "cp_kv_cache_interleave_size", 1)
    if cp == dcp or 1 in (cp, dcp):
        return f"{sizes[0]} {sizes[1]} {max(cp, dcp)}"
    return f"{sizes[0]} {sizes[1]} dcp {dcp} cp {cp}"


def _replayssm(vllm_config: Any) -> str:
    """The rows of inputs that a page of ReplaySSM has beside the state (since vLLM 0.27)."""
    if not getattr(vllm_config.cache_config, "use_replayssm", False):
        return ""
    paths = (
        "cache_config.replayssm_buffer_len",
        "mamba_config.backend",
        "speculative_config.num_speculative_tokens",
    )
    return _short(" ".join(read_path(vllm_config, path) for path in paths))


def _additional(vllm_config: Any) -> str:
    """The configuration of a plug-in for a platform."""
    text = read_path(vllm_config, "additional_config")
    return digest(text) if text else ""


def _options(vllm_config: Any, paths: tuple[str, ...]) -> str:
    """The options that are set, as "name=value"."""
    values = {path.rpartition(".")[2]: read_path(vllm_config, path) for path in paths}
    return _short(_settings(values, tuple(values)))


def _settings(values: Mapping[str, str], names: tuple[str, ...]) -> str:
    chosen = ((name, values.get(name, "")) for name in names)
    return " ".join(f"{name}={value}" for name, value in chosen if value not in UNSET)


def _short(text: str) -> str:
    """A text, or its digest if a fingerprint has no room for it."""
    return text if len(text) <= 200 else digest(text)


def _hash_seed(algorithm: str, engine: str) -> str:
    """The seed of block hashes. Without a fixed one, other processes have other hashes."""
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is not None:  # vLLM uses an empty one, too
        return seed
    fixed = _default_seed(algorithm)
    if fixed is not None:
        return fixed
    log.warning(
        "kvferry: PYTHONHASHSEED is not set, so vLLM hashes blocks with a random seed: nothing is "
        "shared with other engines, or found again after a restart. Start vLLM with "
        "PYTHONHASHSEED=0. vLLM 0.29 and newer need it for xxhash only"
    )
    return f"of engine {engine}"


def _default_seed(algorithm: str) -> str | None:
    """vLLM's fixed seed for a hash function. None if it is random, as all are before vLLM 0.29."""
    try:
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

        function = get_hash_fn_by_name(algorithm)
        first, second = (str(resolve_none_hash_seed(function)) for _ in range(2))
    except (ImportError, TypeError, ValueError):
        return None
    return first if first == second else None


def _hash_bytes(algorithm: str) -> int:
    """The length of the hashes of vLLM's function of this name."""
    try:
        from vllm.utils.hashing import get_hash_fn_by_name

        return len(get_hash_fn_by_name(algorithm)(b""))
    except (ImportError, ValueError):
        return 16 if "xxhash" in algorithm else 32
