"""Fields of the fingerprint that identify a model's weights and configuration.

They must be equal in all processes of an engine. vLLM's resolved hf_config is not: some models
modify it when they are created, which the scheduler does not do. So the fields identify its inputs:
the commit or the files, the overrides, and the version of transformers.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvferry.proto.version import installed_version

log = logging.getLogger("kvferry")

# Files of a model's directory that can change its KV.
MODEL_SUFFIXES = frozenset({".bin", ".gguf", ".json", ".pt", ".pth", ".py", ".safetensors"})
# Files up to this size are hashed: a configuration may be rewritten, unchanged, at each start. A
# larger file is identified by its size and its modification time, or its name in the hub's cache.
MAX_HASHED_BYTES = 32 << 20

BLOB, COMMIT = re.compile("[0-9a-f]{64}"), re.compile("[0-9a-f]{40}")
# The load_format whose files are not in the model's directory.
TENSORIZER = "tensorizer"


def model_fields(vllm_config: Any) -> tuple[tuple[str, str], ...]:
    """(name, value) pairs for a fingerprint."""
    draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
    unquantized = getattr(vllm_config.cache_config, "kv_cache_dtype_skip_layers", None) or ()
    return (
        ("layers not quantized", _digest(*map(str, unquantized)) if unquantized else ""),
        ("weights and config", _digest(*_sources(vllm_config.model_config))),
        ("media", _digest(*_media(vllm_config.model_config))),
        ("draft model", "" if draft is None else _digest(str(draft.model), *_sources(draft))),
        ("transformers", installed_version("transformers") or ""),
        ("salt", _salt(vllm_config)),
    )


def _sources(model: Any) -> Iterator[str]:
    """What identifies a model's weights and configuration."""
    yield str(getattr(getattr(model, "hf_config", None), "_commit_hash", None))
    for name in ("model", "hf_config_path", "model_weights"):
        yield from _files(str(getattr(model, name, None) or ""))
    for name in ("hf_config_path", "config_format", "override_attention_dtype"):
        yield str(getattr(model, name, None))
    yield str(getattr(model, "quantization_config", None))  # overrides that of the checkpoint
    overrides = getattr(model, "hf_overrides", None) or {}
    if not callable(overrides):
        yield json.dumps(overrides, sort_keys=True, default=str)
    rope = getattr(getattr(model, "hf_text_config", None), "rope_parameters", None)
    if "longrope" in str(rope):  # its factors depend on the length
        yield str(model.max_model_len)


def _media(model: Any) -> Iterator[str]:
    """What turns media into embeddings: vLLM's block hashes identify only its inputs."""
    media = getattr(model, "multimodal_config", None)
    for name in ("mm_processor_kwargs", "video_pruning_rate", "mm_encoder_attn_dtype"):
        yield json.dumps(getattr(media, name, None), sort_keys=True, default=str)
    yield from _files(str(getattr(media, "mm_encoder_fp8_scale_path", None) or ""))


def _files(path: str) -> Iterator[str]:
    """The files of a local model, each with its version; nothing for a model of the hub."""
    local = Path(path)
    if path and local.exists():
        for file in sorted(local.iterdir()) if local.is_dir() else [local]:
            if file.suffix in MODEL_SUFFIXES and file.is_file():
                stat = file.stat()
                small = stat.st_size <= MAX_HASHED_BYTES
                yield f"{file.name} {stat.st_size} {_hash_file(file) if small else _version(file)}"


def _salt(vllm_config: Any) -> str:
    """The user's salt; or one of this start, if the fingerprint cannot identify everything."""
    transfer = vllm_config.kv_transfer_config
    salt = transfer.kv_connector_extra_config.get("kvferry_salt")
    if salt is not None:
        return str(salt)
    unknown = []
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        unknown.append("the scales of calculate_kv_scales")
    if getattr(vllm_config, "lora_config", None) is not None:
        unknown.append("the LoRA adapters (vLLM's block hashes contain their names only)")
    if callable(getattr(vllm_config.model_config, "hf_overrides", None)):
        unknown.append("hf_overrides (a function)")
    if getattr(vllm_config, "weight_transfer_config", None) is not None:
        unknown.append("the weights that are transferred to it")
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
    return "of this start " + _digest(str(start), str(transfer.engine_id))


def _versioned(vllm_config: Any) -> bool:
    """Whether the fingerprint changes when the weights do."""
    model = vllm_config.model_config
    streamed = "://" in str(getattr(model, "model_weights", None) or "")
    if (
        streamed
        or getattr(getattr(vllm_config, "load_config", None), "load_format", "") == TENSORIZER
    ):
        return False
    if Path(model.model).exists() or COMMIT.fullmatch(str(getattr(model, "revision", None))):
        return True
    elsewhere = getattr(
        model, "hf_config_path", None
    )  # then the commit is that of the configuration
    return not elsewhere and getattr(model.hf_config, "_commit_hash", None) is not None


def _version(file: Path) -> str:
    """The file's hash if it is named so, as in the hub's cache; else its modification time."""
    blob = file.resolve()
    named = blob.parent.name == "blobs" and BLOB.fullmatch(blob.name)
    return blob.name if named else str(file.stat().st_mtime_ns)


def _hash_file(file: Path) -> str:
    try:
        return hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()
    except OSError:
        return ""  # vLLM cannot read it either


def _digest(*texts: str) -> str:
    return hashlib.blake2b(json.dumps(texts).encode(), digest_size=16).hexdigest()
