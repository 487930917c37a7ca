"""Fields of the fingerprint that identify a model's weights and configuration.

They must be equal in all processes of an engine. vLLM's resolved hf_config is not: some models
modify it when they are created, which the scheduler does not do. So the fields identify its inputs:
the commit or the files, the overrides, and the version of transformers.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvferry.proto.version import installed_version

log = logging.getLogger("kvferry")

# Files of a model's directory that can change its KV.
MODEL_SUFFIXES = frozenset({".bin", ".gguf", ".json", ".pt", ".pth", ".py", ".safetensors"})
# Files up to this size are hashed: a configuration may be rewritten, unchanged, at each start. A
# larger file is identified by its name in the hub's cache, or by its size, modification time and
# samples. Times alone are equal in reproducible images; samples alone miss a change between them.
MAX_HASHED_BYTES = 32 << 20
# Samples of a larger file, spread evenly: 1 MiB per file, beside the header of safetensors.
SAMPLES, SAMPLE_BYTES = 16, 64 << 10
# Maximum of bytes that are hashed of the header of safetensors: names, types, shapes and offsets.
MAX_HEADER_BYTES = 1 << 20

BLOB, COMMIT = re.compile("[0-9a-f]{64}"), re.compile("[0-9a-f]{40}")
# A model in the hub's cache. With HF_HUB_OFFLINE vLLM replaces a model's name by this path.
SNAPSHOT = re.compile("(?:.*/)?models--([^/]+)/snapshots/([0-9a-f]{40})/?")
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


class HubSnapshot(NamedTuple):
    """The name and the commit of a model in the hub's cache; both empty if it is elsewhere."""

    name: str = ""
    commit: str = ""


def hub_snapshot(path: str) -> HubSnapshot:
    """The cache may be anywhere on each host, so its path identifies nothing."""
    match = SNAPSHOT.fullmatch(path)
    return HubSnapshot(match[1].replace("--", "/"), match[2]) if match else HubSnapshot()


def digest(*texts: str) -> str:
    return hashlib.blake2b(json.dumps(texts).encode(), digest_size=16).hexdigest()


def _sources(model: Any, vllm_config: Any) -> Iterator[str]:
    """Texts that identify a model's weights and configuration."""
    commit = hub_snapshot(str(model.model)).commit
    yield commit or str(getattr(getattr(model, "hf_config", None), "_commit_hash", None))
    for name in ("model", "hf_config_path", "model_weights"):
        yield from _files(str(getattr(model, name, None) or ""))
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
    scales = _files(str(getattr(media, "mm_encoder_fp8_scale_path", None) or ""))
    return digest(*options, os.environ.get("VLLM_VIDEO_LOADER_BACKEND", ""), *scales)


def _files(path: str) -> Iterator[str]:
    """The files of a local model, each with its version; nothing for a model of the hub."""
    local = Path(path)
    if path and local.exists() and not hub_snapshot(path).commit:
        for file in sorted(local.iterdir()) if local.is_dir() else [local]:
            if file.suffix in MODEL_SUFFIXES and file.is_file():
                stat = file.stat()
                small = stat.st_size <= MAX_HASHED_BYTES
                yield f"{file.name} {stat.st_size} {_hash_file(file) if small else _version(file)}"


def user_salt(extra: Mapping[str, Any]) -> str:
    """The user's salt; "" if there is none, as for an unset value that a template renders.

    With one, no other part of the fingerprint protects what cannot be identified.
    """
    salt = extra.get("kvferry_salt")
    return "" if salt is None else str(salt).strip()


def identify_files(path: str) -> str:
    """A text that changes with the files of a local model or adapter; "" if it has none."""
    try:
        files = tuple(_files(str(Path(path).expanduser())))
    except OSError:  # they are being replaced
        return ""
    return digest(*files) if files else hub_snapshot(path).commit


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


def _version(file: Path) -> str:
    """The file's hash if it is named so, as in the hub's cache; else its time and its samples."""
    blob = file.resolve()
    named = blob.parent.name == "blobs" and BLOB.fullmatch(blob.name)
    return blob.name if named else f"{file.stat().st_mtime_ns} {_hash_samples(file)}"


def _hash_samples(file: Path) -> str:
    """A hash of the header of safetensors, and of samples of the data, at equal distances."""
    found = hashlib.blake2b(digest_size=16)
    try:
        with file.open("rb", buffering=0) as opened:
            last = os.fstat(opened.fileno()).st_size - SAMPLE_BYTES
            start = 0
            if file.suffix == ".safetensors":  # 8 bytes: the size of the header, little-endian
                data = 8 + int.from_bytes(opened.read(8), "little")
                start = data if data <= last else 0  # else it is not a safetensors file
                found.update(os.pread(opened.fileno(), min(start, MAX_HEADER_BYTES), 0))
            for number in range(SAMPLES):
                at = start + (last - start) * number // (SAMPLES - 1)
                found.update(os.pread(opened.fileno(), SAMPLE_BYTES, at))
    except OSError:
        return ""  # vLLM cannot read it either
    return found.hexdigest()


def _hash_file(file: Path) -> str:
    try:
        return hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()
    except OSError:
        return ""  # vLLM cannot read it either
