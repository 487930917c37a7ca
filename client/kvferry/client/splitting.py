"""Splits what is too large for a message. Used in the client's thread.

The daemon handles one message at a time, and all clients wait meanwhile. So a message has at most
MAX_KEYS keys and MAX_MESSAGE_IDS block ids, and a request for a million tokens is sent in parts.
"""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from kvferry.proto.errors import Code, Refused
from kvferry.proto.keys import OffloadKey
from kvferry.proto.layout import Int64s
from kvferry.proto.specs import (
    MAX_KEYS,
    MAX_MESSAGE_IDS,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    HostSpec,
    KeyLoadStoreSpec,
    TransferSpec,
)


def key_batches(keys: tuple[OffloadKey, ...]) -> list[tuple[OffloadKey, ...]]:
    """Batches of MAX_KEYS, in order; one empty batch if there are no keys."""
    return [keys[at : at + MAX_KEYS] for at in range(0, len(keys) or 1, MAX_KEYS)]


def split_transfer(
    spec: TransferSpec,
    factor: int | None,
    max_keys: int = MAX_KEYS,
    max_ids: int = MAX_MESSAGE_IDS,
) -> list[TransferSpec]:
    """The parts of a transfer, each small enough for a message, in the order to submit them.

    The last blocks come first: so the first key of a store is the most recent, as without parts.
    Each part has the first `max_keys` keys of `keep`.
    factor: GPU blocks of a host block, between which it is split; None: not known.
    Raises Refused (NOT_REGISTERED without a factor; SIZE_MISMATCH) if it cannot be split.
    """
    match spec:
        case GPULoadStoreSpec() as gpu, CPULoadStoreSpec() | KeyLoadStoreSpec() as host:
            return list(_split(gpu, host, factor, max_keys, max_ids))
        case CPULoadStoreSpec() | KeyLoadStoreSpec() as host, GPULoadStoreSpec() as gpu:
            return [(host, gpu) for gpu, host in _split(gpu, host, factor, max_keys, max_ids)]
    return [spec]  # the daemon refuses it


def _split(
    gpu: GPULoadStoreSpec, host: HostSpec, factor: int | None, max_keys: int, max_ids: int
) -> list[tuple[GPULoadStoreSpec, HostSpec]]:
    if isinstance(host, KeyLoadStoreSpec):
        field, hosts, most = "keys", host.keys, max_keys
        if len(host.keep) > max_keys:
            host = replace(host, keep=host.keep[:max_keys])
    else:
        field, hosts, most = "block_ids", host.block_ids, max_ids
    if len(hosts) <= most and gpu.block_ids.size <= max_ids:
        return [(gpu, host)]
    if factor is None:
        text = (
            f"a transfer of {gpu.block_ids.size} GPU blocks must be split, but this client has not "
            "registered KV caches; submit it with the client that has"
        )
        raise Refused(Code.NOT_REGISTERED, text, gpu.block_ids.size)
    sizes, indices = _groups_of(gpu)
    skips = indices % factor
    counts = np.where(sizes > 0, -(-(sizes + skips) // factor), 0)
    if counts.sum() != len(hosts):
        text = (
            f"{len(hosts)} host blocks were given, but {gpu.block_ids.size} GPU blocks take "
            f"{counts.sum()} ({factor} GPU blocks per host block); name {counts.sum()} host blocks"
        )
        raise Refused(Code.SIZE_MISMATCH, text, len(hosts))
    begins = np.cumsum(counts) - counts

    def gpu_blocks_before(position: int) -> Int64s:
        """Of each group, the GPU blocks in host blocks before this position in `hosts`."""
        before: Int64s = np.clip((position - begins) * factor - skips, 0, sizes)
        return before

    parts, step = [], max(1, min(most, max_ids // factor))
    for begin in reversed(range(0, len(hosts), step)):
        first, last = gpu_blocks_before(begin), gpu_blocks_before(begin + step)
        ids = gpu.block_ids[first.sum() : last.sum()]
        sizes_of_part, indices_of_part = (last - first).tolist(), (indices + first).tolist()
        part = GPULoadStoreSpec(ids, sizes_of_part, indices_of_part, gpu.section)
        parts.append((part, replace(host, **{field: hosts[begin : begin + step]})))
    return parts


def _groups_of(gpu: GPULoadStoreSpec) -> tuple[Int64s, Int64s]:
    """group_sizes and block_indices. Raises Refused (SIZE_MISMATCH)."""
    number = gpu.block_ids.size
    sizes = np.array((number,) if gpu.group_sizes is None else gpu.group_sizes, np.int64)
    indices = np.zeros_like(sizes)
    if gpu.block_indices is not None:
        indices = np.array(gpu.block_indices, np.int64)
    if sizes.size != indices.size or sizes.sum() != number:
        text = (
            f"group_sizes {sizes.tolist()} and block_indices {indices.tolist()} do not match "
            f"{number} GPU block ids; give one of each for each group, and the sum of sizes"
        )
        raise Refused(Code.SIZE_MISMATCH, text, number)
    return sizes, indices
