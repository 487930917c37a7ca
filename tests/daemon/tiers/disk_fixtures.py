"""A disk tier in this process that can be killed, and power cuts."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from kvferry.daemon.tiers.base import IN_TIER
from kvferry.daemon.tiers.disk import recovery
from kvferry.daemon.tiers.disk.tier import DiskOptions, DiskTier
from kvferry.daemon.tiers.durable_files import write_file
from kvferry.testing.tier_subjects import DirectSubject, PoolMemory

SIZE = 4 << 20


class KillableDisk(DirectSubject):
    """`kill` ends the tier as SIGKILL does: nothing is synced, noted or closed in order."""

    tier: DiskTier

    def __init__(self, pool: PoolMemory, root: Path, size: int = SIZE) -> None:
        self.root, self.size = root, size
        super().__init__(pool, DiskTier(DiskOptions(str(root), size)))

    def kill(self) -> None:
        for store in (*self.tier._stores.values(), *self.tier._trash):
            store.close()
        os.close(self.tier._root_lock)

    def open(self) -> None:
        self.tier = DiskTier(DiskOptions(str(self.root), self.size))
        self.tier.maintain()

    def restart(self) -> None:
        self.kill()
        self.open()

    def cut_power(self) -> None:
        """Kill it, and let the next one find that the system has booted since."""
        self.kill()
        state = msgspec.json.decode(
            (self.root / recovery.STATE).read_bytes(), type=recovery.RootState
        )
        other = msgspec.structs.replace(state, boot_id="another")
        write_file(self.root / recovery.STATE, msgspec.json.encode(other))

    def slabs(self) -> list[Path]:
        return sorted(self.root.glob("*/slab-*"))


def put_all(disk: KillableDisk, numbers: range) -> None:
    """Put keys one by one, so that each is in the tier."""
    for number in numbers:
        assert disk.put([number])[0] in IN_TIER
