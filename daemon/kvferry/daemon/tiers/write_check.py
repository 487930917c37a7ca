"""Asks a tier whether it still has the blocks that were written, and has lost ones written again.

A tier evicts what nobody reads from it. The keys that are used most are read from the pool, so they
would be missing after a reboot. It asks for a few keys each second, and only while the tier may
have lost some: if it has evicted keys or its process has died since all were asked for, or if it
does not say how many it evicts. Event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvferry.daemon.core.writes import Writes
from kvferry.daemon.tiers.base import Result
from kvferry.daemon.tiers.tier_client import TierClient

# Seconds between two questions, the keys of one, and seconds for its answer.
CHECK_EVERY, CHECKED_KEYS, CHECK_SECONDS = 1.0, 256, 1.0


class WriteCheck:
    """tier: its index. reopened: called when blocks are to be written again."""

    def __init__(
        self,
        writes: Writes,
        client: TierClient,
        tier: int,
        reopened: Callable[[], None],
    ) -> None:
        self._writes, self._client, self._tier = writes, client, tier
        self._reopened = reopened

    async def run(self) -> None:
        """Ask about all written keys each time the tier may have lost some, until cancelled."""
        checked = self._count_losses()
        while True:
            await asyncio.sleep(CHECK_EVERY)
            losses = self._count_losses()
            if (losses is None or losses != checked) and self._client.is_prompt:
                await self._check_all()
                checked = losses

    async def _check_all(self) -> None:
        """Ask about a few keys at a time, which the core remembers."""
        while (written := self._writes.next_written(self._tier, CHECKED_KEYS)) is not None:
            results = await self._client.contains(written.store, written.keys, CHECK_SECONDS)
            missing = [result is Result.MISS for result in results]
            if any(missing) and self._client.is_started:  # if not, everything is a miss
                self._writes.reopen_writes(written, missing)
                self._reopened()
            await asyncio.sleep(CHECK_EVERY)
            while not self._client.is_prompt:
                await asyncio.sleep(CHECK_EVERY)

    def _count_losses(self) -> tuple[int, ...] | None:
        """Counts that grow when the tier loses keys; None if it does not count them."""
        usage, counts = self._client.usage, self._client.counts
        if not usage.capacity_bytes:
            return None
        lost = counts["deaths"], counts["checksum_failures"]
        return usage.evictions, usage.retired, *lost
