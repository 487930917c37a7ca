"""vLLM's own types decode the daemon's KV events."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvferry.proto.events import HOST_POOL, Place, batches_of
from kvferry.proto.keys import EventKind
from kvferry.proto.messages import KeyEvent, KeyEvents

theirs: Any = pytest.importorskip("vllm.distributed.kv_events")
hashing: Any = pytest.importorskip("vllm.v1.core.kv_cache_utils")

KEYS = (b"a" * 32 + bytes(4),)


@pytest.mark.parametrize("place", [HOST_POOL, Place("STORAGE", "LOCAL", "disk")])
def test_events_are_those_of_vllm(place: Place) -> None:
    kinds = EventKind.STORED, EventKind.REMOVED, EventKind.CLEARED
    events = KeyEvents(1, tuple(KeyEvent(kind, KEYS) for kind in kinds))
    (batch,) = batches_of(events, 16, 1.0, place)
    data = msgspec.msgpack.encode(batch)
    stored, removed, cleared = msgspec.msgpack.decode(data, type=theirs.KVEventBatch).events
    hashes = [hashing.maybe_convert_block_hash(b"a" * 32)]
    assert stored.block_hashes == removed.block_hashes == hashes
    assert stored.medium == removed.medium == place.medium
    assert stored.medium in (theirs.MEDIUM_CPU, getattr(theirs, "MEDIUM_STORAGE", "STORAGE"))
    assert (stored.block_size, stored.locality) == (16, place.locality)
    assert isinstance(cleared, theirs.AllBlocksCleared)
