"""What calls and single blocks cost, p50 and p99.

submit           transfer_async of BLOCKS block ids on each side, the call alone: specs are
                 made beforehand, at most AHEAD jobs are under way; in a process that is awake,
                 as schedulers are, and in one that slept ASLEEP before each call
get_finished     with nothing to fetch: nothing under way, and one job held by a fence
one block        2 MiB, one page, submitted until get_finished, called in a loop, returns it;
                 the raw copy of as many bytes, called and waited for in this process, takes
                 turns with it; the difference is what the other process costs
below            what lies under these, each after 1 ms of sleep: ZeroMQ's own send of as many bytes
                 as the ids have; a process woken by one byte until it has answered, with this one
                 polling; and one that does nothing else but to copy such a block before it answers,
                 itself or by a second thread. A transfer wakes two threads in turn

The calls are measured again with a Python thread that burns this process's GIL, and with every
core busy, for PRESSED seconds each: then the interpreter's switch interval (5 ms) shows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import cycle
from math import inf

import numpy as np

from kvferry.client import CPULoadStoreSpec, GPULoadStoreSpec, TransferSpec
from kvferry.client.cli.bench.below import below
from kvferry.client.cli.bench.engine import HOST_BLOCK, Engine, Shape
from kvferry.client.cli.bench.pressure import burnt_gil, busy_cores
from kvferry.client.cli.bench.results import Latency
from kvferry.client.cli.bench.rig import Rig
from kvferry.proto.specs import BlockIds

BLOCKS = 2048
SUBMIT_SHAPE = Shape(4096, 1, 1)
AHEAD = 4
# Different specs, few enough that their ids stay in the CPU caches, as those of a scheduler.
SPECS = 16
SUBMITS, POLLS, TRIPS = 500, 5000, 500
QUICK = 10
WARM_UPS = 10
ASLEEP = 1e-3
STEPS = 7
PRESSED = 2.0


def measure(rig: Rig, quick: bool, step: Callable[[str], None]) -> list[Latency]:
    less = QUICK if quick else 1
    with rig.engine(SUBMIT_SHAPE) as engine:
        step("cost of submitting")
        submits = [_submits(engine, SUBMITS // less), _submits(engine, SUBMITS // less, ASLEEP)]
        step("what lies below")
        submits += below(SUBMITS // less, rig.ordinal, HOST_BLOCK)
        step("cost of polling")
        polls = _polls(engine, POLLS // less)
        for name, pressure in (("GIL burnt", burnt_gil), ("every core busy", busy_cores)):
            step(f"the same, {name}")
            with pressure():
                polls += _pressed(engine, name, PRESSED / less)
    trips: list[Latency] = []
    with rig.engine(Shape(HOST_BLOCK, 1, 1)) as engine:
        for way in ("store", "load"):
            step(f"{way} of one block")
            trips += _trips(rig, engine, way, TRIPS // less)
    return [*submits, *polls, *trips]


def _pressed(engine: Engine, name: str, seconds: float) -> list[Latency]:
    submits = _submits(engine, SUBMITS, limit=seconds)
    polls = _empty_polls(engine, 4 * POLLS, seconds)
    submits.what += f", {name}"
    return [submits, Latency.of(f"get_finished, {name}", polls)]


def _submits(engine: Engine, times: int, asleep: float = 0.0, limit: float = inf) -> Latency:
    specs, seconds, under_way = cycle(_specs(engine)), list[float](), 0
    deadline = time.perf_counter() + limit
    while len(seconds) < times + WARM_UPS and not (seconds and time.perf_counter() > deadline):
        spec = next(specs)
        if asleep:
            time.sleep(asleep)
        begin = time.perf_counter()
        engine.submit(spec)
        seconds.append(time.perf_counter() - begin)
        under_way += 1 - len(engine.take())
        under_way -= len(engine.finish(max(0, under_way - AHEAD), nap=0))
    engine.finish(under_way)
    what = f"transfer_async of {BLOCKS:,} ids" + (", after 1 ms asleep" if asleep else "")
    return Latency.of(what, _warm(seconds))


def _polls(engine: Engine, times: int) -> list[Latency]:
    idle = Latency.of("get_finished, nothing under way", _empty_polls(engine, times))
    fence = engine.timeline.last + 1
    engine.submit(_spec("store", np.arange(1), np.arange(1)), fence)
    held = Latency.of("get_finished, one job held by a fence", _empty_polls(engine, times))
    engine.timeline.signal(value=fence)
    engine.finish(1)
    return [idle, held]


def _empty_polls(engine: Engine, times: int, limit: float = inf) -> list[float]:
    poll, clock, seconds = engine.client.get_finished, time.perf_counter, list[float]()
    deadline = clock() + limit
    while len(seconds) < times + WARM_UPS and not (seconds and clock() > deadline):
        begin = clock()
        results = poll()
        seconds.append(clock() - begin)
        assert not results
    return _warm(seconds)


def _warm(seconds: list[float]) -> list[float]:
    return seconds[WARM_UPS:] or seconds


def _trips(rig: Rig, engine: Engine, way: str, times: int) -> list[Latency]:
    raw_copy, raws, trips = rig.raw.block(way, HOST_BLOCK), [], []
    random = np.random.default_rng(1)
    for _ in range(times + WARM_UPS):
        spec = _spec(way, *random.integers(engine.host_blocks, size=(2, 1)))
        trips.append(engine.run([spec], nap=0).wall)
        raws.append(raw_copy())
    trip = Latency.of(f"{way} of one block, submitted to seen", trips[WARM_UPS:])
    raw = Latency.of(f"{way}, raw copy of as much", raws[WARM_UPS:])
    return [trip, raw, trip.beyond(raw, f"{way}, difference")]


def _specs(engine: Engine) -> list[TransferSpec]:
    """Some stores of BLOCKS random blocks each. Made beforehand: to make one sweeps the caches."""
    random, jobs = np.random.default_rng(0), min(SPECS, max(1, engine.num_blocks // BLOCKS))
    ids = [random.permutation(engine.num_blocks)[: jobs * BLOCKS] for _ in range(2)]
    blocks, hosts = (np.array_split(each, jobs) for each in ids)
    return [_spec("store", *pair) for pair in zip(blocks, hosts, strict=True)]


def _spec(way: str, blocks: BlockIds, hosts: BlockIds) -> TransferSpec:
    gpu, host = GPULoadStoreSpec(blocks), CPULoadStoreSpec(hosts)
    return (gpu, host) if way == "store" else (host, gpu)
