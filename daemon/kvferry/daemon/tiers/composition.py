"""Starts the configured tiers and puts their parts together. Called by app.py on the event loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvferry.daemon.core.actions import Report
from kvferry.daemon.tiers.tier_client import TierClient
from kvferry.daemon.tiers.tier_process import PoolFiles, TierSpec
from kvferry.daemon.tiers.tiering import AttachedTier, Tiering
from kvferry.daemon.tiers.write_out import ChecksumsOf, WriteOptions, WriteOut, WriteSource

DISK = "disk"
DISK_MODULE = "kvferry.daemon.tiers.disk"
# The part of each namespace's blocks that a write policy keeps written.
COLDEST = {"clean_ahead": 0.25, "write_through": 1.0}


@dataclass(frozen=True, slots=True)
class DiskTierSettings:
    """[tiers.disk] of the configuration. size: in bytes. write: a policy in COLDEST, or "off"."""

    path: Path
    size: int
    write: str
    admit_after: int
    rate: int


def start_tiers(disk: DiskTierSettings | None, pool: PoolFiles) -> list[AttachedTier]:
    """Start the process of each tier."""
    if disk is None:
        return []
    path = disk.path.absolute()
    spec = TierSpec(DISK, DISK_MODULE, {"path": str(path), "size": disk.size})
    return [AttachedTier(TierClient(spec, pool), path)]


def compose_tiering(
    tiers: list[AttachedTier],
    disk: DiskTierSettings | None,
    source: WriteSource,
    checksums_of: ChecksumsOf,
    report: Callable[[list[Report]], None],
    promoted: Callable[[str, float], None],
) -> Tiering:
    """source, checksums_of: see write_out.py. report, promoted: see tiering.py."""
    write_out = None
    if disk is not None and disk.write in COLDEST:
        options = WriteOptions(COLDEST[disk.write], disk.admit_after, disk.rate)
        write_out = WriteOut(source, checksums_of, tiers[0].client, options)
    return Tiering(tiers, write_out, report, promoted)
