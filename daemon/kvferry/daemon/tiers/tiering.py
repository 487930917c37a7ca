"""Carries out what the core wants of the tiers, and reports what became of it.

Each action of the core is a flow, a coroutine that reads from top to bottom: `_search`, `_promote`.
Writing out (write_out.py), its check (write_check.py) and settling the epochs of shared tiers are
flows that last. The server passes the actions; reports go back to the core. Event loop only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec
import structlog

from kvferry.daemon.core.actions import Report
from kvferry.daemon.core.tier_actions import (
    BlocksFetched,
    DropStore,
    EpochsSettled,
    FetchBlocks,
    FetchReleased,
    FindKeys,
    KeysFound,
    SettleEpochs,
    StoresFound,
    TierDescription,
)
from kvferry.daemon.core.writes import Writes
from kvferry.daemon.processes import ProcessDied
from kvferry.daemon.tier_config import TierConfig
from kvferry.daemon.tiers.base import Result
from kvferry.daemon.tiers.messages import TierBlocks
from kvferry.daemon.tiers.read_rate import ReadRate
from kvferry.daemon.tiers.tier_client import TierClient
from kvferry.daemon.tiers.tier_process import PoolFiles
from kvferry.daemon.tiers.write_check import WriteCheck
from kvferry.daemon.tiers.write_out import COLDEST, WRITE_THROUGH, WriteOut
from kvferry.proto.status import TierStatus

# Seconds for a lookup. It takes milliseconds; this is what a request loses if a tier stops
# answering, and a pause of a busy machine that is mostly shorter.
FIND_SECONDS = 0.1
# Seconds between two questions for the epochs of a shared tier.
SETTLE_EVERY = 1.0

TierAction: TypeAlias = FindKeys | FetchBlocks | DropStore | SettleEpochs

log = structlog.get_logger()


def description_of(tier: TierConfig) -> TierDescription:
    """The description of a tier for the core."""
    min_uses = tier.admit_after if tier.write in COLDEST else 0
    through = tier.write == WRITE_THROUGH
    return TierDescription(tier.name, through, min_uses, tier.locality, tier.is_shared)


@dataclass(eq=False, slots=True)
class AttachedTier:
    """A tier that is in use."""

    client: TierClient
    rate: ReadRate = field(default_factory=lambda: ReadRate(time.monotonic))
    # Starts of the fetches that have not ended, by number, the oldest first.
    fetches: dict[int, float] = field(default_factory=dict)
    # Fetches that read a key, and their total time.
    promotions: int = 0
    promotion_seconds: float = 0.0


def start_tiers(
    tiers: Sequence[TierConfig],
    pool: PoolFiles,
    writes: Writes,
    report: Callable[[list[Report]], None],
) -> list[AttachedTier]:
    """Start the process of each tier. report: called with reports for the core."""

    def report_stores(stores: Sequence[str]) -> None:
        report([StoresFound(tuple(stores), now=time.monotonic())])

    return [
        AttachedTier(
            TierClient(tier, pool, stores_in_use=writes.stores_in_use, started=report_stores)
        )
        for tier in tiers
    ]


@dataclass(eq=False, slots=True)
class _Search:
    """A FindKeys in progress. tier_of: of each key the fastest tier that has it so far. left: tiers
    without an answer."""

    action: FindKeys
    tier_of: list[int]
    left: int


class Tiering:
    """The tiers below the host pool, fastest first.

    epochs_in_use: see Resets. report: called with reports for the core. promoted: called with the
    name of a tier and the seconds of a fetch in which at least one key was read.
    """

    def __init__(
        self,
        tiers: Sequence[AttachedTier],
        writes: Writes,
        report: Callable[[list[Report]], None],
        promoted: Callable[[str, float], None],
        epochs_in_use: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        self._tiers, self._writes = tuple(tiers), writes
        self._report_to_core, self._promoted = report, promoted
        self._epochs_in_use = epochs_in_use
        # Of each shared tier, by its index: set to settle at once.
        self._settle_now = {
            place: asyncio.Event()
            for place, each in enumerate(tiers)
            if each.client.config.is_shared
        }
        # The task group of `run`; flows that begin before it; and those that `stop` ends.
        self._flows: asyncio.TaskGroup | None = None
        self._early: list[Coroutine[Any, Any, None]] = []
        self._writers: list[asyncio.Task[None]] = []
        self._is_stopped = False
        self._write_outs = {
            place: WriteOut(writes, each.client, place, self._report)
            for place, each in enumerate(tiers)
            if each.client.config.write in COLDEST
        }

    async def run(self) -> None:
        """Run all flows until cancelled. Raises their errors, in an exception group."""
        async with asyncio.TaskGroup() as self._flows:
            for flow in self._early:
                self._start(flow)
            for place, tier in enumerate(self._tiers):
                self._start(tier.client.run())
                if place in self._settle_now:
                    self._start(self._settle(place, tier.client))
            for place, write_out in self._write_outs.items():
                check = WriteCheck(
                    self._writes, self._tiers[place].client, place, write_out.wake_up
                )
                self._writers += map(self._flows.create_task, (write_out.run(), check.run()))

    def perform(self, action: TierAction) -> None:
        match action:
            case FindKeys():
                search = _Search(action, [-1] * len(action.keys), len(self._tiers))
                for place in range(len(self._tiers)):
                    self._start(self._search(search, place))
            case FetchBlocks():
                self._start(self._promote(action))
            case DropStore(store):
                for tier in self._tiers:
                    tier.client.drop(store)
            case SettleEpochs():
                for wanted in self._settle_now.values():
                    wanted.set()

    def wake_up(self) -> None:
        """Blocks of the pool have changed: there may be some to write."""
        for write_out in self._write_outs.values():
            write_out.wake_up()

    def status(self, counted: Mapping[str, Mapping[str, float]]) -> tuple[TierStatus, ...]:
        """The state of each tier. counted: fields of TierStatus that the core counts, by tier."""
        return tuple(
            self._status_of(place, tier, counted) for place, tier in enumerate(self._tiers)
        )

    def stop(self) -> None:
        """Stop writing and reporting. The server closes the core's sessions next."""
        self._is_stopped = True
        for writer in self._writers:
            writer.cancel()

    def _start(self, flow: Coroutine[Any, Any, None]) -> None:
        if self._flows is None:
            self._early.append(flow)
            return
        try:
            self._flows.create_task(flow)
        except RuntimeError:  # another flow has failed, which ends the daemon
            flow.close()

    def _report(self, report: Report) -> None:
        if not self._is_stopped:
            self._report_to_core([report])

    # Flows

    async def _search(self, search: _Search, place: int) -> None:
        """Ask one tier. The last one to answer reports the fastest tier that has each key."""
        tier, action = self._tiers[place], search.action
        results = await tier.client.contains(action.store, action.keys, FIND_SECONDS)
        hits = results.count(Result.OK)
        tier.client.counts["hits"] += hits
        tier.client.counts["misses"] += len(results) - hits
        for key, result in enumerate(results):
            if result is Result.OK and not 0 <= search.tier_of[key] < place:
                search.tier_of[key] = place
        search.left -= 1
        if search.left:
            return
        rates = [tier.rate for tier in self._tiers]
        speeds = tuple(rate.bytes_per_second for rate in rates)
        queues = tuple(rate.queue_seconds for rate in rates)
        known = tuple(rate.is_known for rate in rates)
        self._report(KeysFound(action.search, tuple(search.tier_of), speeds, queues, known))

    async def _promote(self, action: FetchBlocks) -> None:
        """Read blocks into the pool, and release them when nothing can write into them."""
        tier, number = self._tiers[action.tier], action.fetch
        nbytes = len(action.keys) * action.block_bytes
        offsets = action.offsets.tobytes()
        blocks = TierBlocks(action.store, action.keys, offsets, action.block_bytes)
        tier.fetches[number] = begun = time.monotonic()
        counted_from = tier.rate.begin(nbytes)
        results, released = await tier.client.fetch(blocks, action.seconds)
        ok = tuple(result is Result.OK for result in results)
        del tier.fetches[number]
        if any(ok):
            seconds = time.monotonic() - begun
            tier.promotions += 1
            tier.promotion_seconds += seconds
            self._promoted(tier.client.config.name, seconds)
        self._report(BlocksFetched(number, ok))
        answer: Sequence[Result] = ()
        with suppress(ProcessDied):
            answer = await released
        if answer:
            tier.rate.end(counted_from, nbytes, answer.count(Result.OK) * action.block_bytes)
        else:
            tier.rate.abandon(nbytes)
        self._report(FetchReleased(number))

    async def _settle(self, place: int, client: TierClient) -> None:
        """Settle the epochs of a shared tier once per second, and at once when that is wanted."""
        wanted = self._settle_now[place]
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(SETTLE_EVERY):
                    await wanted.wait()
            wanted.clear()
            epochs = dict(self._epochs_in_use())
            if epochs and client.is_started:
                found = await client.settle(epochs)
                self._report(EpochsSettled(place, epochs, found, now=time.monotonic()))

    def _status_of(
        self, place: int, tier: AttachedTier, counted: Mapping[str, Mapping[str, float]]
    ) -> TierStatus:
        client = tier.client
        if client.breaker.state == "open" or client.failure:
            state = "off"
        elif not client.is_started:
            state = "starting"
        else:
            state = "on" if client.breaker.state == "closed" else "probing"
        oldest = [next(iter(tier.fetches.values()))] if tier.fetches else []
        write_out = self._write_outs.get(place)
        if write_out is not None and write_out.oldest is not None:
            oldest.append(write_out.oldest)
        usage = msgspec.structs.asdict(client.usage)
        del usage["retired"]  # which has no number in the status
        numbers: dict[str, Any] = {**client.counts, **usage, **counted.get(client.config.name, {})}
        return TierStatus(
            client.config.name,
            state,
            promotion_seconds=tier.promotion_seconds / max(1, tier.promotions),
            queue_seconds=max(0.0, time.monotonic() - min(oldest)) if oldest else 0.0,
            failure=client.failure,
            **numbers,
        )
