"""Loads: what a lookup has promised is copied to slots of the request, before it is computed.

SGLang queues the loads of a batch, starts them together, and waits for them when the first layer
reads the KV; all layers arrive at once. If one fails, SGLang ends its batch's requests that load.
Used in the scheduler's thread.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from itertools import count

from kvferry.client.engines.rank_session import RankSession
from kvferry.client.sglang.block_ids import BlockIds, SourcePages
from kvferry.client.sglang.transfers import RankTransfers
from kvferry.proto.errors import Code, Gone, KVFerryError
from kvferry.proto.specs import Direction, KeyLoadStoreSpec

log = logging.getLogger("kvferry")

# Seconds to wait for the loads of a batch; then the session is abandoned, and its requests fail.
# The whole server waits. A load takes milliseconds, and a second for a million tokens.
LOAD_TIMEOUT = 5.0
# Seconds between two polls.
POLL_INTERVAL = 20e-6


@dataclass(slots=True)
class Batch:
    """The jobs of the loads that were started together, until they have ended. rids: of the
    requests. success: of those that have ended."""

    rids: tuple[str, ...]
    jobs: list[int]
    success: bool = True


class Loads:
    """The loads of one rank. It is also the counter that SGLang's pools wait for (`wait_until`).

    consumer_index: of the batch that is computed, as SGLang sets it; -1 if it loads nothing.
    timeout: seconds, see LOAD_TIMEOUT.
    """

    # SGLang waits for the last one before it replays a CUDA graph of a whole prefill.
    num_layers = 1

    def __init__(
        self,
        session: RankSession,
        transfers: RankTransfers,
        groups: int,
        timeout: float = LOAD_TIMEOUT,
    ) -> None:
        self._session, self._transfers, self._groups = session, transfers, groups
        self._timeout = timeout
        self._queued: dict[str, list[SourcePages]] = {}
        self._batches: dict[int, Batch] = {}
        self._numbers = count()
        self.consumer_index = -1

    def queue(self, rid: str, pages: list[SourcePages]) -> None:
        self._queued[rid] = pages

    def cancel(self, rid: str) -> bool:
        """Remove a load that has not started. Returns whether there was one."""
        return self._queued.pop(rid, None) is not None

    def start(self) -> int:
        """Start what is queued; returns the number of the batch, -1 if there is none."""
        if not self._queued:
            return -1
        queued, self._queued = self._queued, {}
        batch = Batch(tuple(queued), [])
        for pages in queued.values():
            try:
                batch.jobs.append(self._submit(pages))
            except KVFerryError as error:
                log.warning("kvferry: a load fails: %s", error)
                batch.success = False
        number = next(self._numbers)
        self._batches[number] = batch
        return number

    def finish(self, number: int) -> tuple[bool, tuple[str, ...]]:
        """Wait until a batch writes no slot anymore. Returns whether all of it was loaded, and the
        requests."""
        batch = self._batches.pop(number, None)
        if batch is None:
            return True, ()
        self._wait(batch)
        return batch.success, batch.rids

    def end_all(self) -> None:
        """Return when no transfer writes to the device; nothing is queued then."""
        self._queued.clear()
        for number in tuple(self._batches):
            self.finish(number)

    # For SGLang's pools

    def set_consumer(self, number: int) -> None:
        self.consumer_index = number

    def wait_until(self, _layer: int) -> None:
        """Wait for the batch that is computed. A failure is reported by `finish`."""
        if (batch := self._batches.get(self.consumer_index)) is not None:
            self._wait(batch)

    def _submit(self, pages: list[SourcePages]) -> int:
        blocks = BlockIds(pages, self._groups)
        blocks.wait()
        spec = KeyLoadStoreSpec(tuple(blocks.keys())), blocks.spec()
        return self._transfers.submit(spec, Direction.LOAD)

    def _wait(self, batch: Batch) -> None:
        deadline = time.monotonic() + self._timeout
        while batch.jobs:
            self._transfers.poll()
            for job_id in tuple(batch.jobs):
                success = self._transfers.take(job_id)
                if success is not None:
                    batch.success &= success
                    batch.jobs.remove(job_id)
            if batch.jobs and time.monotonic() > deadline:
                message = f"a load has not ended within {self._timeout:g} s"
                self._session.abandon(Gone(Code.TIMEOUT, message, batch.jobs[0]))
            elif batch.jobs:
                time.sleep(POLL_INTERVAL)
