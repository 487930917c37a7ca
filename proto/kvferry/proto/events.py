"""KV events for routers and indexers, in the form that vLLM's own publisher gives them.

On the daemon's PUB socket each message has three frames: the namespace's name (the topic to
subscribe to), a number of 8 bytes, big-endian, that grows by one with each batch of that namespace,
and a KVEventBatch in msgpack. A subscriber that does not keep up misses batches, which a gap in the
numbers shows; it can only begin anew from what is published next. Hashes are those of the offload
keys, without the group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import msgspec

from kvferry.proto.keys import EventKind, block_hash_of
from kvferry.proto.messages import KeyEvent, KeyEvents

MEDIUM = "CPU"
# Hashes, and events, in one batch: queues count messages, so messages must be bounded.
MOST_IN_A_BATCH = 512


class _Event(msgspec.Struct, array_like=True, tag=True, omit_defaults=True):
    """An event is an array: its class's name, then its fields in order."""


class BlockStored(_Event):
    """Blocks that can be loaded now. Of their tokens a daemon knows nothing."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None = None
    token_ids: list[int] = []
    block_size: int = 0
    lora_id: int | None = None
    medium: str | None = None


class BlockRemoved(_Event):
    block_hashes: list[bytes]
    medium: str | None = None


class AllBlocksCleared(_Event):
    pass


KVEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """ts: seconds since the epoch."""

    ts: float
    events: list[KVEvent]
    data_parallel_rank: int | None = None


def batch_of(key_events: KeyEvents, block_size: int, now: float) -> KVEventBatch | None:
    """The events that subscribers get: blocks that became loadable, or are no longer."""
    converted = (_event(event, block_size) for event in key_events.events)
    events = [event for event in converted if event is not None]
    return KVEventBatch(now, events) if events else None


def batches_of(key_events: KeyEvents, block_size: int, now: float) -> Iterator[KVEventBatch]:
    """The events of `batch_of`, in order, in batches of at most MOST_IN_A_BATCH hashes."""
    whole = batch_of(key_events, block_size, now)
    some: list[KVEvent] = []
    room = MOST_IN_A_BATCH
    for event in [] if whole is None else whole.events:
        for piece in _pieces(event):
            size = _size(piece)
            if size > room:
                yield KVEventBatch(now, some)
                some, room = [], MOST_IN_A_BATCH
            some.append(piece)
            room -= size
    if some:
        yield KVEventBatch(now, some)


def _pieces(event: KVEvent) -> Iterator[KVEvent]:
    if isinstance(event, AllBlocksCleared) or len(event.block_hashes) <= MOST_IN_A_BATCH:
        yield event
        return
    for start in range(0, len(event.block_hashes), MOST_IN_A_BATCH):
        some = event.block_hashes[start : start + MOST_IN_A_BATCH]
        yield msgspec.structs.replace(event, block_hashes=some)


def _size(event: KVEvent) -> int:
    return 1 if isinstance(event, AllBlocksCleared) else max(1, len(event.block_hashes))


def _event(event: KeyEvent, block_size: int) -> KVEvent | None:
    match event.kind:
        case EventKind.STORED:
            return BlockStored(_hashes(event.keys), block_size=block_size, medium=MEDIUM)
        case EventKind.REMOVED:
            return BlockRemoved(_hashes(event.keys), MEDIUM)
        case EventKind.CLEARED:
            return AllBlocksCleared()
    return None


def _hashes(keys: Sequence[bytes]) -> list[bytes]:
    return list(dict.fromkeys(map(block_hash_of, keys)))
