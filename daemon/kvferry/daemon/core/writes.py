"""Writes: blocks of namespaces that the tiers below copy, before they are evicted.

The tiers take them when they can write them, and the blocks are held until the write has ended. A
block is written once for each key that it gets, and not at all if a tier is where it came from.
Event loop only.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import numpy as np

from kvferry.daemon.core.layout import Int64s
from kvferry.daemon.core.namespace import Namespace
from kvferry.daemon.core.namespaces import Namespaces
from kvferry.daemon.core.tier_actions import MAX_TIER_KEYS, WriteJob


class Writes:
    def __init__(self, namespaces: Namespaces) -> None:
        self._namespaces = namespaces
        # The namespace of each write that has not ended, and its blocks.
        self._writes: dict[int, tuple[Namespace, Int64s]] = {}
        self._numbers = count(1)
        # The namespace that was served last: the others come first.
        self._served = ""

    def take_writes(self, limit: int, coldest: float, min_uses: int) -> list[WriteJob]:
        """Hold up to `limit` blocks that are loadable and in no tier, until `end_write`.

        coldest: the share of each namespace's blocks that is considered, from the one on that is
            evicted next; 0 to 1. min_uses: a block is written from this use on. The store of a key
            is a use, and each load and touch.
        """
        jobs, names = list[WriteJob](), sorted(self._namespaces, key=lambda one: one.name)
        for namespace in sorted(names, key=lambda one: one.name <= self._served):
            while limit > 0 and (job := self._take(namespace, limit, coldest, min_uses)):
                jobs.append(job)
                limit -= len(job.keys)
                self._served = namespace.name
        return jobs

    def end_write(self, number: int, done: Sequence[bool]) -> None:
        """Release the blocks of a write. done: for each key, whether a tier has it now.

        A number that has ended already is ignored.
        """
        namespace, blocks = self._writes.pop(number, (None, None))
        if namespace is None or blocks is None:
            return
        namespace.cache.tier_access.end_writes(blocks, np.array(done, np.bool_))
        self._namespaces.mark_deserted_if_unused(namespace)

    def _take(
        self, namespace: Namespace, limit: int, coldest: float, min_uses: int
    ) -> WriteJob | None:
        store = namespace.store_name
        if store is None:
            return None
        access = namespace.cache.tier_access
        keys, blocks = access.take_writes(min(limit, MAX_TIER_KEYS), coldest, min_uses)
        if not keys:
            return None
        self._namespaces.mark_present(namespace)
        number, nbytes = next(self._numbers), namespace.fingerprint.host_block_bytes
        self._writes[number] = namespace, blocks
        region = namespace.region
        offsets = region.start + blocks * nbytes
        return WriteJob(number, region.owner, store, tuple(keys), blocks, offsets, nbytes)
