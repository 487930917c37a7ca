"""EngineConfig: what kvferry reads from vLLM's configuration (names, block sizes, options).

A fingerprint must contain everything that changes the bytes of KV, so it is read from vLLM's whole
configuration. vLLM passes only a part of it to an OffloadingSpec, so the connector provides all of
it before it creates one (`provide_config`).

A host block is a *chunk* of GPU blocks. vLLM's scheduler, our manager, the worker and the daemon
run some Python for every chunk, so large chunks are cheaper. But the tokens of a prompt after its
last whole chunk are not offloaded, and are prefilled again. So by default a chunk has up to
CHUNK_TOKENS tokens, whose prefill takes less than a step. Models with several KV cache groups, or
with sliding windows, keep vLLM's chunk of one block: there a chunk may be stored in part, and could
not be loaded as a whole.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvferry.client.endpoint import find_daemon, locate_daemon
from kvferry.client.engines.options import QUOTA, Options, namespace_options, read_directories
from kvferry.client.session_state import NamespaceOptions
from kvferry.client.vllm.fingerprint import read_fingerprint
from kvferry.client.vllm.kv_cache_plan import (
    block_bytes,
    is_replicated,
    kv_layout,
    packed_groups,
    packs_blocks,
)
from kvferry.client.vllm.options import (
    MAX_BLOCKS_PER_CHUNK,
    StoreMode,
    read_store_mode,
    sets_chunk,
)
from kvferry.client.vllm.packed_groups import PackedGroups
from kvferry.proto.errors import Code, Gone, Refused
from kvferry.proto.fingerprint import Fingerprint
from kvferry.proto.opening import check_host_bytes

log = logging.getLogger("kvferry")

CHUNK_TOKENS = 64
# Maximum of a chunk that is chosen here, unless one GPU block is larger.
CHUNK_BYTES = 8 << 20

_provided: list[tuple[Any, Any]] = []


@contextlib.contextmanager
def provide_config(vllm_config: Any, kv_cache_config: Any) -> Iterator[None]:
    """A KVFerrySpec that is created within this context can read the whole configuration."""
    _provided.append((vllm_config, kv_cache_config))
    try:
        yield
    finally:
        _provided.pop()


def provided_config() -> tuple[Any, Any]:
    """(vllm_config, kv_cache_config). Raises Refused without KVFerryConnector."""
    if not _provided:
        message = (
            'KVFerrySpec needs "kv_connector": "KVFerryConnector" and "kv_connector_module_path": '
            '"kvferry.client.vllm"; with vLLM\'s own connector a failed load ends the engine'
        )
        raise Refused(Code.BAD_CONFIG, message, "no KVFerryConnector")
    return _provided[-1]


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """Block sizes of vLLM.

    tokens: per GPU block, for each group. hash_tokens: tokens per block hash. factor: GPU blocks
    per chunk.
    """

    tokens: tuple[int, ...]
    hash_tokens: int
    factor: int


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The configuration of one rank; in the scheduler, of rank 0."""

    engine: str
    fingerprint: Fingerprint
    rank: int
    world_size: int
    factor: int
    options: NamespaceOptions
    # Runtime directories of the daemons, one per rank; empty if the user gives none.
    directories: tuple[str, ...]
    # The device of rank 0, among the visible devices.
    first_device: int
    # The devices assigned to vLLM, in the driver's numbering; empty if all are.
    assigned: tuple[int, ...] = ()
    # The bytes of a block of each group, if vLLM's connector copies others.
    packed: PackedGroups | None = None
    # Whether host blocks are packed.
    packs: bool = False
    # vLLM's kv_role: a kv_producer only stores, a kv_consumer only loads.
    stores: bool = True
    loads: bool = True
    # When it stores.
    store_mode: StoreMode = StoreMode.AUTO
    # Whether all ranks hold the same bytes.
    replicated: bool = False
    # Tokens of a chunk, for each group.
    chunk_tokens: tuple[int, ...] = ()

    def for_rank(self, rank: int) -> EngineConfig:
        return replace(self, rank=rank)

    def find_daemon(self, uuid: str | None = None) -> Path:
        """The runtime directory of the daemon of the rank's GPU. Raises as endpoint.find_daemon.

        uuid: of the GPU, if known.
        """
        if self.directories:
            if self.rank >= len(self.directories):
                message = f"kvferry_dirs has no directory for rank {self.rank}; give one per rank"
                raise Gone(Code.DAEMON_GONE, message, self.directories)
            return locate_daemon(self.directories[self.rank])
        uuid = uuid or _uuid(self.first_device + self.rank, *self.assigned)
        try:
            return find_daemon(uuid)
        except Gone:
            if self.world_size > 1 or uuid is None:
                raise
            return find_daemon()  # it refuses tensors of another GPU


def read_engine_config(vllm_config: Any, kv_cache_config: Any, blocks: BlockSizes) -> EngineConfig:
    """The EngineConfig of this process. Raises Refused (BAD_CONFIG)."""
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    extra = transfer.kv_connector_extra_config
    check_layout(kv_layout(vllm_config, kv_cache_config))
    _check_pipeline(vllm_config)
    _check_chunk(extra, blocks, vllm_config.model_config.max_model_len)
    options = namespace_options(extra, parallel.world_size)
    fingerprint = read_fingerprint(vllm_config, kv_cache_config, blocks)
    _check_quota(extra, options["cpu_bytes_to_use"], fingerprint, parallel.world_size)
    return EngineConfig(
        engine=f"vllm-{transfer.engine_id}",
        fingerprint=fingerprint,
        rank=parallel.rank,
        world_size=parallel.world_size,
        factor=blocks.factor,
        options=options,
        directories=read_directories(extra, parallel.world_size),
        first_device=_first_device(parallel),
        assigned=tuple(getattr(parallel, "assigned_physical_gpu_ids", None) or ()),
        packed=packed_groups(vllm_config, kv_cache_config),
        packs=packs_blocks(vllm_config, kv_cache_config),
        stores=transfer.kv_role != "kv_consumer",
        loads=transfer.kv_role != "kv_producer",
        store_mode=_store_mode(vllm_config),
        replicated=is_replicated(vllm_config, kv_cache_config),
        chunk_tokens=tuple(tokens * blocks.factor for tokens in blocks.tokens),
    )


def chunk_factor(vllm_config: Any, kv_cache_config: Any, blocks: BlockSizes, *, full: bool) -> int:
    """GPU blocks per chunk; blocks.factor is that of vLLM's configuration.

    full: whether all layers attend to the whole prompt.
    """
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    if sets_chunk(extra) or len(blocks.tokens) != 1 or not full:
        return blocks.factor
    factor, nbytes = 1, block_bytes(kv_cache_config)
    while 2 * factor * blocks.tokens[0] <= CHUNK_TOKENS and 2 * factor * nbytes <= CHUNK_BYTES:
        factor *= 2
    return factor


def _check_chunk(extra: Options, blocks: BlockSizes, max_model_len: int) -> None:
    """Raise Refused (BAD_CONFIG) for chunks that the user sets, and that no request would fill."""
    if not sets_chunk(extra):
        return
    tokens = max(blocks.tokens) * blocks.factor
    if blocks.factor > MAX_BLOCKS_PER_CHUNK or (blocks.factor > 1 and tokens > max_model_len):
        message = (
            f"a chunk has {tokens} tokens in {blocks.factor} blocks; set block_size to at most "
            f"{max_model_len}, the max_model_len, and at most {MAX_BLOCKS_PER_CHUNK} blocks"
        )
        raise Refused(Code.BAD_CONFIG, message, tokens)


def _store_mode(vllm_config: Any) -> StoreMode:
    """A producer's blocks are wanted by others at once. Without a prefix cache the GPU keeps no
    blocks that could be stored later. vLLM's own KV events of a block name its request, which may
    have ended by then."""
    transfer, events = vllm_config.kv_transfer_config, vllm_config.kv_events_config
    keeps = vllm_config.cache_config.enable_prefix_caching
    publishes = events is not None and events.enable_kv_cache_events
    if publishes or not keeps or transfer.kv_role == "kv_producer":
        return StoreMode.AT_ONCE
    return read_store_mode(transfer.kv_connector_extra_config)


def _check_quota(extra: Options, quota: int | None, fingerprint: Fingerprint, ranks: int) -> None:
    """Raise Refused (BAD_CONFIG) if the memory of a rank has no room for a chunk."""
    if quota is None:
        return
    try:
        check_host_bytes(quota, fingerprint.host_block_bytes)
    except Refused as error:
        message = f"{QUOTA} = {extra[QUOTA]!r}: {error.message}"
        if ranks > 1:
            message = f"{QUOTA} = {extra[QUOTA]!r} for {ranks} ranks: {error.message} per rank"
        raise Refused(Code.BAD_CONFIG, message, extra[QUOTA]) from error


def _first_device(parallel: Any) -> int:
    """Data-parallel replicas on a node share its devices, unless Ray assigns them."""
    backends = parallel.distributed_executor_backend, parallel.data_parallel_backend
    replica = parallel.data_parallel_rank_local
    if replica is None:
        replica = parallel.data_parallel_index
    if "ray" in backends:
        return 0
    return int(replica * parallel.tensor_parallel_size * parallel.pipeline_parallel_size)


def check_layout(layout: str) -> None:
    """Raise Refused (BAD_CONFIG) if the bytes of a layer's block are not contiguous, as in LHBNC.

    Since 0.29 a user can set this layout; vLLM's connector would then copy only a part of a block.
    """
    if layout.find("B") > 1:
        message = (
            "kvferry copies blocks, and in this KV cache layout each head has its own part of "
            "memory; unset VLLM_KV_CACHE_LAYOUT, or set it to LBHNC"
        )
        raise Refused(Code.BAD_CONFIG, message, layout)


def _check_pipeline(vllm_config: Any) -> None:
    """Log an error if ranks have different numbers of layers: keys assume those of rank 0."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    stages, width = parallel.pipeline_parallel_size, parallel.tensor_parallel_size
    if stages == 1 or parallel.rank:
        return
    sizes = {"tensor_parallel_size": width, "pipeline_parallel_size": stages}
    ranks = (SimpleNamespace(rank=stage * width, **sizes) for stage in range(stages))
    layers = [int(model.get_num_layers(rank)) for rank in ranks]
    if len(set(layers)) > 1:
        log.error(
            "kvferry: every lookup will be a miss: the pipeline's ranks have %s layers, but all "
            "must have the same number. Choose a pipeline_parallel_size that divides the "
            "layers, or equal parts with VLLM_PP_LAYER_PARTITION",
            ", ".join(map(str, layers)),
        )


def _uuid(device: int, *assigned: int) -> str | None:
    """The UUID of a device. vLLM's platform counts visible devices; `assigned` are physical.

    vLLM asks NVML, which knows no shortened UUID, and gives that of the whole GPU for an instance.
    """
    visible_names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if not assigned and device < len(visible_names):
        name = visible_names[device].strip()
        if name.startswith(("GPU-", "MIG-")):
            return name
    try:
        from vllm.platforms import current_platform

        if assigned:
            visible = map(current_platform.device_id_to_physical_device_id, itertools.count())
            device = next(n for n, one in enumerate(visible) if one == assigned[device])
        return str(current_platform.get_device_uuid(device))
    except Exception:  # no NVML or no such device: use the only daemon
        return None
