"""One block loaded while stores wait: submitted to seen, idle and with QUEUED_JOBS stores queued.

The stores have half of the slab each (8 GiB altogether by default), go to host blocks of their
own, and are submitted again as they end, so that as many are always queued. The block that is
loaded has 2 MiB: one page, or one page of each of 64 tensors; source and destination are random,
and apart from those of the stores. Idle is measured before and after.

A load that is sent right behind such a store waits until that is planned, as any message waits for
the one before it: those are told apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from kvferry.client import CPULoadStoreSpec, GPULoadStoreSpec, TransferSpec
from kvferry.client.cli.bench.engine import HOST_BLOCK, TIMEOUT, Engine, Shape
from kvferry.client.cli.bench.plan import QUEUED_JOBS, Plan
from kvferry.client.cli.bench.results import Latency, Queued
from kvferry.client.cli.bench.rig import Rig
from kvferry.client.cli.units import size
from kvferry.client.session import timed_out
from kvferry.proto.specs import MAX_BLOCK_IDS

PAGES = (HOST_BLOCK, 32 << 10)
TRIPS, QUICK_TRIPS = 5000, 50
WARM_UPS = 20
STEPS = len(PAGES)


def measure(rig: Rig, plan: Plan, step: Callable[[str], None]) -> list[Queued]:
    trips = QUICK_TRIPS if plan.quick else TRIPS
    return [_measure(rig, plan, page_bytes, trips, step) for page_bytes in PAGES]


def _measure(
    rig: Rig, plan: Plan, page_bytes: int, trips: int, step: Callable[[str], None]
) -> Queued:
    step(f"a block of {size(page_bytes)} pages behind stores")
    with rig.engine(Shape.of(page_bytes), (QUEUED_JOBS + 1) * plan.half_bytes) as engine:
        loads = _Loads(engine)
        before = loads.trips(trips // 2)
        stores = _stores(engine)
        loads.queue(stores)
        behind, after_submit = loads.trips_behind(trips)
        loads.drain()
        idle = before + loads.trips(trips // 2)
    what = f"one block of {size(page_bytes)} pages"
    return Queued(
        page_bytes,
        len(stores) * plan.half_bytes,
        Latency.of(f"{what}, idle", idle),
        Latency.of(f"{what}, behind stores", behind),
        Latency.of(f"{what}, behind a submit", after_submit) if after_submit else None,
    )


class _Loads:
    """Round trips of one block, from the last part of the host blocks into the slab's half."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._random = engine, np.random.default_rng(4)
        self._stores: dict[int, TransferSpec] = {}
        # Whether stores were submitted since the last load.
        self._submitted = False

    def queue(self, stores: list[TransferSpec]) -> None:
        for spec in stores:
            self._stores[self._engine.submit(spec)] = spec
            self._submitted = True

    def trips(self, times: int) -> list[float]:
        return [self._trip(self._spec()) for _ in range(times + WARM_UPS)][WARM_UPS:]

    def trips_behind(self, times: int) -> tuple[list[float], list[float]]:
        """All but those that were sent right behind a store; and those. All, if all were."""
        others, after_submit = list[float](), list[float]()
        self.trips(0)
        for _ in range(times):
            before = self._submitted
            seconds = self._trip(self._spec())
            (after_submit if before else others).append(seconds)
        return (others, after_submit) if others else (after_submit, [])

    def drain(self) -> None:
        self._engine.finish(len(self._stores))
        self._stores.clear()

    def _spec(self) -> TransferSpec:
        engine, factor = self._engine, self._engine.shape.factor
        spare = engine.host_blocks * QUEUED_JOBS // (QUEUED_JOBS + 1)
        host = self._random.integers(spare, engine.host_blocks, size=1)
        first = self._random.integers(engine.num_blocks // 2, engine.num_blocks - factor)
        return CPULoadStoreSpec(host), GPULoadStoreSpec(np.arange(first, first + factor))

    def _trip(self, spec: TransferSpec) -> float:
        """Stores that end meanwhile are submitted again, behind the clock."""
        self._submitted = False
        begin = time.perf_counter()
        load, ended = self._engine.submit(spec), list[int]()
        while load not in ended:
            ended += [result.job_id for result in self._engine.take()]
            if time.perf_counter() > begin + TIMEOUT:
                raise timed_out("a block was not loaded", load)
        seconds = time.perf_counter() - begin
        ended.remove(load)
        self.queue([self._stores.pop(job_id) for job_id in ended])
        return seconds


def _stores(engine: Engine) -> list[TransferSpec]:
    """All blocks of the slab's first half, in another order each, to the first host blocks."""
    random, factor = np.random.default_rng(5), engine.shape.factor
    each = min(engine.host_blocks // (QUEUED_JOBS + 1), MAX_BLOCK_IDS // factor)
    hosts = random.permutation(each * QUEUED_JOBS).reshape(QUEUED_JOBS, each)
    blocks = [random.permutation(engine.num_blocks // 2)[: each * factor] for _ in hosts]
    return [(GPULoadStoreSpec(b), CPULoadStoreSpec(h)) for b, h in zip(blocks, hosts, strict=True)]
