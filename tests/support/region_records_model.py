"""Regions as persistence keeps them: observes the core's actions, and tells the next daemon."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvferry.daemon.core.actions import Action, RegionCreated, RegionFreed, RegionUpdated
from kvferry.daemon.core.block_table import FREE, UNCOMMITTED
from kvferry.daemon.core.records import RecoveredRegion, RegionRecord
from kvferry.daemon.core.region import Region


class RegionRecordsModel:
    """The record of each region, and the region."""

    def __init__(self) -> None:
        self.regions: dict[Any, tuple[RegionRecord, Region]] = {}

    def observe(self, actions: Iterable[Action]) -> list[Any]:
        """Apply the actions for persistence. Returns all other actions."""
        rest = []
        for action in actions:
            match action:
                case RegionCreated(record, region):
                    assert record.owner not in self.regions, "a region is created twice"
                    assert region.table.count(FREE) == region.num_blocks, "a new region was used"
                    self.regions[record.owner] = record, region
                case RegionUpdated(record):
                    old, region = self.regions[record.owner]
                    assert (old.start, old.nbytes) == (record.start, record.nbytes)
                    self.regions[record.owner] = record, region
                case RegionFreed(owner):
                    self.regions.pop(owner, None)
                case _:
                    rest.append(action)
        return rest

    def found(self) -> list[RecoveredRegion]:
        """The regions that another daemon recovers, if all stored blocks were committed."""
        return [_recovered(record, region) for record, region in self.regions.values()]


def _recovered(record: RegionRecord, region: Region) -> RecoveredRegion:
    lines = region.table.lines.memory.copy()
    lines["committed"][region.table.find(*UNCOMMITTED)] = True
    return RecoveredRegion(record, lines)
