"""The fingerprint of a server: all options of SGLang that change the bytes of its KV.

It contains the options that change the format of KV (dtypes, layouts, sizes), and those that change
the function that the model computes, its precision included. Not those that choose another kernel,
schedule or collective for the same function. The same holds for environment variables.
tests/support/sglang_fields.py has a table of all fields of SGLang's ServerArgs. Read when a server
starts, in each rank. Does not import SGLang.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.client.engines.model_files import (
    COMMIT,
    digest,
    file_versions,
    hub_snapshot,
)
from kvferry.client.engines.options import user_salt
from kvferry.proto.fingerprint import Fingerprint
from kvferry.proto.specs import KVLayout
from kvferry.proto.version import installed_version

log = logging.getLogger("kvferry")

# The fields of ServerArgs in each part of the fingerprint.
FIELDS: dict[str, tuple[str, ...]] = {
    "weights and config": (
        "load_format",
        "model_loader_extra_config",
        "model_impl",
        "model_config_parser",
        "json_model_override_args",
        "context_length",
        "quantization",
        "modelopt_quant",
        "quantize_and_serve",
        "kt_method",
        "kt_num_gpu_experts",
        "kt_max_deferred_experts_per_token",
        "enable_encoder_swa_bounded_replay",
        "enable_decoder_swa_bounded_replay",
        "dllm_algorithm",
    ),
    "attention": (
        "attention_backend",
        "prefill_attention_backend",
        "decode_attention_backend",
        "dsa_prefill_backend",
        "dsa_decode_backend",
        "dsv4_prefill_backend",
        "dsv4_attn_backend",
        "qsa_indexer_dtype",
        "enable_deepseek_v4_fp4_indexer",
        "prefill_kv_cache_dequant_dtype",
        "enable_page_major_kv_layout",
        "swa_prefix_tails",
    ),
    "precision": (
        "enable_tf32_matmul",
        "enable_fp32_lm_head",
        "triton_attention_reduce_in_fp32",
        "flashinfer_mxfp4_moe_precision",
        "enable_w4a4_mxfp4_megamoe",
        # Some MoE and FP4 backends quantize activations, others do not.
        "moe_runner_backend",
        "moe_a2a_backend",
        "fp4_gemm_runner_backend",
        "deepep_dispatcher_output_dtype",
        "flashinfer_a2a_dispatch_type",
        "enable_quant_communications",
        "enable_precise_embedding_interpolation",
        "rl_on_policy_target",
    ),
    "mamba": (
        "mamba_ssm_dtype",
        "mamba_radix_cache_strategy",
        "mamba_track_interval",
        "enable_mamba_cache_stochastic_rounding",
        "mamba_cache_philox_rounds",
        "enable_int8_mamba_checkpoint",
        "enable_linear_replayssm",
        "linear_replayssm_cache_len",
        "enable_linear_replayssm_spec",
    ),
    "draft model": (
        "speculative_algorithm",
        "speculative_draft_model_revision",
        "speculative_draft_load_format",
        "speculative_draft_kv_cache_dtype",
        "speculative_draft_model_quantization",
        "speculative_draft_attention_backend",
        "speculative_moe_runner_backend",
        "speculative_moe_a2a_backend",
        "speculative_enable_w4a4_mxfp4_megamoe",
        "speculative_draft_window_size",
        "speculative_draft_sink_size",
        "speculative_token_map",
        "enable_multi_layer_eagle",
    ),
    "media": (
        "mm_process_config",
        "mm_attention_backend",
        "image_processor_backend",
        "disable_fast_image_processor",
    ),
    "parallel": (
        "dcp_size",
        "attn_cp_size",
        "pp_size",
        "enable_prefill_cp",
        "cp_strategy",
        "enable_kv_cache_sharding",
        "enable_dsa_cache_layer_split",
        "enable_cp_decode_attn_tp",
    ),
}
# Fields that are paths: the files count, and the path does not.
PATHS = (
    "quantization_param_path",
    "decrypted_config_file",
    "decrypted_draft_config_file",
    "uno_lora_path",
    "kt_weight_path",
    "modelopt_checkpoint_restore_path",
    "dllm_algorithm_config",
)
# The models of a server: the fields with their path, revision and load format.
MODELS = {
    "model": ("model_path", "revision", "load_format"),
    "drafting model": (
        "speculative_draft_model_path",
        "speculative_draft_model_revision",
        "speculative_draft_load_format",
    ),
}
# Formats whose weights are in no file that can be identified here.
UNVERSIONED_FORMATS = frozenset(
    {"dummy", "remote", "remote_instance", "flash_rl", "sharded_remote"}
)
# Fields with which the weights may be others than those of the model's files.
UNVERSIONED_FIELDS = (
    "custom_weight_loader",
    "rl_quant_profile",
    "forward_hooks",
    "checkpoint_engine_wait_weights_before_ready",
)
# Environment variables that change the format of KV, or the precision of layers.
ENVIRONMENT = (
    "SGLANG_USE_HND_KVCACHE",
    "SGLANG_MAMBA_CONV_DTYPE",
    "SGLANG_MAMBA_SSM_DTYPE",
    "SGLANG_SKIP_SOFTMAX_PREFILL_THRESHOLD_SCALE_FACTOR",
    "SGLANG_SKIP_SOFTMAX_DECODE_THRESHOLD_SCALE_FACTOR",
    "SGLANG_INT4_WEIGHT",
    "SGLANG_CPU_QUANTIZATION",
    "SGLANG_FORCE_FP8_MARLIN",
    "SGLANG_OPT_HOPPER_BLOCK_FP8_BF16",
    "SGLANG_FP8_IGNORED_LAYERS",
    "SGLANG_FP4_IGNORED_LAYERS",
    "SGLANG_QUANT_ALLOW_DOWNCASTING",
    "SGLANG_MOE_NVFP4_DISPATCH",
    "SGLANG_NVFP4_CKPT_FP8_GEMM_IN_ATTN",
    "SGLANG_NVFP4_CKPT_FP8_NEXTN_MOE",
    "SGLANG_GLM_NEXTN_MOE_PTPC",
    "SGLANG_HUMMING_ONLINE_QUANT_CONFIG",
    "SGLANG_HUMMING_INPUT_QUANT_CONFIG",
    "SGLANG_HUMMING_USE_F16_ACCUM",
    "SGLANG_FLASHINFER_MEGAMOE_COMBINE_DTYPE",
    "SGLANG_FLASHINFER_NVFP4_PER_TOKEN_ACTIVATION",
    "SGLANG_FLASHINFER_CUTEDSL_NVFP4_W4A16",
    "FLASHINFER_NVFP4_4OVER6",
    "FLASHINFER_NVFP4_4OVER6_E4M3_USE_256",
    "SGLANG_ENABLE_DP_GATHER_FP8",
    "SGLANG_DEEPEP_BF16_DISPATCH",
    "SGLANG_NIXL_EP_BF16_DISPATCH",
    "SGLANG_MINICPM_DENSE_AS_SPARSE",
    "SGLANG_MINICPM_FORCE_DENSE",
)
# Values that mean "not set".
UNSET = frozenset({"", "None", "False", "{}", "[]", "auto"})


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank, among those that hold different parts of each page. start: an identifier that all
    ranks of this start of the server have in common."""

    number: int
    count: int
    start: str = ""


def read_fingerprint(
    server_args: Any, layout: KVLayout, rank: Rank, page_size: int, extra: Mapping[str, Any]
) -> Fingerprint:
    """layout: of the pools. extra: the options of the linker."""
    model = str(server_args.model_path)
    return Fingerprint(
        model=hub_snapshot(model).name or model,
        host_block_bytes=layout.host_block_bytes,
        revision=_text(server_args, "revision"),
        dtype=_text(server_args, "dtype"),
        kv_dtype=_text(server_args, "kv_cache_dtype"),
        kv_layout="sglang pages by layer",
        block_size=page_size,
        rank=rank.number,
        world_size=rank.count,
        hash_algorithm="sglang sha256",
        extra=(
            ("pages", _pages(layout)),
            *([("packing", "12.25 bits")] if layout.packed else []),
            ("weights", digest(*_weights(server_args))),
            *((name, _options(server_args, fields)) for name, fields in FIELDS.items()),
            ("environment", _join((name, os.environ.get(name, "")) for name in ENVIRONMENT)),
            ("files", digest(*(one for path in PATHS for one in _files(server_args, path)))),
            ("compute capability", _capability()),
            ("sglang", installed_version("sglang") or ""),
            ("transformers", installed_version("transformers") or ""),
            ("salt", _salt(server_args, extra, rank.start)),
        ),
    )


def _weights(server_args: Any) -> list[str]:
    """Texts that identify the weights of the model, and of the one that drafts tokens."""
    texts = []
    for path, revision, _ in MODELS.values():
        name = _text(server_args, path)
        texts += [hub_snapshot(name).name or name, _commit(name, _text(server_args, revision))]
        texts += file_versions(name)
    return texts


def _commit(model: str, revision: str) -> str:
    """The commit of a model of the hub; "" if it is a directory, or is not in the hub's cache."""
    if found := hub_snapshot(model).commit:
        return found
    if not model or Path(model).exists():
        return ""
    try:
        from huggingface_hub import try_to_load_from_cache

        config = try_to_load_from_cache(model, "config.json", revision=revision or None)
    except (ImportError, ValueError):  # a name of another hub
        return ""
    return hub_snapshot(str(Path(config).parent)).commit if isinstance(config, str) else ""


def _files(server_args: Any, field: str) -> list[str]:
    """The files at a path, each with its version; the path itself if there are none, as of a name
    in the hub."""
    path = _text(server_args, field)
    if hub_snapshot(path).commit:
        return [field, *hub_snapshot(path)]
    return [field, *(tuple(file_versions(path)) or (path,))]


def _text(server_args: Any, field: str) -> str:
    value = getattr(server_args, field, None)
    if isinstance(value, dict | list | tuple):
        return json.dumps(value, sort_keys=True, default=str)
    return "" if value is None else str(value)


def _options(server_args: Any, fields: tuple[str, ...]) -> str:
    return _join((field, _text(server_args, field)) for field in fields)


def _join(settings: Iterable[tuple[str, str]]) -> str:
    """Those that are set, as "name=value"; a digest if a fingerprint has no room for them."""
    text = " ".join(f"{name}={value}" for name, value in settings if value not in UNSET)
    return text if len(text) <= 200 else digest(text)


def _pages(layout: KVLayout) -> str:
    """The bytes of each buffer's page, group by group."""
    sizes = [[ref.page_size_bytes for ref in group] for group in layout.groups]
    return digest(json.dumps(sizes))


def _capability() -> str:
    """The GPU's compute capability: the precision of quantized layers depends on it, and SGLang's
    options do not show whether the checkpoint is quantized."""
    import torch

    return str(torch.cuda.get_device_capability()) if torch.cuda.is_available() else ""


def _salt(server_args: Any, extra: Mapping[str, Any], start: str) -> str:
    """The user's salt; or one of this start, if the fingerprint cannot identify everything."""
    if salt := user_salt(extra):
        return salt
    unknown = []
    if _text(server_args, "enable_lora") == "True" or _text(server_args, "lora_paths"):
        unknown.append(
            "the LoRA adapters (SGLang's page hashes contain their names and paths only)"
        )
    if any(_text(server_args, field) not in UNSET for field in UNVERSIONED_FIELDS):
        unknown.append("weights that are loaded or changed by code of yours")
    for what, fields in MODELS.items():
        if (name := _text(server_args, fields[0])) and not _versioned(
            name, *[_text(server_args, field) for field in fields[1:]]
        ):
            unknown.append(f"the weights of the {what} (no commit, no local file)")
    if not unknown:
        return ""
    log.warning(
        "kvferry: cannot identify %s: nothing is shared with other servers, or found again after a "
        "restart. To share, set kvferry_salt in linker_extra_config, to a value that you change "
        "whenever they change",
        " and ".join(unknown),
    )
    return f"of this start {start}"


def _versioned(model: str, revision: str, load_format: str) -> bool:
    """Whether the fingerprint changes when the weights of a model do."""
    if load_format in UNVERSIONED_FORMATS or "://" in model:
        return False
    return bool(Path(model).exists() or COMMIT.fullmatch(revision) or _commit(model, revision))
