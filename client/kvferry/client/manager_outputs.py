"""The results of the methods of OffloadingManager."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.proto.keys import OffloadKey
from kvferry.proto.specs import KeyLoadStoreSpec


@dataclass(frozen=True, slots=True)
class PrepareStoreOutput:
    """The blocks to store. evicted_keys: always empty; evictions are reported by take_events.

    store_specs: for the worker of each rank. If the namespace is reset before the transfer arrives,
    the transfer is refused (STALE). writers: the ranks among which the keys are divided, see
    writer_of; 1: each rank stores all.
    """

    keys_to_store: tuple[OffloadKey, ...]
    store_specs: tuple[KeyLoadStoreSpec, ...]
    evicted_keys: tuple[OffloadKey, ...] = ()
    writers: int = 1

    @property
    def store_spec(self) -> KeyLoadStoreSpec:
        """For the worker of rank 0."""
        return self.store_specs[0]


@dataclass(frozen=True, slots=True)
class ResidencyUsage:
    """Host blocks of all ranks together, according to the mirrors. pinned: by this manager."""

    blocks: int
    ready: int
    pending: int
    pinned: int

    @property
    def free(self) -> int:
        return self.blocks - self.ready - self.pending
