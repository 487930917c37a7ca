"""Carries out what the core wants of the tiers, and reports what became of it.

The server passes it the core's actions; reports go back to the core. Event loop only.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeAlias

import structlog

from kvferry.daemon.core.actions import Report
from kvferry.daemon.core.tier_actions import (
    BlocksFetched,
    DropStore,
    FetchBlocks,
    FetchReleased,
    FindKeys,
    KeysFound,
    StoreDropped,
    StoreDroppedElsewhere,
)
from kvferry.daemon.tiers.base import Result
from kvferry.daemon.tiers.drop_queue import DropQueue
from kvferry.daemon.tiers.read_rate import ReadRate
from kvferry.daemon.tiers.tier_blocks import TierBlocks
from kvferry.daemon.tiers.tier_client import TierClient, nothing
from kvferry.daemon.tiers.write_check import WriteCheck
from kvferry.daemon.tiers.write_out import WriteOut
from kvferry.proto.status import TierStatus

# Seconds for a lookup. It takes milliseconds; this is what a request loses if a tier stops
# answering, and a pause of a busy machine that is mostly shorter.
FIND_SECONDS = 0.1
# Seconds until a drop counts as done. A tier that has not confirmed it by then gets it first thing
# when it answers again.
DROP_REPORT_SECONDS = 5.0
# Seconds for the marker of a drop; see drop_queue.py.
MARKER_SECONDS = 3.0

TierAction: TypeAlias = FindKeys | FetchBlocks | DropStore

log = structlog.get_logger()


@dataclass(eq=False, slots=True)
class AttachedTier:
    """A tier that is in use. markers: directory for the markers of drops. write_out, write_check:
    None if nothing is written into it."""

    client: TierClient
    markers: Path
    write_out: WriteOut | None = None
    write_check: WriteCheck | None = None
    rate: ReadRate = field(default_factory=lambda: ReadRate(time.monotonic))
    # Starts of the fetches that have not ended, by number, the oldest first.
    fetches: dict[int, float] = field(default_factory=dict)
    # Counters of TierStatus, by field.
    counts: Counter[str] = field(default_factory=Counter)
    # Fetches that read a key, and their total time.
    promotions: int = 0
    promotion_seconds: float = 0.0


@dataclass(eq=False, slots=True)
class _Search:
    """tier_of: of each key the fastest tier that has it so far. left: tiers without an answer."""

    tier_of: list[int]
    left: int


class Tiering:
    """The tiers below the host pool, fastest first. Marked drops of an earlier daemon are repeated.

    report: called with reports for the core. promoted: called with the name of a tier and the
    seconds of a fetch in which at least one key was read. drop_report_seconds, marker_seconds: see
    DROP_REPORT_SECONDS and MARKER_SECONDS.
    """

    def __init__(
        self,
        tiers: Sequence[AttachedTier],
        report: Callable[[list[Report]], None],
        promoted: Callable[[str, float], None],
        *,
        drop_report_seconds: float = DROP_REPORT_SECONDS,
        marker_seconds: float = MARKER_SECONDS,
    ) -> None:
        self._drop_report_seconds = drop_report_seconds
        self._tiers = tuple(tiers)
        self._write_outs = [tier.write_out for tier in tiers if tier.write_out is not None]
        self._report, self._promoted = report, promoted
        self._loop = asyncio.get_running_loop()
        self._drops = [DropQueue(each.client, each.markers, marker_seconds) for each in tiers]
        for place, tier in enumerate(tiers):
            tier.client.dropped_elsewhere = partial(self._report_elsewhere, place)

    def perform(self, action: TierAction) -> None:
        match action:
            case FindKeys():
                self._find_keys(action)
            case FetchBlocks():
                self._fetch_blocks(action)
            case DropStore(number, store, dropped_by):
                self._drop_store(number, store, dropped_by)

    def wake_up(self) -> None:
        """Blocks of the pool have changed: there may be some to write."""
        for write_out in self._write_outs:
            write_out.wake_up()

    def status(self, counted: Mapping[str, Mapping[str, float]]) -> tuple[TierStatus, ...]:
        """The state of each tier. counted: fields of TierStatus that the core counts, by tier."""
        return tuple(self._status_of(tier, counted) for tier in self._tiers)

    def stop(self) -> None:
        """Stop writing and reporting. The server closes the core's sessions next."""
        self._report = nothing
        for tier in self._tiers:
            for writer in (tier.write_out, tier.write_check):
                if writer is not None:
                    writer.close()

    async def close(self) -> None:
        """End the tiers, once they have written everything back."""
        self.stop()
        await asyncio.gather(*(drops.close() for drops in self._drops))
        await asyncio.gather(*(tier.client.close() for tier in self._tiers))

    # Searches

    def _find_keys(self, action: FindKeys) -> None:
        search = _Search([-1] * len(action.keys), len(self._tiers))

        def receive(results: Sequence[Result], tier: int) -> None:
            hits = results.count(Result.OK)
            self._tiers[tier].counts["hits"] += hits
            self._tiers[tier].counts["misses"] += len(results) - hits
            for place, result in enumerate(results):
                if result is Result.OK and not 0 <= search.tier_of[place] < tier:
                    search.tier_of[place] = tier
            search.left -= 1
            if not search.left:
                self._report_found(action.search, search)

        for number, tier in enumerate(self._tiers):
            done = partial(receive, tier=number)
            tier.client.contains(action.store, action.keys, FIND_SECONDS, done)

    def _report_found(self, number: int, search: _Search) -> None:
        rates = tuple(tier.rate.bytes_per_second for tier in self._tiers)
        queues = tuple(tier.rate.queue_seconds for tier in self._tiers)
        known = tuple(tier.rate.is_known for tier in self._tiers)
        self._report([KeysFound(number, tuple(search.tier_of), rates, queues, known)])

    # Fetches

    def _fetch_blocks(self, action: FetchBlocks) -> None:
        tier, number = self._tiers[action.tier], action.fetch
        nbytes = len(action.keys) * action.block_bytes
        tier.fetches[number] = begun = time.monotonic()
        counted_from = tier.rate.begin(nbytes)

        def done(results: Sequence[Result]) -> None:
            del tier.fetches[number]
            ok = tuple(result is Result.OK for result in results)
            if any(ok):
                seconds = time.monotonic() - begun
                tier.promotions += 1
                tier.promotion_seconds += seconds
                self._promoted(tier.client.spec.name, seconds)
            self._report([BlocksFetched(number, ok)])

        def released(results: Sequence[Result]) -> None:
            if results:
                tier.rate.end(counted_from, nbytes, results.count(Result.OK) * action.block_bytes)
            else:
                tier.rate.abandon(nbytes)
            self._report([FetchReleased(number)])

        blocks = TierBlocks(action.store, action.keys, action.offsets, action.block_bytes)
        tier.client.fetch(blocks, action.seconds, done, released)

    # Drops

    def _report_elsewhere(self, tier: int, store: str) -> None:
        log.info("namespace dropped elsewhere", namespace=store)
        self._report([StoreDroppedElsewhere(tier, store)])

    def _drop_store(self, number: int, store: str, dropped_by: int) -> None:
        unconfirmed = set(range(len(self._tiers))) - {dropped_by}
        reported = False

        def report() -> None:
            nonlocal reported
            if not reported:
                reported = True
                timer.cancel()
                for write_out in self._write_outs:
                    write_out.resume_store(store)
                self._report([StoreDropped(number)])

        def confirm(tier: int) -> None:
            unconfirmed.discard(tier)
            if not unconfirmed:
                report()

        timer = self._loop.call_later(self._drop_report_seconds, report)
        for write_out in self._write_outs:
            write_out.hold_store(store)
        if not unconfirmed:
            self._loop.call_soon(report)
        for place in sorted(unconfirmed):
            self._drops[place].drop(store, partial(confirm, place))

    def _status_of(
        self, tier: AttachedTier, counted: Mapping[str, Mapping[str, float]]
    ) -> TierStatus:
        client = tier.client
        usage, counters, breaker = client.usage, client.counters, client.breaker
        if breaker.state == "open" or client.failure:
            state = "off"
        elif not client.is_started:
            state = "starting"
        else:
            state = "on" if breaker.state == "closed" else "probing"
        fetched, put = counters.results["fetch"], counters.results["put"]
        oldest = [next(iter(tier.fetches.values()))] if tier.fetches else []
        if tier.write_out is not None and (write := tier.write_out.oldest) is not None:
            oldest.append(write)
        values: dict[str, float] = {
            **tier.counts,
            "promoted": fetched[Result.OK],
            "promotion_seconds": tier.promotion_seconds / max(1, tier.promotions),
            "written": put[Result.OK],
        }
        values |= counted.get(client.spec.name, {})
        return TierStatus(
            client.spec.name,
            state,
            capacity_bytes=usage.capacity_bytes,
            used_bytes=usage.used_bytes,
            keys=usage.keys,
            read_bytes=counters.read_bytes,
            written_bytes=counters.written_bytes,
            evictions=usage.evictions,
            checksum_failures=fetched[Result.CORRUPT],
            errors=fetched[Result.ERROR] + put[Result.ERROR],
            queue_seconds=max(0.0, time.monotonic() - min(oldest)) if oldest else 0.0,
            openings=breaker.openings,
            deaths=counters.deaths,
            read_only=usage.read_only,
            failure=client.failure,
            **values,  # type: ignore[arg-type]
        )
