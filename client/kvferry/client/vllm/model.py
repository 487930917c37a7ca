"""What a model computes with, beyond its name: where it changes, the bytes of its KV do.

It must be the same in all processes of an engine. vLLM's resolved hf_config is not: some models
write into it when they are made, and the scheduler makes none. So what it is resolved from is
named: the commit or the files, what is laid over them, and the package that reads them.
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

MODEL_SUFFIXES = frozenset({".bin", ".gguf", ".json", ".pt", ".pth", ".py", ".safetensors"})
"""Those of a model's folder that can change its KV."""
MAX_HASHED_BYTES = 32 << 20
"""Bytes of a file that is read to know it: a configuration may be written anew at each start, and
say the same. Of a larger one its size and its time tell, or the hub's word for what it has."""

BLOB, COMMIT = re.compile("[0-9a-f]{64}"), re.compile("[0-9a-f]{40}")
TENSORIZER = "tensorizer"
"""The load_format whose files are named elsewhere."""


def model_fields(vllm_config: Any) -> tuple[tuple[str, str], ...]:
    """By name, for a fingerprint."""
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
    """What a model's weights and its configuration come from."""
    yield str(getattr(getattr(model, "hf_config", None), "_commit_hash", None))
    for name in ("model", "hf_config_path", "model_weights"):
        yield from _files(str(getattr(model, name, None) or ""))
    for name in ("hf_config_path", "config_format", "override_attention_dtype"):
        yield str(getattr(model, name, None))
    yield str(getattr(model, "quantization_config", None))  # what is laid over the checkpoint's
    overrides = getattr(model, "hf_overrides", None) or {}
    if not callable(overrides):
        yield json.dumps(overrides, sort_keys=True, default=str)
    rope = getattr(getattr(model, "hf_text_config", None), "rope_parameters", None)
    if "longrope" in str(rope):  # its factors are those of the length that is served
        yield str(model.max_model_len)


def _media(model: Any) -> Iterator[str]:
    """How images, videos and sound become embeddings: vLLM's hashes name what they were before."""
    media = getattr(model, "multimodal_config", None)
    for name in ("mm_processor_kwargs", "video_pruning_rate", "mm_encoder_attn_dtype"):
        yield json.dumps(getattr(media, name, None), sort_keys=True, default=str)
    yield from _files(str(getattr(media, "mm_encoder_fp8_scale_path", None) or ""))


def _files(path: str) -> Iterator[str]:
    """A local model's, with what tells that one is another; nothing for another's name."""
    here = Path(path)
    if path and here.exists():
        for file in sorted(here.iterdir()) if here.is_dir() else [here]:
            if file.suffix in MODEL_SUFFIXES and file.is_file():
                stat = file.stat()
                small = stat.st_size <= MAX_HASHED_BYTES
                yield f"{file.name} {stat.st_size} {_sum(file) if small else _version(file)}"


def _salt(vllm_config: Any) -> str:
    """A word of the user's; or of this start, where nothing tells what else it computes with."""
    transfer = vllm_config.kv_transfer_config
    said = transfer.kv_connector_extra_config.get("kvferry_salt")
    if said is not None:
        return str(said)
    unknown = []
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        unknown.append("the scales of calculate_kv_scales")
    if getattr(vllm_config, "lora_config", None) is not None:
        unknown.append("the LoRA adapters, of which vLLM's block hashes have the names only")
    if callable(getattr(vllm_config.model_config, "hf_overrides", None)):
        unknown.append("an hf_overrides that is a function")
    if getattr(vllm_config, "weight_transfer_config", None) is not None:
        unknown.append("the weights that are sent to it")
    if not _versioned(vllm_config):
        unknown.append("the weights, of which there is no commit and no file here")
    if not unknown:
        return ""
    log.warning(
        "kvferry: nothing tells whether another start has %s the same: nothing is shared with "
        "other engines, or found again after a restart. Where it has, say so: the same "
        "kvferry_salt in kv_connector_extra_config, and another one for another",
        " and ".join(unknown),
    )
    start = getattr(vllm_config, "instance_id", None)
    return "of this start " + _digest(str(start), str(transfer.engine_id))


def _versioned(vllm_config: Any) -> bool:
    """Whether other weights under the same name would be noticed."""
    model = vllm_config.model_config
    streamed = "://" in str(getattr(model, "model_weights", None) or "")
    if (
        streamed
        or getattr(getattr(vllm_config, "load_config", None), "load_format", "") == TENSORIZER
    ):
        return False
    if Path(model.model).exists() or COMMIT.fullmatch(str(getattr(model, "revision", None))):
        return True
    elsewhere = getattr(model, "hf_config_path", None)  # the commit is that of the configuration
    return not elsewhere and getattr(model.hf_config, "_commit_hash", None) is not None


def _version(file: Path) -> str:
    """The hub's cache calls its files by the sum of what they have; others only have a time."""
    blob = file.resolve()
    named = blob.parent.name == "blobs" and BLOB.fullmatch(blob.name)
    return blob.name if named else str(file.stat().st_mtime_ns)


def _sum(file: Path) -> str:
    try:
        return hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()
    except OSError:
        return ""  # nor can vLLM read it


def _digest(*texts: str) -> str:
    return hashlib.blake2b(json.dumps(texts).encode(), digest_size=16).hexdigest()
