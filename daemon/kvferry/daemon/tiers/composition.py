"""Starts the configured tiers and puts their parts together. Called by app.py on the event loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvferry.daemon.core.actions import Report
from kvferry.daemon.core.tier_actions import TierDescription
from kvferry.daemon.tiers.tier_client import TierClient
from kvferry.daemon.tiers.tier_process import PoolFiles, TierSpec
from kvferry.daemon.tiers.tiering import AttachedTier, Tiering
from kvferry.daemon.tiers.write_check import WriteCheck, WrittenSource
from kvferry.daemon.tiers.write_out import ChecksumsOf, WriteOptions, WriteOut, WriteSource

WRITE_THROUGH = "write_through"
# The part of each namespace's blocks that a write policy keeps written.
COLDEST = {"clean_ahead": 0.25, WRITE_THROUGH: 1.0}


class Source(WriteSource, WrittenSource, Protocol):
    """Core.writes."""

    def namespaces(self) -> dict[str, str]:
        """All namespaces; of one in use the name of its store, else an empty one."""


@dataclass(frozen=True, slots=True)
class TierSettings:
    """A tier of the configuration.

    write: a policy in COLDEST, or "off". admit_after: a block is written from this use on. rate:
    bytes per second that are written; 0: no limit. markers: directory for the markers of drops.
    locality: see TierDescription.
    """

    spec: TierSpec
    write: str
    admit_after: int
    rate: int
    markers: Path
    locality: str | None = None

    @property
    def description(self) -> TierDescription:
        min_uses = self.admit_after if self.write in COLDEST else 0
        return TierDescription(self.spec.name, self.write == WRITE_THROUGH, min_uses, self.locality)


def start_tiers(settings: Sequence[TierSettings], pool: PoolFiles) -> list[AttachedTier]:
    """Start the process of each tier."""
    return [AttachedTier(TierClient(tier.spec, pool), tier.markers) for tier in settings]


def compose_tiering(
    tiers: Sequence[AttachedTier],
    settings: Sequence[TierSettings],
    source: Source,
    checksums_of: ChecksumsOf,
    report: Callable[[list[Report]], None],
    promoted: Callable[[str, float], None],
) -> Tiering:
    """tiers: started with these settings; fastest first. source, checksums_of: see write_out.py,
    write_check.py. report, promoted: see tiering.py."""
    for number, (tier, its) in enumerate(zip(tiers, settings, strict=True)):
        tier.client.namespaces = source.namespaces
        if its.write in COLDEST:
            options = WriteOptions(number, COLDEST[its.write], its.rate)
            tier.write_out = WriteOut(source, checksums_of, tier.client, options, report)
            wake_up = tier.write_out.wake_up
            tier.write_check = WriteCheck(source, tier.client, number, wake_up)
    return Tiering(tiers, report, promoted)
