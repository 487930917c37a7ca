"""An engine in this process, whose daemon is killed and restarted."""

from __future__ import annotations

from itertools import count
from typing import Any

from kvferry.client import (
    AsyncOffloadClient,
    OffloadClient,
    Timeline,
    TransferResult,
    TransferSpec,
    shared_empty,
)
from kvferry.testing.engine import until
from support.block_specs import load, store

BLOCKS, PAGE = 16, 4096
NEVER = 1 << 40


class ReconnectingFixture:
    """An engine in this process: numbered blocks, jobs, and a record of how they ended."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.tensor = shared_empty((BLOCKS, PAGE))
        for block in range(BLOCKS):
            self.tensor[block] = block
        self.timeline = Timeline.create()
        self.job_ids = count(1)
        self.accepted: list[int] = []
        self.history: list[TransferResult] = []

    @property
    def arguments(self) -> dict[str, Any]:
        return {"num_blocks": BLOCKS, "timeline": self.timeline}

    def submit(self, spec: TransferSpec, wait_for: int = 0) -> int:
        job_id = next(self.job_ids)
        self.client.transfer_async(job_id, spec, wait_for)
        self.accepted.append(job_id)
        return job_id

    def poll(self) -> list[TransferResult]:
        self.history += self.client.get_finished()
        return self.history

    def result(self, job_id: int) -> TransferResult:
        until(lambda: any(result.job_id == job_id for result in self.poll()))
        return next(result for result in self.history if result.job_id == job_id)

    def round_trip(self, gpu: int, host: int, to: int) -> None:
        """Store a block and load it elsewhere."""
        assert self.result(self.submit(store(gpu, host))).success
        assert self.result(self.submit(load(host, to))).success
        assert bool((self.tensor[to] == self.tensor[gpu]).all())

    def check_each_ended_once(self) -> None:
        until(lambda: len(self.poll()) >= len(self.accepted))
        assert sorted(result.job_id for result in self.history) == self.accepted


def wait_reconnected(client: OffloadClient | AsyncOffloadClient, incarnation: int = 2) -> None:
    """Poll until the client is connected to its daemon number `incarnation`."""

    def reconnected() -> bool:
        client.get_finished()
        return client.connected and client.incarnation == incarnation

    until(reconnected)
