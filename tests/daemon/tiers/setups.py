"""Our own tiers, for tests."""

from __future__ import annotations

from pathlib import Path

from kvferry.testing.tier_subjects import TierSetup

DISK, MEMORY = "kvferry.daemon.tiers.disk", "kvferry.testing.memory_tier"
MOONCAKE = "kvferry.daemon.tiers.mooncake"


def memory_setup(size: int, *, in_process: bool = False) -> TierSetup:
    return TierSetup(MEMORY, {"size": size}, size, in_process)


def disk_setup(root: Path, size: int, *, in_process: bool = False, key_file: str = "") -> TierSetup:
    options = {"path": str(root), "size": size, "key_file": key_file}
    return TierSetup(DISK, options, size, in_process, keeps=True)


def shared_setup(size: int, *, in_process: bool = False) -> TierSetup:
    return TierSetup(MEMORY, {"size": size, "shared": True}, size, in_process, shared=True)
