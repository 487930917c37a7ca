"""Loads: what a lookup has promised is copied to slots of the request, before it is computed.

SGLang queues the loads of a batch, starts them together, and each layer waits for its KV. A large
load is one job per section of the layers, so the first layers are computed while later ones are
copied. If a job fails, SGLang ends its batch's requests that load. Used in the scheduler's thread.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from msgspec.structs import replace

from kvferry.client.engines.rank_session import RankSession
from kvferry.client.sglang.block_ids import BlockIds, SourcePages
from kvferry.client.sglang.transfers import RankTransfers
from kvferry.proto.errors import Code, Gone, KVFerryError
from kvferry.proto.specs import (
    MAX_MESSAGE_IDS,
    Direction,
    GPULoadStoreSpec,
    KeyLoadStoreSpec,
    section_starts,
)

log = logging.getLogger("kvferry")

# Seconds to wait for the loads of a batch; then the session is abandoned, and its requests fail.
# The whole server waits. A load takes milliseconds, and a second for a million tokens.
LOAD_TIMEOUT = 5.0
# Seconds between two polls.
POLL_INTERVAL = 20e-6
# Bytes from which on a load has sections. The link copies fewer in a millisecond.
MIN_SECTIONED = 64 << 20
# Most blocks of a load, counted in each section, so that a session has room for its jobs.
MAX_SECTIONED = MAX_MESSAGE_IDS


@dataclass(slots=True)
class Batch:
    """The jobs of the loads that were started together, until they have ended. rids: of the
    requests. jobs: by section; those of whole loads are in the first one. success: of those that
    have ended."""

    rids: tuple[str, ...]
    jobs: list[list[int]]
    success: bool = True


@dataclass(frozen=True, slots=True)
class LoadedLayers:
    """What a load brings. groups: KV cache groups. block_bytes: of a host block. layers: which are
    divided into `sections`; 1 of each: loads arrive whole."""

    groups: int
    block_bytes: int
    layers: int = 1
    sections: int = 1

    def section_of(self, layer: int) -> int:
        """The last section that has KV of a layer, or of one before."""
        return bisect_right(section_starts(self.layers, self.sections), layer) - 1

    def sections_of(self, blocks: int) -> Sequence[int | None]:
        """The sections of a load of so many blocks; None: it is one job."""
        large = blocks * self.block_bytes >= MIN_SECTIONED
        if self.sections > 1 and large and blocks * self.sections <= MAX_SECTIONED:
            return range(self.sections)
        return (None,)


class Loads:
    """The loads of one rank. It is also the counter that SGLang's pools wait for (`wait_until`).

    consumer_index: of the batch that is computed, as SGLang sets it; -1 if it loads nothing.
    num_layers: SGLang waits for the last one before it replays a CUDA graph of a whole prefill.
    timeout: seconds, see LOAD_TIMEOUT.
    """

    def __init__(
        self,
        session: RankSession,
        transfers: RankTransfers,
        loaded: LoadedLayers,
        timeout: float = LOAD_TIMEOUT,
    ) -> None:
        self._session, self._transfers, self._loaded = session, transfers, loaded
        self.num_layers = loaded.layers
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
        batch = Batch(tuple(queued), [[] for _ in range(self._loaded.sections)])
        specs: list[tuple[KeyLoadStoreSpec, GPULoadStoreSpec]] = []
        for pages in queued.values():
            try:
                specs.append(self._spec(pages))
            except KVFerryError as error:
                log.warning("kvferry: a load fails: %s", error)
                batch.success = False
        # The first layers of all requests come first.
        for section in (None, *range(self._loaded.sections)):
            for keys, gpu in specs:
                if section in self._loaded.sections_of(len(keys.keys)):
                    spec = keys, replace(gpu, section=section)
                    batch.jobs[section or 0].append(self._transfers.submit(spec, Direction.LOAD))
        number = next(self._numbers)
        self._batches[number] = batch
        return number

    def finish(self, number: int) -> tuple[bool, tuple[str, ...]]:
        """Wait until a batch writes no slot anymore. Returns whether all of it was loaded, and the
        requests."""
        batch = self._batches.pop(number, None)
        if batch is None:
            return True, ()
        self._wait(batch, self._loaded.sections)
        return batch.success, batch.rids

    def end_all(self) -> None:
        """Return when no transfer writes to the device; nothing is queued then."""
        self._queued.clear()
        for number in tuple(self._batches):
            self.finish(number)

    # For SGLang's pools

    def set_consumer(self, number: int) -> None:
        self.consumer_index = number

    def wait_until(self, layer: int) -> None:
        """Wait for a layer of the batch that is computed. A failure is reported by `finish`."""
        if (batch := self._batches.get(self.consumer_index)) is not None:
            self._wait(batch, self._loaded.section_of(layer) + 1)

    def _spec(self, pages: list[SourcePages]) -> tuple[KeyLoadStoreSpec, GPULoadStoreSpec]:
        blocks = BlockIds(pages, self._loaded.groups)
        blocks.wait()
        return KeyLoadStoreSpec(tuple(blocks.keys())), blocks.spec()

    def _wait(self, batch: Batch, sections: int) -> None:
        """Wait for the first sections."""
        deadline, waited = time.monotonic() + self._timeout, batch.jobs[:sections]
        while any(waited):
            self._transfers.poll()
            for its in waited:
                for job_id in tuple(its):
                    success = self._transfers.take(job_id)
                    if success is not None:
                        batch.success &= success
                        its.remove(job_id)
            left = next((job_id for its in waited for job_id in its), None)
            if left is not None and time.monotonic() > deadline:
                message = f"a load has not ended within {self._timeout:g} s"
                self._session.abandon(Gone(Code.TIMEOUT, message, left))
            elif left is not None:
                time.sleep(POLL_INTERVAL)
