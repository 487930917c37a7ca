"""KV events have the encoding that subscribers of vLLM's events expect."""

from __future__ import annotations

import msgspec

from kvferry.proto.events import (
    MAX_BATCH_HASHES,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    Place,
    batch_of,
    batches_of,
)
from kvferry.proto.keys import EventKind, offload_key
from kvferry.proto.messages import KeyEvent, KeyEvents

KEYS = tuple(offload_key(bytes([n]) * 32) for n in range(3))
# The last 64 bits of each hash, as numbers.
HASHES = [n * 0x0101010101010101 for n in range(3)]


def published(*events: KeyEvent) -> list[dict[str, object]] | None:
    batch = batch_of(KeyEvents(1, events), 16, 12.5)
    if batch is None:
        return None
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(batch))
    assert decoded[0] == 12.5
    decoded_events: list[dict[str, object]] = decoded[1]
    return decoded_events


def test_stored_blocks_are_published_with_hash_size_and_medium() -> None:
    event = {
        "type": "BlockStored",
        "block_hashes": HASHES,
        "parent_block_hash": None,
        "token_ids": [],
        "block_size": 16,
        "lora_id": None,
        "medium": "CPU",
        "lora_name": None,
    }
    assert published(KeyEvent(EventKind.STORED, KEYS)) == [event]
    assert published(KeyEvent(EventKind.PENDING, KEYS), KeyEvent(EventKind.ABANDONED, KEYS)) is None
    events = KeyEvents(0, (KeyEvent(EventKind.STORED, KEYS[:1]),))
    (batch,) = batches_of(events, 16, 1.0, Place("STORAGE", "LOCAL", "disk"))
    encoded = msgspec.msgpack.encode(batch)
    (event,) = msgspec.msgpack.decode(encoded)[1]
    assert event["medium"] == "STORAGE"
    assert (event["locality"], event["ownership"]) == ("LOCAL", "disk")
    assert msgspec.msgpack.decode(encoded, type=KVEventBatch) == batch


def test_removed_and_cleared_events_keep_their_order() -> None:
    events = published(KeyEvent(EventKind.REMOVED, KEYS[:1]), KeyEvent(EventKind.CLEARED, ()))
    removed = {"type": "BlockRemoved", "block_hashes": HASHES[:1], "medium": "CPU"}
    assert events == [removed, {"type": "AllBlocksCleared"}]


def test_groups_of_a_block_are_one_hash() -> None:
    both = offload_key(bytes(32), 0), offload_key(bytes(32), 1)
    (event,) = published(KeyEvent(EventKind.REMOVED, both)) or []
    assert event["block_hashes"] == HASHES[:1]


def test_many_events_are_split_into_batches() -> None:
    """All events are published in order, and no batch has more than MAX_BATCH_HASHES hashes."""
    hashes = list(range(3 * MAX_BATCH_HASHES))
    keys = tuple(offload_key(n.to_bytes(32)) for n in hashes)
    removed, stored = KeyEvent(EventKind.REMOVED, keys[:5]), KeyEvent(EventKind.STORED, keys)
    cleared = KeyEvent(EventKind.CLEARED, ())
    batches = list(batches_of(KeyEvents(1, (removed, stored, cleared), 1), 16, 12.5))
    events = [event for batch in batches for event in batch.events]
    assert events[0] == BlockRemoved(hashes[:5], "CPU")
    assert type(events[-1]).__name__ == "AllBlocksCleared"
    stored_events = [event for event in events if isinstance(event, BlockStored)]
    assert [h for event in stored_events for h in event.block_hashes] == hashes
    assert all(event.block_size == 16 and event.medium == "CPU" for event in stored_events)
    for batch in batches:
        assert sum(len(getattr(e, "block_hashes", ())) for e in batch.events) <= MAX_BATCH_HASHES
    assert list(batches_of(KeyEvents(1, (), 1), 16, 12.5)) == []
