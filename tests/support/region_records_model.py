"""The books of the host pool in their plainest words: what a ledger would say of every block.

Fed with the core's actions it knows what another daemon would find, and gives back the actions that
are not for the books.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvferry.daemon.core.actions import (
    Action,
    BlockSet,
    CommitBlocks,
    RegionCreated,
    RegionFreed,
    RegionUpdated,
    StartTransfer,
)
from kvferry.daemon.core.records import RecoveredRegion, RegionRecord, ResidentBlock, engine_owner
from kvferry.proto.specs import Direction

NO_BLOCKS = BlockSet(engine_owner("nobody"), np.empty(0, dtype=np.int64))


@dataclass
class ModelRegion:
    """A region: its record, its residents by block in the order of use, the last store of each."""

    record: RegionRecord
    residents: dict[int, ResidentBlock] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)


class RegionRecordsModel:
    def __init__(self) -> None:
        self.pages: dict[Any, ModelRegion] = {}

    def observe(self, actions: Iterable[Action]) -> list[Any]:
        """Write down what is for the books; the rest."""
        rest = []
        for action in actions:
            match action:
                case RegionCreated(record):
                    assert record.owner not in self.pages, "a region is entered twice"
                    self.pages[record.owner] = ModelRegion(record)
                case RegionUpdated(record, wipe):
                    page = self.pages[record.owner]
                    assert (page.record.start, page.record.nbytes) == (record.start, record.nbytes)
                    page.record = record
                    if wipe:
                        page.residents, page.last = {}, {}
                case RegionFreed(owner):
                    self.pages.pop(owner, None)
                case CommitBlocks():
                    self.committed(action)
                case _:
                    if isinstance(action, StartTransfer):
                        self.started(action)
                    rest.append(action)
        return rest

    def started(self, start: StartTransfer) -> None:
        page = self.pages[start.block_set.owner]
        blocks = start.block_set.blocks.tolist()
        if start.plan.direction is Direction.STORE:
            assert len(start.block_set.keys) in (0, len(blocks))
            for block in blocks:
                page.residents.pop(block, None)
                page.last[block] = start.plan.serial

    def committed(self, commit: CommitBlocks) -> None:
        """A store was done: what nobody stored over since, and nobody wiped, is good."""
        block_set, page = commit.block_set, self.pages.get(commit.block_set.owner)
        keys = block_set.keys or [b""] * block_set.blocks.size
        for block, key in zip(block_set.blocks.tolist(), keys, strict=True):
            if page is not None and page.last.get(block) == commit.serial:
                page.residents[block] = ResidentBlock(block, key, block_set.parts.get(block))

    def found(self) -> list[RecoveredRegion]:
        """What another daemon finds."""
        return [
            RecoveredRegion(page.record, tuple(page.residents.values()))
            for page in self.pages.values()
        ]
