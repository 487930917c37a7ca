"""Tiers in the memory of their process: the plainest implementations of the interface, for tests.

The shared one has a storage of its own: there are no other hosts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from kvferry.daemon.core.store_name import StoreName
from kvferry.daemon.tiers.base import (
    Blocks,
    Fetched,
    HostMemory,
    Result,
    SharedTier,
    Tier,
    TierUsage,
)
from kvferry.daemon.tiers.block_memory import view_memory


def open_tier(options: Mapping[str, Any], _memory: HostMemory) -> MemoryTier:
    """shared: whether it is a SharedTier."""
    kind = SharedMemoryTier if options.get("shared") else MemoryTier
    return kind(int(options["size"]))


class MemoryTier(Tier):
    """Keeps up to `capacity_bytes` of blocks, the least recently used ones go first."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity = capacity_bytes
        self._used = self._evictions = 0
        self._lock = threading.Lock()
        # Least recent first.
        self._stored: dict[tuple[str, bytes], tuple[bytes, int]] = {}

    def contains(self, store: str, keys: Sequence[bytes]) -> Sequence[bool]:
        return [(store, key) in self._stored for key in keys]

    def fetch(self, blocks: Blocks, deadline: float) -> Sequence[Fetched]:
        found = list[Fetched]()
        for key, address in zip(blocks.keys, blocks.addresses, strict=True):
            if time.monotonic() >= deadline:
                found.append(Fetched(Result.LATE))
                continue
            with self._lock:
                entry = self._stored.pop((blocks.store, key), None)
                if entry is not None:
                    self._stored[blocks.store, key] = entry
            if entry is None or len(entry[0]) != blocks.nbytes:
                found.append(Fetched(Result.MISS))
                continue
            view_memory(address, blocks.nbytes)[:] = entry[0]
            found.append(Fetched(Result.OK, entry[1]))
        return found

    def put(self, blocks: Blocks, checksums: Sequence[int]) -> Sequence[Result]:
        if blocks.nbytes > self._capacity:
            return [Result.FULL] * len(blocks.keys)
        with self._lock:
            for key, address, checksum in zip(
                blocks.keys, blocks.addresses, checksums, strict=True
            ):
                self._remove((blocks.store, key))
                while self._used + blocks.nbytes > self._capacity:
                    self._remove(next(iter(self._stored)))
                    self._evictions += 1
                data = bytes(view_memory(address, blocks.nbytes))
                self._stored[blocks.store, key] = data, checksum
                self._used += blocks.nbytes
        return [Result.OK] * len(blocks.keys)

    def drop(self, store: str, keys: Sequence[bytes] | None = None) -> None:
        with self._lock:
            if keys is None:
                named = [each for each in self._stored if each[0] == store]
            else:
                named = [(store, key) for key in keys]
            for each in named:
                self._remove(each)

    def usage(self) -> TierUsage:
        return TierUsage(self._capacity, self._used, len(self._stored), self._evictions)

    def _remove(self, name: tuple[str, bytes]) -> None:
        entry = self._stored.pop(name, None)
        if entry is not None:
            self._used -= len(entry[0])


class SharedMemoryTier(MemoryTier, SharedTier):
    """Has an epoch for each namespace that was settled. Stores of others are empty and refused."""

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self._epochs = dict[str, int]()

    def settle(self, epochs: Mapping[str, int]) -> Mapping[str, int]:
        for namespace, epoch in epochs.items():
            self._epochs[namespace] = max(epoch, self._epochs.get(namespace, epoch))
        return {namespace: self._epochs[namespace] for namespace in epochs}

    def contains(self, store: str, keys: Sequence[bytes]) -> Sequence[bool]:
        return super().contains(store, keys) if self._is_settled(store) else [False] * len(keys)

    def fetch(self, blocks: Blocks, deadline: float) -> Sequence[Fetched]:
        if not self._is_settled(blocks.store):
            return [Fetched(Result.MISS)] * len(blocks.keys)
        return super().fetch(blocks, deadline)

    def put(self, blocks: Blocks, checksums: Sequence[int]) -> Sequence[Result]:
        if not self._is_settled(blocks.store):
            return [Result.FULL] * len(blocks.keys)
        return super().put(blocks, checksums)

    def _is_settled(self, store: str) -> bool:
        name = StoreName.parse(store)
        return self._epochs.get(name.namespace) == name.epoch
