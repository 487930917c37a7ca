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
    """For every block the newest transfer, each way, that touched it. Serials grow from 1."""

    def __init__(self, gpu_slots: int, host_blocks: int) -> None:
        self._gpu = {d: np.zeros(gpu_slots, dtype=np.int64) for d in Direction}
        self._host = {d: np.zeros(host_blocks, dtype=np.int64) for d in Direction}
        self._in_flight: Counter[Direction] = Counter()

    def add_transfer(self, serial: int, direction: Direction, blocks: ResolvedBlocks) -> int:
        """Note a new transfer. Returns the serial up to which the other way must have ended."""
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
        """One of those that were admitted has ended."""
        self._in_flight[direction] -= 1
