"""A stand-in for the checksum client. The test decides when a read is complete."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from kvferry.daemon.core.region import Region
from kvferry.daemon.persistence.checksum_client import Purpose


@dataclass(eq=False)
class RecordedReads:
    """Records reads, and completes them, when told to, with the checksums of the table."""

    purpose: Purpose
    window: int = 100
    # Blocks of each read, and the kind of the region's owner.
    reads: list[tuple[str, list[int]]] = field(default_factory=list)
    waiting: list[asyncio.Future[None]] = field(default_factory=list)
    # Set when a read begins.
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def blocks(self) -> list[list[int]]:
        """The blocks of each read."""
        return [blocks for _, blocks in self.reads]

    async def read_checksums(self, region: Region, blocks: Any, purpose: Purpose) -> Any:
        assert purpose is self.purpose
        checksums = region.table.lines.checksums(blocks)
        self.reads.append((region.owner.kind, blocks.tolist()))
        self.waiting.append(asyncio.get_running_loop().create_future())
        self.begun.set()
        await self.waiting[-1]
        return checksums

    def complete_next(self) -> None:
        self.waiting.pop(0).set_result(None)

    def complete_all(self) -> None:
        while self.waiting:
            self.complete_next()
