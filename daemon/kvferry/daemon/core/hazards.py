"""Hazards between stores and loads of one registration.

Transfers of one direction run in submission order, and the two directions overlap. They must not
overlap if they meet in a block: a load of a host block that a store writes (RAW), a store to a host
block that a load reads (WAR), and the same on the GPU's side. Each direction is a queue, so a
transfer waits for one serial number: the newest transfer of the other direction that touches one of
its blocks. Called by the core, on the event loop.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from kvferry.daemon.core.block_ids import largest
from kvferry.daemon.core.layout import ResolvedBlocks
from kvferry.proto.specs import Direction


class HazardTracker:
    """For each block and direction the serial of the newest transfer that uses it; 0: none.

    gpu_slots: number of distinct GPU blocks (aliasing.py). host_blocks: of the region.
    """

    def __init__(self, gpu_slots: int, host_blocks: int) -> None:
        self._gpu = {d: np.zeros(gpu_slots, dtype=np.int64) for d in Direction}
        self._host = {d: np.zeros(host_blocks, dtype=np.int64) for d in Direction}
        self._in_flight: Counter[Direction] = Counter()

    def add_transfer(self, serial: int, direction: Direction, blocks: ResolvedBlocks) -> int:
        """Add a transfer; return the last serial of the other direction that must end first."""
        other, after = direction.other, 0
        if self._in_flight[other]:
            after = max(
                largest(self._gpu[other][blocks.gpu_slots]),
                largest(self._host[other][blocks.host_blocks]),
            )
        self._gpu[direction][blocks.gpu_slots] = serial
        self._host[direction][blocks.host_blocks] = serial
        self._in_flight[direction] += 1
        return after

    def remove_transfer(self, direction: Direction) -> None:
        """A transfer that was added has ended."""
        self._in_flight[direction] -= 1
