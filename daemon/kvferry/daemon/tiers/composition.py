"""Starts the configured tiers. Called by app.py on the event loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvferry.daemon.core.tier_actions import TierDescription
from kvferry.daemon.tiers.tier_client import TierClient
from kvferry.daemon.tiers.tier_process import PoolFiles, TierSpec
from kvferry.daemon.tiers.tiering import AttachedTier
from kvferry.daemon.tiers.write_out import WriteOptions

WRITE_THROUGH = "write_through"
# The part of each namespace's blocks that a write policy keeps written.
COLDEST = {"clean_ahead": 0.25, WRITE_THROUGH: 1.0}


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
    """Start the process of each tier. settings: fastest first."""
    attached = []
    for number, its in enumerate(settings):
        coldest = COLDEST.get(its.write)
        write = None if coldest is None else WriteOptions(number, coldest, its.rate)
        attached.append(AttachedTier(TierClient(its.spec, pool), its.markers, write))
    return attached
