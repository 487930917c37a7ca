"""A disk tier in this process that can be killed, and can lose its hints."""

from __future__ import annotations

import os
from pathlib import Path

from kvferry.daemon.tiers.base import IN_TIER, Result
from kvferry.daemon.tiers.disk.hints import HINTS
from kvferry.daemon.tiers.disk.tier import DiskTier
from kvferry.testing.tier_subjects import DirectSubject, PoolMemory, TierSetup

SIZE, BLOCK = 4 << 20, 16 << 10


def disk_setup(root: Path, size: int, *, in_process: bool = False, key_file: str = "") -> TierSetup:
    options = {"path": str(root), "size": size, "key_file": key_file}
    return TierSetup("kvferry.daemon.tiers.disk", options, size, in_process, keeps=True)


class KillableDisk(DirectSubject):
    """`kill` ends the tier as SIGKILL does: nothing is synced, noted or closed in order.

    key_file: of each process that is opened; it may be changed.
    """

    tier: DiskTier

    def __init__(self, pool: PoolMemory, root: Path, size: int = SIZE, key_file: str = "") -> None:
        self.root, self.size, self.key_file = root, size, key_file
        super().__init__(pool, DiskTier(str(root), size, key_file=key_file))

    def kill(self) -> None:
        for store in (*self.tier._stores.values(), *self.tier._trash):
            store.close()
        os.close(self.tier._root_lock)

    def open(self) -> None:
        self.tier = DiskTier(str(self.root), self.size, key_file=self.key_file)
        self.tier.maintain()

    def restart(self) -> None:
        self.kill()
        self.open()

    def lose_hints(self) -> None:
        """Kill it, and have the next one read the headers of all slots."""
        self.kill()
        for path in self.hint_files():
            path.unlink()

    def hint_files(self) -> list[Path]:
        return sorted(self.root.glob(f"*/{HINTS}"))

    def slabs(self) -> list[Path]:
        return sorted(self.root.glob("*/slab-*"))


def put_all(disk: KillableDisk, numbers: range) -> None:
    """Put keys one by one, so that each is in the tier."""
    for number in numbers:
        assert disk.put([number])[0] in IN_TIER


def fetch_all(disk: KillableDisk, numbers: range) -> list[Result]:
    """Fetch keys one by one."""
    return [disk.fetch([number])[0] for number in numbers]
