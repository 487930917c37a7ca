"""A simple model of the records that persistence keeps of the host pool.

It observes the core's actions, and predicts what another daemon recovers.
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

NO_BLOCKS = BlockSet(engine_owner("no engine"), np.empty(0, dtype=np.int64))


@dataclass
class ModelRegion:
    """A region: its record, its resident blocks in the order of use, the last store of each."""

    record: RegionRecord
    residents: dict[int, ResidentBlock] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)


class RegionRecordsModel:
    def __init__(self) -> None:
        self.regions: dict[Any, ModelRegion] = {}

    def observe(self, actions: Iterable[Action]) -> list[Any]:
        """Apply the actions for persistence. Returns all other actions."""
        rest = []
        for action in actions:
            match action:
                case RegionCreated(record):
                    assert record.owner not in self.regions, "a region is created twice"
                    self.regions[record.owner] = ModelRegion(record)
                case RegionUpdated(record, wipe):
                    region = self.regions[record.owner]
                    assert (region.record.start, region.record.nbytes) == (
                        record.start,
                        record.nbytes,
                    )
                    region.record = record
                    if wipe:
                        region.residents, region.last = {}, {}
                case RegionFreed(owner):
                    self.regions.pop(owner, None)
                case CommitBlocks():
                    self.apply_commit(action)
                case _:
                    if isinstance(action, StartTransfer):
                        self.apply_start(action)
                    rest.append(action)
        return rest

    def apply_start(self, start: StartTransfer) -> None:
        region = self.regions[start.block_set.owner]
        blocks = start.block_set.blocks.tolist()
        if start.plan.direction is Direction.STORE:
            assert len(start.block_set.keys) in (0, len(blocks))
            for block in blocks:
                region.residents.pop(block, None)
                region.last[block] = start.plan.serial

    def apply_commit(self, commit: CommitBlocks) -> None:
        """Blocks of a completed store become resident, unless they were stored again or wiped."""
        block_set, region = commit.block_set, self.regions.get(commit.block_set.owner)
        keys = block_set.keys or [b""] * block_set.blocks.size
        for block, key in zip(block_set.blocks.tolist(), keys, strict=True):
            if region is not None and region.last.get(block) == commit.serial:
                region.residents[block] = ResidentBlock(block, key, block_set.parts.get(block))

    def found(self) -> list[RecoveredRegion]:
        """The regions that another daemon recovers."""
        return [
            RecoveredRegion(region.record, tuple(region.residents.values()))
            for region in self.regions.values()
        ]
