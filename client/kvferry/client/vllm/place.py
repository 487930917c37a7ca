"""Where in a model an engine stands, and what its blocks are: from vLLM's configuration.

A namespace must name everything that makes bytes differ. vLLM gives an OffloadingSpec a part of
its configuration; the connector knows all of it, and says so here first (`telling`).
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvferry.client.endpoint import find_daemon
from kvferry.proto.errors import Code, Gone
from kvferry.proto.status import Fingerprint

log = logging.getLogger("kvferry")

TIMEOUT = 5.0
"""Seconds that a daemon has to answer when an engine comes."""

_told: list[Any] = []


@contextlib.contextmanager
def telling(vllm_config: Any) -> Iterator[None]:
    """A spec that is made meanwhile knows all of vLLM's configuration."""
    _told.append(vllm_config)
    try:
        yield
    finally:
        _told.pop()


def fingerprint_of(config: Any) -> Fingerprint:
    """The fingerprint of this rank's blocks, rank 0's in the scheduler.

    config: vLLM's OffloadingConfig. host_block_bytes is what vLLM gives one block of all groups,
    padding and all.
    """
    told = _told[-1] if _told else None
    algorithm, seed = _hashing(told, config.engine_id)
    groups = ",".join(str(group.tokens_per_block) for group in config.groups)
    return Fingerprint(
        model=config.model.name,
        host_block_bytes=config.worker_kv_bytes_per_block * config.cache.blocks_per_chunk,
        revision=_said(told, "model_config.revision"),
        dtype=_said(told, "model_config.dtype"),
        kv_dtype=config.model.dtype,
        kv_layout=_said(told, "cache_config.kv_cache_layout"),
        block_size=config.cache.tokens_per_hash,
        rank=config.parallel.rank,
        world_size=config.parallel.world_size,
        hash_algorithm=algorithm,
        hash_seed=seed,
        key_bytes=_hash_bytes(algorithm) + 4,
        extra=(
            ("tokens per block", groups),
            ("layers", str(sum(len(group.layer_names) for group in config.groups))),
            ("quantization", _said(told, "model_config.quantization")),
            ("load format", _said(told, "load_config.load_format")),
            ("parallel", f"tp{config.parallel.tp_size} pp{config.parallel.pp_size}"),
            ("context parallel", f"{config.parallel.pcp_size} {config.parallel.dcp_size}"),
        ),
    )


def daemon_of(rank: int, extra_config: Any) -> Path:
    """The folder of the daemon that serves the GPU of a rank. Raises Gone where none is found.

    extra_config["kvferry_dirs"]: the folders, one a rank; else the daemon of the rank's GPU is
    looked for, or the only one there is.
    """
    directories = extra_config.get("kvferry_dirs")
    if directories:
        names = [directories] if isinstance(directories, str) else directories
        if rank >= len(names):
            raise Gone(Code.DAEMON_GONE, f"kvferry_dirs names no folder for rank {rank}", names)
        return Path(names[rank])
    uuid = _uuid(rank)
    try:
        return find_daemon(uuid)
    except Gone:
        if rank:
            raise
        return find_daemon()


def engine_name(config: Any) -> str:
    """Under which scheduler and workers are one engine."""
    return f"vllm-{config.engine_id}"


def namespace_options(config: Any) -> dict[str, Any]:
    """How a namespace is opened, spelled as for vLLM's own CPUOffloadingSpec.

    cpu_bytes_to_use: of all ranks together, as there.
    """
    extra = config.extra_config
    wanted = extra.get("cpu_bytes_to_use")
    return {
        "cpu_bytes_to_use": None if wanted is None else int(wanted) // config.parallel.world_size,
        "eviction_policy": str(extra.get("eviction_policy", "lru")),
        "store_threshold": max(1, int(extra.get("store_threshold", 1))),
    }


def _uuid(rank: int) -> str | None:
    from vllm.platforms import current_platform

    try:
        return str(current_platform.get_device_uuid(rank))
    except Exception:  # no NVML, no such device: the only daemon will do
        return None


def _hashing(told: Any, engine: str) -> tuple[str, str]:
    """(algorithm, seed) of block hashes. Without a fixed seed they mean nothing to others."""
    algorithm = _said(told, "cache_config.prefix_caching_hash_algo")
    seed = os.environ.get("PYTHONHASHSEED", "")
    if not seed:
        log.warning(
            "kvferry: PYTHONHASHSEED is not set: block hashes differ from process to process, so "
            "nothing is shared with other engines, or found again after a restart. Start vLLM "
            "with PYTHONHASHSEED=0"
        )
        seed = f"of engine {engine}"
    return algorithm, seed


def _hash_bytes(algorithm: str) -> int:
    return 16 if "xxhash" in algorithm else 32


def _said(told: Any, path: str) -> str:
    for name in path.split("."):
        told = getattr(told, name, None)
    return "" if told is None else str(told)
