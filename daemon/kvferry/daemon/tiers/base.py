"""The interface of a tier: storage for host blocks below the host pool.

A tier runs in a process of its own (tier_worker.py), which maps the host pool. Its methods block
and may be called by several threads at a time. An exception that a method raises counts as an error
for every key of that call, and as a failure of the tier for the circuit breaker.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol

import msgspec
import xxhash


class Result(IntEnum):
    """The outcome of one key of a request."""

    # Fetched, or stored.
    OK = 0
    # Not in the tier.
    MISS = 1
    # The deadline passed before the key was read.
    LATE = 2
    # Not written: no room, or the write queue is too long.
    FULL = 3
    # The tier failed.
    ERROR = 4
    # The bytes do not match their checksum, which is a miss; set by the caller of `fetch`.
    CORRUPT = 5
    # Not written, because the tier has it. A tier that cannot tell says OK.
    PRESENT = 6


# Results of `put` after which the tier has the block.
IN_TIER = Result.OK, Result.PRESENT


class Blocks(NamedTuple):
    """Host blocks of one namespace. The namespace's blocks all have `nbytes` bytes.

    addresses: of each block, in the memory of the tier's process. All keys have one length.
    generation: of the namespace, as `Tier.generation` returned it before the daemon stored these
    blocks; -1: the tier has none, or has not answered. model: for people who list a tier; it
    identifies nothing. Both only for `put`.
    """

    namespace: str
    keys: Sequence[bytes]
    addresses: Sequence[int]
    nbytes: int
    generation: int = -1
    model: str = ""


class Fetched(NamedTuple):
    """The result for one key, and the checksum that `put` was given for it (if OK)."""

    result: Result
    checksum: int = 0


class TierUsage(msgspec.Struct, frozen=True, array_like=True):
    """capacity_bytes: the bound; 0: not known. used_bytes: taken of it, with all overhead."""

    capacity_bytes: int = 0
    used_bytes: int = 0
    keys: int = 0
    evictions: int = 0
    # Slots that are no longer used, because the device failed to read or write them.
    retired: int = 0
    # Why nothing can be written; empty if it can.
    read_only: str = ""


class Tier(Protocol):
    """Storage below the host pool. Any thread, several at a time.

    The caller guarantees that nothing of a namespace is in progress during `drop` of all its keys,
    and that the memory of blocks is not used otherwise until the call returns.
    """

    def contains(self, namespace: str, keys: Sequence[bytes]) -> Sequence[bool]:
        """Whether `fetch` would probably find each key. Reads no block."""

    def fetch(self, blocks: Blocks, deadline: float) -> Sequence[Fetched]:
        """Read the bytes of keys to their addresses.

        deadline: time.monotonic() in seconds. A key is LATE if its read has not begun by then. The
        bytes at an address are undefined unless the result is OK. The caller compares the checksum.
        """

    def put(self, blocks: Blocks, checksums: Sequence[int]) -> Sequence[Result]:
        """Store blocks, with the checksums that `fetch` returns later."""

    def drop(self, namespace: str, keys: Sequence[bytes] | None = None) -> None:
        """Drop these keys, or all keys of a namespace; the latter is not undone by a crash.

        All keys: of every namespace that `is_part_of` this one.
        """

    def usage(self) -> TierUsage:
        """Usage of all namespaces."""

    def maintain(self) -> None:
        """Called about once per second, on one thread, for work in the background."""

    def close(self) -> None:
        """Write everything back. Nothing is in progress."""


class HostMemory(Protocol):
    """The host pool, as a tier's process maps it."""

    address: int
    nbytes: int


def block_checksum(key: bytes, data: memoryview) -> int:
    """The XXH3 checksum of a block's bytes, seeded with its key: the one in the block table."""
    # Releases the GIL in all versions of xxhash.
    digest = xxhash.xxh3_64(seed=xxhash.xxh3_64_intdigest(key))
    digest.update(data)
    return digest.intdigest()


def without_part(name: str) -> str:
    """The namespace of a store: its name up to the first "-"."""
    return name.partition("-")[0]


def is_part_of(name: str, namespace: str) -> bool:
    """Whether a drop of all keys of `namespace` drops those of `name`, too."""
    return name == namespace or name.startswith(f"{namespace}-")
