"""KV events for routers and indexers, in the format of vLLM's publisher.

Each message on the daemon's PUB socket has three frames: the name of the namespace (the topic), a
sequence number (8 bytes, big-endian, one more with each batch of that namespace), and a
KVEventBatch in msgpack. A subscriber that receives too slowly misses batches and sees a gap in the
numbers. Missed batches are not sent again. Hashes are the last 64 bits of those in the offload
keys, as in vLLM's events by default (VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES).

The host pool's medium is CPU. A tier's medium is STORAGE: its events say that blocks were written
into it. As with vLLM's own tiers, no event says that a tier has evicted a block.

Used by the core and by the publisher process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import msgspec

from kvferry.proto.keys import EventKind, block_hash_of
from kvferry.proto.messages import KeyEvent, KeyEvents

# Maximum of hashes in one batch: queues count messages, so messages must be bounded.
MAX_BATCH_HASHES = 512


class _Event(msgspec.Struct, tag=True, omit_defaults=True):
    """An event is encoded as a map: `type` has the name of its class."""


class BlockStored(_Event):
    """Blocks that can be loaded. The daemon does not know their tokens: token_ids is empty.

    block_size: tokens in a block. medium, locality, ownership: see Place.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    locality: str | None = None
    ownership: str | None = None


class BlockRemoved(_Event):
    """Blocks that can no longer be loaded."""

    block_hashes: list[int]
    medium: str


class AllBlocksCleared(_Event):
    """The namespace was reset."""


KVEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where blocks are, in the terms of vLLM's events.

    medium: CPU, or STORAGE for a tier. locality: LOCAL if only this host can load them, REMOTE if
    other hosts can, too; None if not known. ownership: the name of the tier.
    """

    medium: str
    locality: str | None = None
    ownership: str | None = None


HOST_POOL = Place("CPU")


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """One message of KV events, in vLLM's format. ts: seconds since the epoch."""

    ts: float
    events: list[KVEvent]
    data_parallel_rank: int | None = None


def batch_of(
    key_events: KeyEvents, block_size: int, now: float, place: Place = HOST_POOL
) -> KVEventBatch | None:
    """The events about loadable blocks; None if there are none.

    block_size: tokens in a block. now: seconds since the epoch. place: of the blocks.
    """
    converted = (_event(event, block_size, place) for event in key_events.events)
    events = [event for event in converted if event is not None]
    return KVEventBatch(now, events) if events else None


def batches_of(
    key_events: KeyEvents, block_size: int, now: float, place: Place = HOST_POOL
) -> Iterator[KVEventBatch]:
    """The events of `batch_of`, in order, in batches of at most MAX_BATCH_HASHES hashes."""
    whole = batch_of(key_events, block_size, now, place)
    batch: list[KVEvent] = []
    left = MAX_BATCH_HASHES
    for event in [] if whole is None else whole.events:
        for part in _split(event):
            size = _size(part)
            if size > left:
                yield KVEventBatch(now, batch)
                batch, left = [], MAX_BATCH_HASHES
            batch.append(part)
            left -= size
    if batch:
        yield KVEventBatch(now, batch)


def _split(event: KVEvent) -> Iterator[KVEvent]:
    """The event, in parts of at most MAX_BATCH_HASHES hashes."""
    if isinstance(event, AllBlocksCleared) or len(event.block_hashes) <= MAX_BATCH_HASHES:
        yield event
        return
    for start in range(0, len(event.block_hashes), MAX_BATCH_HASHES):
        hashes = event.block_hashes[start : start + MAX_BATCH_HASHES]
        yield msgspec.structs.replace(event, block_hashes=hashes)


def _size(event: KVEvent) -> int:
    return 1 if isinstance(event, AllBlocksCleared) else max(1, len(event.block_hashes))


def _event(event: KeyEvent, block_size: int, place: Place) -> KVEvent | None:
    match event.kind:
        case EventKind.STORED:
            return BlockStored(
                _hashes(event.keys),
                None,
                [],
                block_size,
                None,
                place.medium,
                None,
                locality=place.locality,
                ownership=place.ownership,
            )
        case EventKind.REMOVED:
            return BlockRemoved(_hashes(event.keys), place.medium)
        case EventKind.CLEARED:
            return AllBlocksCleared()
    return None


def published_hash(key: bytes) -> int:
    """The last 64 bits of a key's block hash."""
    return int.from_bytes(block_hash_of(key)[-8:])


def _hashes(keys: Sequence[bytes]) -> list[int]:
    return list(dict.fromkeys(map(published_hash, keys)))
