"""Names for host blocks: what an engine's scheduler looks up, stores and loads by.

An OffloadKey is the hash of a block's tokens (and of all before it) followed by the index of its
KV cache group, four bytes, big-endian: opaque bytes to the daemon, all of one length in a
namespace.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeAlias

OffloadKey: TypeAlias = bytes

MAX_KEY_BYTES = 64


class Lookup(StrEnum):
    """What is known of a key."""

    HIT = "hit"
    MISS = "miss"
    # A store of it is on its way.
    HIT_PENDING = "hit_pending"
    # Not known yet: ask again later.
    RETRY = "retry"


class EventKind(StrEnum):
    """What happened to keys of a namespace."""

    # A store of them is on its way.
    PENDING = "pending"
    # They can be loaded.
    STORED = "stored"
    # They went to make room.
    REMOVED = "removed"
    # Their store failed.
    ABANDONED = "abandoned"
    # All keys went; names none.
    CLEARED = "cleared"


def offload_key(block_hash: bytes, group: int = 0) -> OffloadKey:
    """The key of a block of KV cache group `group`."""
    return block_hash + group.to_bytes(4, "big")


def block_hash_of(key: OffloadKey) -> bytes:
    return key[:-4]


def group_of(key: OffloadKey) -> int:
    return int.from_bytes(key[-4:], "big")
