"""What an engine's halves need to know of vLLM's configuration: names, fingerprint, block sizes.

A namespace must name everything that makes bytes differ, so an EngineConfig is read from all of
vLLM's configuration. An OffloadingSpec of the installed vLLM is given only a part of it, so the
connector passes the whole here before it makes one (`telling`).

A host block is a *chunk* of GPU blocks. vLLM's scheduler, our manager, the worker and the daemon
each do some Python for every chunk. What a chunk costs a prompt is its tail: the tokens after its
last whole chunk are not offloaded, but prefilled again. So if the user does not say otherwise, a
chunk has up to CHUNK_TOKENS tokens, which prefill in less than a step. Groups of several kinds, and
sliding windows, keep vLLM's chunk of one block: there a chunk may be stored in part, and what is
stored in part cannot be loaded whole.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvferry.client.endpoint import find_daemon
from kvferry.client.vllm.model import model_fields
from kvferry.proto.errors import Code, Gone, Refused
from kvferry.proto.sizes import parse_bytes
from kvferry.proto.status import Fingerprint
from kvferry.proto.version import installed_version

log = logging.getLogger("kvferry")

# Seconds that a daemon has to answer when an engine starts.
TIMEOUT = 5.0
# The keys of kv_connector_extra_config that are kvferry's and not vLLM's.
EXTRA_KEYS = "kvferry_dirs", "kvferry_salt"
CHUNK_TOKENS = 64
CHUNK_BYTES = 8 << 20
"""The most that a chunk of our own choice has, unless one GPU block has more."""

DTYPES_CHOSEN_BY_LAYERS = "auto", "fp8", "fp8_e4m3", "fp8_ds_mla"
"""Where vLLM's cache_dtype is one of these, its layers make another of it, each in its worker."""

_told: list[tuple[Any, Any]] = []


@contextlib.contextmanager
def provide_config(vllm_config: Any, kv_cache_config: Any) -> Iterator[None]:
    """A spec that is made meanwhile knows all of vLLM's configuration."""
    _told.append((vllm_config, kv_cache_config))
    try:
        yield
    finally:
        _told.pop()


def provided_config() -> tuple[Any, Any]:
    """What the connector says; Refused where there is none of ours."""
    if not _told:
        message = (
            'KVFerrySpec works under "kv_connector": "KVFerryConnector", with '
            '"kv_connector_module_path": "kvferry.client.vllm": vLLM\'s own connector ends the '
            "engine where a load fails"
        )
        raise Refused(Code.BAD_CONFIG, message, "no KVFerryConnector")
    return _told[-1]


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """How vLLM cuts KV caches up.

    tokens: in a GPU block of each group. hashed: in what one hash stands for. factor: GPU blocks in
    a chunk.
    """

    tokens: tuple[int, ...]
    hashed: int
    factor: int


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Of one rank; of rank 0 in the scheduler."""

    engine: str
    fingerprint: Fingerprint
    rank: int
    world_size: int
    factor: int
    options: Mapping[str, Any]
    """How its namespace is opened."""
    directories: tuple[str, ...]
    """Of the daemons, one a rank, where the user names them."""
    first_device: int
    """Rank 0's, among those that the engine sees."""
    assigned: tuple[int, ...] = ()
    """The devices that the engine sees, as the driver counts them, where vLLM was told which."""

    def of(self, rank: int) -> EngineConfig:
        return replace(self, rank=rank)

    def daemon(self, uuid: str | None = None) -> Path:
        """The folder of the daemon that serves the rank's GPU. Raises as find_daemon does.

        uuid: the GPU's, where it is known.
        """
        if self.directories:
            if self.rank >= len(self.directories):
                message = f"kvferry_dirs names no folder for rank {self.rank}"
                raise Gone(Code.DAEMON_GONE, message, self.directories)
            return Path(self.directories[self.rank])
        uuid = uuid or _uuid(self.first_device + self.rank, *self.assigned)
        try:
            return find_daemon(uuid)
        except Gone:
            if self.world_size > 1 or uuid is None:
                raise
            return find_daemon()  # it says by itself where its GPU is another one


def read_engine_config(vllm_config: Any, kv_cache_config: Any, blocks: BlockSizes) -> EngineConfig:
    """The EngineConfig of this process. Raises Refused (BAD_CONFIG)."""
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    extra = transfer.kv_connector_extra_config
    _check_ours(extra)
    _check_split(vllm_config)
    directories = extra.get("kvferry_dirs") or ()
    return EngineConfig(
        engine=f"vllm-{transfer.engine_id}",
        fingerprint=_fingerprint(vllm_config, kv_cache_config, blocks),
        rank=parallel.rank,
        world_size=parallel.world_size,
        factor=blocks.factor,
        options=_options(extra, parallel.world_size),
        directories=(directories,) if isinstance(directories, str) else tuple(directories),
        first_device=_first_device(parallel),
        assigned=tuple(getattr(parallel, "assigned_physical_gpu_ids", None) or ()),
    )


def chunk_factor(vllm_config: Any, kv_cache_config: Any, blocks: BlockSizes, *, full: bool) -> int:
    """How many GPU blocks a chunk has; blocks.factor is what vLLM's configuration says.

    full: whether all layers attend to the whole prompt.
    """
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    said = "block_size" in extra or "blocks_per_chunk" in extra
    if said or len(blocks.tokens) != 1 or not full:
        return blocks.factor
    factor, nbytes = 1, block_bytes(kv_cache_config)
    while 2 * factor * blocks.tokens[0] <= CHUNK_TOKENS and 2 * factor * nbytes <= CHUNK_BYTES:
        factor *= 2
    return factor


def block_bytes(kv_cache_config: Any) -> int:
    """What vLLM gives one block of all groups on one rank, padding and all."""
    tensors = kv_cache_config.kv_cache_tensors
    packed = any(getattr(tensor, "block_stride", 0) for tensor in tensors)
    total = tensors[0].size if packed else sum(tensor.size for tensor in tensors)
    return int(total // kv_cache_config.num_blocks)


def _first_device(parallel: Any) -> int:
    """Replicas of one node share its devices, unless Ray gave each its own."""
    backends = parallel.distributed_executor_backend, parallel.data_parallel_backend
    replica = parallel.data_parallel_rank_local
    if replica is None:
        replica = parallel.data_parallel_index
    if "ray" in backends:
        return 0
    return int(replica * parallel.tensor_parallel_size * parallel.pipeline_parallel_size)


def _options(extra: Mapping[str, Any], world_size: int) -> dict[str, Any]:
    """Spelled as for vLLM's own CPUOffloadingSpec; cpu_bytes_to_use: of all ranks, as there."""
    wanted = extra.get("cpu_bytes_to_use")
    return {
        "cpu_bytes_to_use": None if wanted is None else _nbytes(wanted) // world_size,
        "eviction_policy": str(extra.get("eviction_policy", "lru")),
        "store_threshold": max(1, int(extra.get("store_threshold", 1))),
    }


def _nbytes(wanted: object) -> int:
    """A number, or as the daemon's --pool-size takes it."""
    return parse_bytes(str(wanted), "cpu_bytes_to_use")


def _check_ours(extra: Mapping[str, Any]) -> None:
    """Raise Refused (BAD_CONFIG) for a key that would be ours and is none; others are vLLM's."""
    for key in extra.keys() - set(EXTRA_KEYS):
        if key.startswith("kvferry"):
            message = f"kv_connector_extra_config: no such key; ours are {', '.join(EXTRA_KEYS)}"
            raise Refused(Code.BAD_CONFIG, message, key)


def _check_split(vllm_config: Any) -> None:
    """Log where ranks differ in their layers: the scheduler takes all for what rank 0 is."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    stages, wide = parallel.pipeline_parallel_size, parallel.tensor_parallel_size
    if stages == 1 or parallel.rank:
        return
    sizes = {"tensor_parallel_size": wide, "pipeline_parallel_size": stages}
    ranks = (SimpleNamespace(rank=stage * wide, **sizes) for stage in range(stages))
    layers = [int(model.get_num_layers(rank)) for rank in ranks]
    if len(set(layers)) > 1:
        log.error(
            "kvferry: nothing will be found: the pipeline's ranks have %s layers, and kvferry "
            "works only where all have as many. Choose a pipeline_parallel_size that divides the "
            "layers, or even parts with VLLM_PP_LAYER_PARTITION",
            ", ".join(map(str, layers)),
        )


def _fingerprint(vllm_config: Any, kv_cache_config: Any, blocks: BlockSizes) -> Fingerprint:
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    ranks = f"tp{parallel.tensor_parallel_size} pp{parallel.pipeline_parallel_size}"
    algorithm = _said(vllm_config, "cache_config.prefix_caching_hash_algo")
    context = (parallel.prefill_context_parallel_size, parallel.decode_context_parallel_size)
    layers = sum(len(group.layer_names) for group in kv_cache_config.kv_cache_groups)
    return Fingerprint(
        model=str(vllm_config.model_config.model),
        host_block_bytes=block_bytes(kv_cache_config) * blocks.factor,
        revision=_said(vllm_config, "model_config.revision"),
        dtype=_said(vllm_config, "model_config.dtype"),
        kv_dtype=_kv_dtype(str(cache.cache_dtype), kv_cache_config),
        kv_layout=os.environ.get("VLLM_KV_CACHE_LAYOUT", ""),
        block_size=blocks.hashed,
        rank=parallel.rank,
        world_size=parallel.world_size,
        hash_algorithm=algorithm,
        hash_seed=_seed(vllm_config.kv_transfer_config.engine_id),
        key_bytes=_hash_bytes(algorithm) + 4,
        extra=(
            ("tokens per block", ",".join(map(str, blocks.tokens))),
            ("blocks per chunk", str(blocks.factor)),
            ("layers", str(layers)),
            ("model runner v2", _said(vllm_config, "use_v2_model_runner")),
            ("quantization", _said(vllm_config, "model_config.quantization")),
            ("load format", _said(vllm_config, "load_config.load_format")),
            ("attention backend", _said(vllm_config, "attention_config.backend")),
            ("parallel", ranks),
            ("context parallel", f"{context[0]} {context[1]} {_interleaved(parallel)}"),
            ("vllm", installed_version("vllm") or ""),
            *model_fields(vllm_config),
        ),
    )


def _interleaved(parallel: Any) -> str:
    """Tokens in a row on a rank of a context. The older word is written over the other, late."""
    older = getattr(parallel, "dcp_kv_cache_interleave_size", 1)
    newer = getattr(parallel, "cp_kv_cache_interleave_size", 1)
    return f"dcp {older}" if older > 1 else str(newer)


def _kv_dtype(said: str, kv_cache_config: Any) -> str:
    """What KV is kept as. Of what layers chose both sides have the specs; the scheduler no more."""
    kinds = []
    for group in kv_cache_config.kv_cache_groups:
        spec = getattr(group, "kv_cache_spec", None)
        layers = getattr(spec, "kv_cache_specs", None)  # the scheduler has the first of them
        spec = next(iter(layers.values())) if layers else spec
        chosen = [str(getattr(spec, name, "")) for name in ("dtype", "cache_dtype_str")]
        states = getattr(spec, "dtypes", "")  # Mamba's
        kinds.append(str(states or (" ".join(chosen) if said in DTYPES_CHOSEN_BY_LAYERS else said)))
    return ", ".join(dict.fromkeys(kinds)).replace("torch.", "")


def _uuid(device: int, *assigned: int) -> str | None:
    """vLLM's platform is told of what is assigned in workers only, and counts what is visible."""
    try:
        from vllm.platforms import current_platform

        if assigned:
            visible = map(current_platform.device_id_to_physical_device_id, itertools.count())
            device = next(n for n, one in enumerate(visible) if one == assigned[device])
        return str(current_platform.get_device_uuid(device))
    except Exception:  # no NVML, no such device: the only daemon will do
        return None


def _seed(engine: str) -> str:
    """The seed of block hashes. Without a fixed one they mean nothing to others."""
    seed = os.environ.get("PYTHONHASHSEED", "")
    if not seed:
        log.warning(
            "kvferry: PYTHONHASHSEED is not set: block hashes differ from process to process, so "
            "nothing is shared with other engines, or found again after a restart. Start vLLM "
            "with PYTHONHASHSEED=0"
        )
        seed = f"of engine {engine}"
    return seed


def _hash_bytes(algorithm: str) -> int:
    """As long as what vLLM's function of this name gives."""
    try:
        from vllm.utils.hashing import get_hash_fn_by_name

        return len(get_hash_fn_by_name(algorithm)(b""))
    except (ImportError, ValueError):
        return 16 if "xxhash" in algorithm else 32


def _said(config: Any, path: str) -> str:
    for name in path.split("."):
        config = getattr(config, name, None)
    return "" if config is None else str(config)
