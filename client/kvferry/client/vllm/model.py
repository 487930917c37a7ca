"""Fields of the fingerprint that identify a model's weights and configuration.

They must be equal in all processes of an engine. vLLM's resolved hf_config is not: some models
modify it when they are created, which the scheduler does not do. So the fields identify its inputs:
the commit or the files, the overrides, and the version of transformers.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvferry.client.engines.model_files import COMMIT, digest, file_versions, hub_snapshot
from kvferry.client.engines.options import user_salt
from kvferry.proto.version import installed_version

log = logging.getLogger("kvferry")

# The load_format whose files are not in the model's directory.
TENSORIZER = "tensorizer"
# Options of a drafting model that change its layers' KV, which is offloaded with the target's.
DRAFT_OPTIONS = (
    "method",
    "quantization",
    "code_revision",
    "use_heterogeneous_vocab",
    "draft_tensor_parallel_size",
    "kv_cache_dtype",
    "attention_backend",
    "parallel_drafting",
    "index_share_for_mtp_iteration",
    "draft_load_config.load_format",
    "draft_model_config.dtype",
    "draft_model_config.revision",
)
# Options that change what media become, and are not in the hashes of media that vLLM's block hashes
# contain. Not mm_hasher_algorithm: with another one the block hashes differ, and no bytes.
MEDIA_OPTIONS = (
    "mm_processor_kwargs",
    "media_io_kwargs",
    "mm_device_do_normalize",
    "mm_encoder_attn_dtype",
)


def model_fields(vllm_config: Any) -> tuple[tuple[str, str], ...]:
    """(name, value) pairs for a fingerprint."""
    unquantized = getattr(vllm_config.cache_config, "kv_cache_dtype_skip_layers", None) or ()
    return (
        ("layers not quantized", digest(*map(str, unquantized)) if unquantized else ""),
        ("weights and config", digest(*_sources(vllm_config.model_config, vllm_config))),
        ("media", _media(vllm_config.model_config)),
        ("draft model", _draft(vllm_config)),
        ("transformers", installed_version("transformers") or ""),
        ("salt", _salt(vllm_config)),
    )


def read_path(config: Any, path: str) -> str:
    """The text of a nested attribute, the same in all processes; "" if it is None or absent."""
    for name in path.split("."):
        config = getattr(config, name, None)
    if config is None:
        return ""
    if hasattr(config, "compute_hash"):
        return str(config.compute_hash())
    if isinstance(config, dict | list | tuple):
        return json.dumps(config, sort_keys=True, default=str) if config else ""
    return str(config)


def _sources(model: Any, vllm_config: Any) -> Iterator[str]:
    """Texts that identify a model's weights and configuration."""
    commit = hub_snapshot(str(model.model)).commit
    yield commit or str(getattr(getattr(model, "hf_config", None), "_commit_hash", None))
    for name in ("model", "hf_config_path", "model_weights"):
        yield from file_versions(str(getattr(model, name, None) or ""))
    for name in ("hf_config_path", "config_format", "override_attention_dtype"):
        yield str(getattr(model, name, None))
    yield str(getattr(model, "quantization_config", None))  # overrides that of the checkpoint
    yield read_path(vllm_config, "load_config.ignore_patterns")
    overrides = getattr(model, "hf_overrides", None) or {}
    if not callable(overrides):
        yield json.dumps(overrides, sort_keys=True, default=str)
    rope = getattr(getattr(model, "hf_text_config", None), "rope_parameters", None)
    if "longrope" in str(rope):  # its factors depend on the length
        yield str(model.max_model_len)


def _draft(vllm_config: Any) -> str:
    """A text that identifies the model that drafts tokens, if it has layers with KV."""
    speculative = vllm_config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    # Methods without a model, as ngram, name the target's.
    if draft is None or draft is getattr(speculative, "target_model_config", None):
        return ""
    options = (read_path(speculative, path) for path in DRAFT_OPTIONS)
    name = hub_snapshot(str(draft.model)).name or str(draft.model)
    return digest(name, *_sources(draft, vllm_config), *options)


def _media(model: Any) -> str:
    """Options that turn media into embeddings: vLLM's block hashes identify only the media."""
    media = getattr(model, "multimodal_config", None)
    if media is None:
        return ""
    options = [read_path(media, name) for name in MEDIA_OPTIONS]
    if getattr(media, "video_pruning_rate", None):
        options += [read_path(media, f"video_pruning_{name}") for name in ("rate", "method")]
    scales = file_versions(str(getattr(media, "mm_encoder_fp8_scale_path", None) or ""))
    return digest(*options, os.environ.get("VLLM_VIDEO_LOADER_BACKEND", ""), *scales)


def _salt(vllm_config: Any) -> str:
    """The user's salt; or one of this start, if the fingerprint cannot identify everything."""
    transfer = vllm_config.kv_transfer_config
    if salt := user_salt(transfer.kv_connector_extra_config):
        return salt
    unknown = []
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        unknown.append("the scales of calculate_kv_scales")
    if getattr(vllm_config, "lora_config", None) is not None:
        unknown.append("the LoRA adapters (vLLM's block hashes contain their names only)")
    if callable(getattr(vllm_config.model_config, "hf_overrides", None)):
        unknown.append("hf_overrides (a function)")
    if getattr(vllm_config, "weight_transfer_config", None) is not None:
        unknown.append("the weights that are transferred to it")
    if getattr(vllm_config.model_config, "enable_sleep_mode", False):
        unknown.append("the weights that are loaded after a sleep of level 2")
    if not _versioned(vllm_config):
        unknown.append("the weights (no commit, no local file)")
    if not unknown:
        return ""
    log.warning(
        "kvferry: cannot identify %s: nothing is shared with other engines, or found again after a "
        "restart. To share, set kvferry_salt in kv_connector_extra_config, to a value that you "
        "change whenever they change",
        " and ".join(unknown),
    )
    start = getattr(vllm_config, "instance_id", None)
    return "of this start " + digest(str(start), str(transfer.engine_id))


def _versioned(vllm_config: Any) -> bool:
    """Whether the fingerprint changes when the weights do."""
    model = vllm_config.model_config
    streamed = "://" in str(getattr(model, "model_weights", None) or "")
    if (
        streamed
        or getattr(getattr(vllm_config, "load_config", None), "load_format", "") == TENSORIZER
    ):
        return False
    if hub_snapshot(str(model.model)).commit or Path(model.model).exists():
        return True
    if COMMIT.fullmatch(str(getattr(model, "revision", None))):
        return True
    elsewhere = getattr(
        model, "hf_config_path", None
    )  # then the commit is that of the configuration
    return not elsewhere and getattr(model.hf_config, "_commit_hash", None) is not None
