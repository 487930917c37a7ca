"""Writes: blocks of namespaces that the tiers below copy, before they are evicted.

Each tier takes them when it can write them, and the blocks are held until the write has ended. A
block is written into a tier once for each key that it gets, and not at all if it came from there;
again if the tier has lost it. Event loop only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress, count

import numpy as np

from kvferry.daemon.core.actions import Action, PublishKVEvents
from kvferry.daemon.core.dispatch import ReportTable
from kvferry.daemon.core.layout import Int64s
from kvferry.daemon.core.namespace import Namespace
from kvferry.daemon.core.namespaces import Namespaces
from kvferry.daemon.core.tier_actions import (
    MAX_TIER_KEYS,
    BlocksWritten,
    TierDescription,
    WriteJob,
    WrittenBlocks,
)
from kvferry.proto.events import Place
from kvferry.proto.keys import EventKind, OffloadKey
from kvferry.proto.messages import KeyEvent, KeyEvents


@dataclass(frozen=True, slots=True)
class _Write:
    """A job that has not ended. tier: its index. epoch: of the namespace, when it began."""

    tier: int
    namespace: Namespace
    epoch: int
    keys: tuple[OffloadKey, ...]
    blocks: Int64s


class Writes:
    """Blocks that are being written into tiers. tiers: fastest first."""

    def __init__(self, namespaces: Namespaces, tiers: Sequence[TierDescription]) -> None:
        self._namespaces = namespaces
        self._places = [Place("STORAGE", tier.locality, tier.name) for tier in tiers]
        self._writes: dict[int, _Write] = {}
        self._numbers = count(1)
        # Of each tier the namespace that was served last: the others come first.
        self._served: dict[int, str] = {}
        # Of each tier the namespace and the block at which `next_written` continues.
        self._next_written: dict[int, tuple[str, int]] = {}

    @property
    def reports(self) -> ReportTable:
        return {BlocksWritten: self.end_write}

    def stores_in_use(self) -> list[str]:
        """The names of the stores of namespaces with a session."""
        return [store for one in self._namespaces if one.sessions and (store := one.store_name)]

    def take_writes(self, tier: int, limit: int, coldest: float) -> list[WriteJob]:
        """Hold up to `limit` blocks that are loadable and not in this tier, until BlocksWritten.

        coldest: the share of each namespace's blocks that is considered, from the one on that is
            evicted next; 0 to 1.
        """
        jobs, names = list[WriteJob](), sorted(self._namespaces, key=lambda one: one.name)
        served = self._served.get(tier, "")
        for namespace in sorted(names, key=lambda one: one.name <= served):
            while limit > 0 and (job := self._take(tier, namespace, limit, coldest)):
                jobs.append(job)
                limit -= len(job.keys)
                self._served[tier] = namespace.name
        return jobs

    def next_written(self, tier: int, limit: int) -> WrittenBlocks | None:
        """Up to `limit` of the blocks that were written into a tier and used since, the next ones
        with each call. None once all were named; then it starts again.

        The others are left out: a tier that is smaller than the pool would be written for ever.
        """
        name, begin = self._next_written.pop(tier, ("", 0))
        for namespace in sorted(self._namespaces, key=lambda one: one.name):
            store = namespace.store_name
            if store is None or namespace.name < name:
                continue
            access = namespace.cache.tier_access
            begin = begin if namespace.name == name else 0
            keys, blocks = access.written_blocks(tier, begin, limit)
            if keys:
                self._next_written[tier] = namespace.name, int(blocks[-1]) + 1
                return WrittenBlocks(tier, store, tuple(keys), blocks)
        return None

    def reopen_writes(self, written: WrittenBlocks, missing: Sequence[bool]) -> None:
        """Write blocks of `next_written` again that the tier does not have. missing: for each."""
        entries = zip(written.keys, written.blocks.tolist(), missing, strict=True)
        lost = [(key, block) for key, block, is_missing in entries if is_missing]
        for namespace in self._namespaces:
            if namespace.store_name == written.store:
                namespace.cache.tier_access.reopen_writes(written.tier, lost)

    def end_write(self, report: BlocksWritten) -> list[Action]:
        """Release the blocks of a write, and publish an event for the written keys.

        After a reset of the namespace nothing is published. A job that has ended is ignored.
        """
        write = self._writes.pop(report.job, None)
        if write is None:
            return []
        namespace = write.namespace
        done = np.array(report.done, np.bool_)
        namespace.cache.tier_access.end_writes(write.tier, write.blocks, done)
        self._namespaces.mark_deserted_if_unused(namespace)
        written = tuple(compress(write.keys, report.done))
        if not written or namespace.epoch != write.epoch:
            return []
        events = KeyEvents(0, (KeyEvent(EventKind.STORED, written),), namespace.epoch)
        block_size, place = namespace.fingerprint.block_size, self._places[write.tier]
        return [PublishKVEvents(namespace.name, block_size, events, place)]

    def _take(self, tier: int, namespace: Namespace, limit: int, coldest: float) -> WriteJob | None:
        store = namespace.store_name
        if (
            store is None
            or namespace.is_behind
            or (self._namespaces.region_wanted and not namespace.has_users)
        ):
            return None
        access = namespace.cache.tier_access
        keys, blocks = access.take_writes(tier, min(limit, MAX_TIER_KEYS), coldest)
        if not keys:
            return None
        self._namespaces.mark_present(namespace)
        number, nbytes = next(self._numbers), namespace.fingerprint.host_block_bytes
        write = _Write(tier, namespace, namespace.epoch, tuple(keys), blocks)
        self._writes[number] = write
        region = namespace.region
        checksums, offsets = region.table.lines.checksums(blocks), region.start + blocks * nbytes
        model = namespace.fingerprint.model
        return WriteJob(number, store, write.keys, checksums, offsets, nbytes, model)
