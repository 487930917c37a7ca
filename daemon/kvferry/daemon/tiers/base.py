"""The interface of a tier: storage for host blocks below the host pool.

A tier runs in a process of its own (tier_worker.py), which maps the host pool. Its methods block
and may be called by several threads at a time. An exception that a method raises counts as an error
for every key of that call, and as a failure of the tier for the circuit breaker.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol, runtime_checkable

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
    # The bytes do not match their checksum, or cannot be decrypted, which is a miss. The caller of
    # `fetch` compares checksums, and drops the key.
    CORRUPT = 5
    # Not written, because the tier has it. A tier that cannot tell says OK.
    PRESENT = 6


# Results of `put` after which the tier has the block.
IN_TIER = Result.OK, Result.PRESENT


class Blocks(NamedTuple):
    """Host blocks of one store, which all have `nbytes` bytes.

    addresses: of each block, in the memory of the tier's process. All keys have one length. model:
    for people who list a tier; it identifies nothing. Only for `put`.
    """

    store: str
    keys: Sequence[bytes]
    addresses: Sequence[int]
    nbytes: int
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

    The blocks of a tier are in stores. A store has the blocks of a namespace that are composed
    alike, and of one epoch: after a reset of the namespace the daemon uses another store. Its name
    is that of a StoreName (core/store_name.py), but to most tiers it is any text.

    The caller guarantees that nothing of a store is in progress during `drop` of all its keys, and
    that the memory of blocks is not used otherwise until the call returns.

    io_threads: the number of threads that call `fetch` and `put`. call_bytes: the bytes that one
    call of these moves; larger batches are split. A class that inherits from this one
    need not define the attributes and methods that have a value or a body here.
    """

    io_threads: int = 4
    call_bytes: int = 4 << 20

    @abstractmethod
    def contains(self, store: str, keys: Sequence[bytes]) -> Sequence[bool]:
        """Whether `fetch` would probably find each key. Reads no block."""

    @abstractmethod
    def fetch(self, blocks: Blocks, deadline: float) -> Sequence[Fetched]:
        """Read the bytes of keys to their addresses.

        deadline: time.monotonic() in seconds. A key is LATE if its read has not begun by then. The
        bytes at an address are undefined unless the result is OK. The caller compares the checksum.
        """

    @abstractmethod
    def put(self, blocks: Blocks, checksums: Sequence[int]) -> Sequence[Result]:
        """Store blocks, with the checksums that `fetch` returns later."""

    @abstractmethod
    def drop(self, store: str, keys: Sequence[bytes] | None = None) -> None:
        """Drop these keys; or all keys of a store, which is not used again.

        The latter frees their room. A crash may undo it.
        """

    def stores(self) -> Sequence[str]:
        """The names of the stores that outlived an earlier process. Called once, at first."""
        return ()

    def note_used(self, stores: Collection[str]) -> None:
        """Called once per second with the names of the stores that engines use now."""
        return

    @abstractmethod
    def usage(self) -> TierUsage:
        """Usage of all stores."""

    def maintain(self) -> None:
        """Called about once per second, on one thread, for work in the background."""
        return

    def close(self) -> None:
        """Write everything back. Nothing is in progress."""
        return


@runtime_checkable
class SharedTier(Tier, Protocol):
    """A tier whose storage other hosts use, too. It has the epoch of each namespace."""

    @abstractmethod
    def settle(self, epochs: Mapping[str, int]) -> Mapping[str, int]:
        """Make the epochs of this host and of the storage agree.

        Called once per second and after each reset, on one thread. epochs: of each namespace in
        use, the epoch of this host. Returns the epoch that the storage has now, of each namespace
        for which that could be found out:

            the same   it is used from now on
            a larger   another host was reset later: this one adopts it, and asks again

        Where the storage has a smaller one, or none, it gets the one of this host. Until a
        namespace is settled, and for stores of another epoch, `contains` and `fetch` find nothing,
        and `put` is refused (FULL).
        """


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


def missing_names(tier: object, kind: type) -> list[str]:
    """The names of a protocol, Tier or SharedTier, that an object lacks."""
    wanted = {name for base in kind.__mro__ for name in vars(base) if not name.startswith("_")}
    wanted |= {name for base in kind.__mro__ for name in vars(base).get("__annotations__", ())}
    return sorted(name for name in wanted if not hasattr(tier, name))
