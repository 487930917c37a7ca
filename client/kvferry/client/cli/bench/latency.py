"""Cost of calls, and of transfers of single blocks: p50 and p99.

submit           transfer_async of BLOCKS block ids on each side, the call alone. Specs are made
                 beforehand, and at most AHEAD jobs are in flight. Measured in a process that is
                 awake, as schedulers are, and in one that slept SLEEP seconds before each call.
get_finished     without results to fetch: nothing in flight, and one job that waits for the
                 timeline
one block        2 MiB, one page: from submit until get_finished, called in a loop, returns it. A
                 raw copy of the same size, called and waited for in this process, alternates with
                 it; the difference is the cost of the other process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import cycle

import numpy as np

from kvferry.client import CPULoadStoreSpec, GPULoadStoreSpec, TransferSpec
from kvferry.client.cli.bench.bench_engine import HOST_BLOCK, BenchEngine, Shape
from kvferry.client.cli.bench.bench_results import Latency
from kvferry.client.cli.bench.rig import BenchRig
from kvferry.proto.specs import BlockIds

BLOCKS = 2048
SUBMIT_SHAPE = Shape(4096, 1, 1)
AHEAD = 4
# Number of specs: their ids must stay in the CPU caches, as those of a scheduler do.
SPECS = 16
SUBMITS, POLLS, TRIPS = 500, 5000, 500
QUICK = 10
WARM_UPS = 10
# Seconds.
SLEEP = 1e-3
STEPS = 4


def measure(rig: BenchRig, quick: bool, step: Callable[[str], None]) -> list[Latency]:
    less = QUICK if quick else 1
    with rig.engine(SUBMIT_SHAPE) as engine:
        step("cost of submitting")
        submits = [_submits(engine, SUBMITS // less, sleep) for sleep in (0.0, SLEEP)]
        step("cost of polling")
        polls = _polls(engine, POLLS // less)
    trips: list[Latency] = []
    with rig.engine(Shape(HOST_BLOCK, 1, 1)) as engine:
        for direction in ("store", "load"):
            step(f"{direction} of one block")
            trips += _trips(rig, engine, direction, TRIPS // less)
    return [*submits, *polls, *trips]


def _submits(engine: BenchEngine, times: int, sleep: float) -> Latency:
    specs, seconds, in_flight = cycle(_specs(engine)), list[float](), 0
    for _ in range(times + WARM_UPS):
        spec = next(specs)
        if sleep:
            time.sleep(sleep)
        begin = time.perf_counter()
        engine.submit(spec)
        seconds.append(time.perf_counter() - begin)
        in_flight += 1 - len(engine.fetch_results())
        in_flight -= len(engine.wait_results(max(0, in_flight - AHEAD), poll_interval=0))
    engine.wait_results(in_flight)
    what = f"transfer_async of {BLOCKS:,} ids" + (", after 1 ms of sleep" if sleep else "")
    return Latency.of(what, seconds[WARM_UPS:])


def _polls(engine: BenchEngine, times: int) -> list[Latency]:
    idle = Latency.of("get_finished, nothing in flight", _empty_polls(engine, times))
    value = engine.timeline.last + 1
    engine.submit(_spec("store", np.arange(1), np.arange(1)), value)
    polls = _empty_polls(engine, times)
    waiting = Latency.of("get_finished, one job waits for the timeline", polls)
    engine.timeline.signal(value=value)
    engine.wait_results(1)
    return [idle, waiting]


def _empty_polls(engine: BenchEngine, times: int) -> list[float]:
    poll, clock, seconds = engine.client.get_finished, time.perf_counter, list[float]()
    for _ in range(times + WARM_UPS):
        begin = clock()
        results = poll()
        seconds.append(clock() - begin)
        assert not results
    return seconds[WARM_UPS:]


def _trips(rig: BenchRig, engine: BenchEngine, direction: str, times: int) -> list[Latency]:
    raw_copy, raws, trips = rig.raw.block(direction, HOST_BLOCK), [], []
    random = np.random.default_rng(1)
    for _ in range(times + WARM_UPS):
        spec = _spec(direction, *random.integers(engine.host_blocks, size=(2, 1)))
        trips.append(engine.run([spec], poll_interval=0).wall)
        raws.append(raw_copy())
    trip = Latency.of(f"{direction} of one block, submit to result", trips[WARM_UPS:])
    raw = Latency.of(f"{direction}, raw copy of the same size", raws[WARM_UPS:])
    return [trip, raw, trip.minus(raw, f"{direction}, difference")]


def _specs(engine: BenchEngine) -> list[TransferSpec]:
    """Stores of BLOCKS random blocks each, made before timing: making one evicts CPU caches."""
    random, jobs = np.random.default_rng(0), min(SPECS, max(1, engine.num_blocks // BLOCKS))
    ids = [random.permutation(engine.num_blocks)[: jobs * BLOCKS] for _ in range(2)]
    blocks, hosts = (np.array_split(each, jobs) for each in ids)
    return [_spec("store", *pair) for pair in zip(blocks, hosts, strict=True)]


def _spec(direction: str, blocks: BlockIds, hosts: BlockIds) -> TransferSpec:
    gpu, host = GPULoadStoreSpec(blocks), CPULoadStoreSpec(hosts)
    return (gpu, host) if direction == "store" else (host, gpu)
