"""Asks a tier whether it still has the blocks that were written, and has lost ones written again.

A tier evicts what nobody reads from it. The keys that are used most are read from the pool, so they
would be missing after a reboot. It asks for a few keys each second, and only while the tier may
have lost some: if it has evicted keys or its process has died since all were asked for, or if it
does not say how many it evicts. Event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from kvferry.daemon.core.tier_actions import WrittenBlocks
from kvferry.daemon.tiers.base import Result
from kvferry.daemon.tiers.tier_client import TierClient

# Seconds between two questions, the keys of one, and seconds for its answer.
CHECK_EVERY, CHECKED_KEYS, CHECK_SECONDS = 1.0, 256, 1.0


class WrittenSource(Protocol):
    """Core.writes."""

    def next_written(self, tier: int, limit: int) -> WrittenBlocks | None:
        """Up to `limit` of the blocks that were written into a tier and used since, the next ones
        with each call; None once all were named."""

    def reopen_writes(self, written: WrittenBlocks, missing: Sequence[bool]) -> None:
        """Have blocks written again that the tier does not have."""


class WriteCheck:
    """tier: its index. reopened: called when blocks are to be written again."""

    def __init__(
        self,
        source: WrittenSource,
        client: TierClient,
        tier: int,
        reopened: Callable[[], None],
        every: float = CHECK_EVERY,
    ) -> None:
        self._source, self._client, self._tier = source, client, tier
        self._reopened, self._every = reopened, every
        self._loop = asyncio.get_running_loop()
        # What the tier has lost, as counted when the last question round began and when the last
        # complete one did.
        self._losses = self._checked = self._count_losses()
        self._in_round = False
        self._timer = self._loop.call_later(every, self._check)

    def close(self) -> None:
        self._timer.cancel()

    def _check(self) -> None:
        self._timer = self._loop.call_later(self._every, self._check)
        losses = self._count_losses()
        if not self._client.is_prompt:
            return
        if not self._in_round:
            if losses is not None and losses == self._checked:
                return
            self._in_round, self._losses = True, losses
        written = self._source.next_written(self._tier, CHECKED_KEYS)
        if written is None:
            self._in_round, self._checked = False, self._losses
            return

        def done(results: Sequence[Result]) -> None:
            if not self._client.is_started:  # which ends everything as a miss
                return
            missing = [result is Result.MISS for result in results]
            if any(missing):
                self._source.reopen_writes(written, missing)
                self._reopened()

        self._client.contains(written.store, written.keys, CHECK_SECONDS, done)

    def _count_losses(self) -> tuple[int, ...] | None:
        """Counts that grow when the tier loses keys; None if it does not count them."""
        usage, counters = self._client.usage, self._client.counters
        if not usage.capacity_bytes:
            return None
        corrupt = counters.results["fetch"][Result.CORRUPT]
        return usage.evictions, usage.retired, counters.deaths, corrupt
