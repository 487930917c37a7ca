"""Two hosts share a Mooncake Store. Its faults cost misses, and nothing else.

Three network namespaces: a host with a mooncake_master and a store process, and two hosts with a
kvferryd and engines each. Links lose, delay and drop packets.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from kvferry.client import LocalDaemon, Lookup, OffloadClient
from kvferry.testing.engine import until
from kvferry.testing.mooncake_store import INSTALL, MooncakeStore, is_installed
from support.daemon_invariants import broken_invariants, check_released
from support.lossy_network import LossyNetwork, missing
from support.patient_daemon import PatientDaemon
from support.tiered_engine import TieredEngine, keys
from support.time_limits import PROMPTLY, TIMEOUT
from support.traffic_processes import TrafficProcesses
from support.traffic_statistics import TrafficOptions, merge_statistics

pytestmark = [
    # Of the long form; each wait has a limit of its own.
    pytest.mark.timeout(7200),
    pytest.mark.skipif(not is_installed(), reason=f"Mooncake: {INSTALL}"),
    pytest.mark.skipif(bool(missing()), reason=missing()),
]
# Limit of every call of a client, also on a busy machine; calls with a deadline have 0.25 s.
CALL_SECONDS = 10.0
# Until a tier is used again after a fault: the breaker's pause, and the store's own recovery.
RECOVERY_SECONDS = 2 * TIMEOUT
RESIDENT = range(16)
# The part of a pool for A and for B; the rest is for the engines of `start_load`.
ENGINE_BYTES, POOL_BYTES = 1 << 20, 4 << 20
# Another program removes what it put before, then puts megabytes into the store. Prints how many
# the store refused for lack of room.
FILL = """
import sys, time
from mooncake.store import MooncakeDistributedStore, ReplicateConfig
host, master, megabytes, kind = sys.argv[1:]
store, config = MooncakeDistributedStore(), ReplicateConfig()
assert store.setup(host, "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", master) == 0
store.remove_by_regex("^other/", True)
config.with_hard_pin = kind == "pinned"
codes = []
for number in range(int(megabytes)):
    codes.append(store.put(f"other/{number}", bytes(1 << 20), config))
    if codes[-1]:  # the master evicts in the background
        time.sleep(0.3)
print(codes.count(-200), flush=True)
store.close()
"""


class Cluster:
    """A Mooncake Store and two daemons on simulated hosts.

    store: on a host of its own. a, b: engines of daemons on two other hosts. daemon: their class.
    """

    def __init__(
        self, stack: ExitStack, segment_bytes: int, daemon: type[LocalDaemon] = PatientDaemon
    ) -> None:
        network = stack.enter_context(LossyNetwork(3))
        self.store_host, *others = network.hosts
        command = self.store_host.command
        self.store = stack.enter_context(
            MooncakeStore(
                segment_bytes=segment_bytes,
                host=self.store_host.address,
                commands=(command, command),
            )
        )
        self.daemons: list[LocalDaemon] = []
        self.engines: list[TieredEngine] = []
        self._engines = ExitStack()
        for host in others:
            with host.entered():
                started = daemon(
                    pool_bytes=POOL_BYTES,
                    tiers_mooncake_master=self.store.address,
                    tiers_mooncake_write="write_through",
                    tiers_mooncake_admit_after=1,
                )
            self.daemons.append(stack.enter_context(started))
            engine = TieredEngine(started, self._engines, cpu_bytes_to_use=ENGINE_BYTES)
            self.engines.append(engine)
        self.a, self.b = self.engines
        stack.callback(self._engines.close)
        for engine in self.engines:
            until(partial(self._is_on, engine), RECOVERY_SECONDS)
        self._new = count(1000, 4)

    def share(self) -> None:
        """Store blocks at A. B must find and load them, with the same bytes."""
        numbers = range(first := next(self._new), first + 4)

        def shared() -> bool:
            self.a.store(numbers)  # those that are absent: once, and if the store lost its epoch
            states = {self.b.manager.lookup(key) for key in keys(numbers)}
            if Lookup.MISS in states:
                self.b.find(numbers)
                time.sleep(0.05)
            return states == {Lookup.HIT} and self.b.load_resident(numbers)

        until(shared, RECOVERY_SECONDS)

    def work(self, seconds: float) -> tuple[float, float]:
        """Store at A, search and load at B, for some seconds.

        Returns the seconds of the longest call, and of the median load from the pool.
        """
        end, longest, loads = time.monotonic() + seconds, 0.0, list[float]()
        while time.monotonic() < end:
            new = range(first := next(self._new), first + 4)
            for call in (
                lambda new=new: self.a.store(new),
                lambda new=new: self.b.find(new),
                self.load_resident,
            ):
                begin = time.monotonic()
                call()
                loads.append(time.monotonic() - begin)
                longest = max(longest, loads[-1])
        return longest, statistics.median(loads[2::3])

    def load_resident(self) -> None:
        """Load from B's pool. If the store has lost its epoch, the pool is empty: store again."""
        if not self.b.load_resident(RESIDENT):
            self.b.store(RESIDENT)

    def fill(self, megabytes: int, kind: str) -> int:
        """Let another program fill the store. Returns how many megabytes were refused."""
        arguments = [self.store_host.address, self.store.address, str(megabytes), kind]
        command = [*self.store_host.command, sys.executable, "-c", FILL, *arguments]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return int(output.split()[-1])

    def drop_writes(self) -> int:
        """Store more at A. Returns how many of its keys were evicted before they were written."""
        self.a.store(range(first := 10_000_000 + 32 * next(self._new), first + 128))
        return self.a.tier().dropped_writes

    def openings(self) -> int:
        return sum(engine.tier().openings for engine in self.engines)

    @staticmethod
    def _is_on(engine: TieredEngine) -> bool:
        return engine.tier().state == "on"

    def close_engines(self) -> None:
        self._engines.close()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_another_host_loads_stored_blocks_until_a_reset(stack: ExitStack) -> None:
    cluster = Cluster(stack, 64 << 20)
    a, b = cluster.a, cluster.b
    a.store(range(64))
    a.wait_written(64)
    b.promote(range(32))
    b.load(range(32))
    a.manager.reset_cache()
    until(lambda: cluster.store.key_count() < 64)  # the reset leaves pointer and marker
    assert b.find(range(32, 64)).prefix == 0
    until(lambda: {b.manager.lookup(key) for key in keys(range(32))} == {Lookup.MISS})
    cluster.share()


def start_load(
    cluster: Cluster, start: Callable[[Path], TrafficProcesses], rng: random.Random
) -> list[TrafficProcesses]:
    """Start an engine at each daemon. Both use the same keys, more than fit into a pool."""
    groups = []
    for number, daemon in enumerate(cluster.daemons, 1):
        groups.append(start(daemon.directory))
        options = TrafficOptions(
            f"engine-{number}",
            number,
            seed=rng.getrandbits(32),
            page=4096,
            model="shared",
            depth=4,
            step_pause=0.01,
            job_timeout=PROMPTLY,
            prefetches=0.3,
        )
        groups[-1].start(options)
    return groups


def test_faults_of_the_store_cost_only_misses(
    stack: ExitStack,
    start_traffic: Callable[[Path], TrafficProcesses],
    rng: random.Random,
    long: bool,
) -> None:
    """Other engines of both hosts store and load meanwhile."""
    cluster = Cluster(stack, 64 << 20, LocalDaemon)
    store, link = cluster.store, cluster.store_host.set_link
    cluster.b.store(RESIDENT)
    until(lambda: {cluster.b.manager.lookup(key) for key in keys(RESIDENT)} == {Lookup.HIT})
    groups = start_load(cluster, start_traffic, rng)
    cluster.share()
    seconds = 20.0 if long else 3.0
    _, usual = cluster.work(seconds)
    print(f"no fault: load from the pool {usual * 1e3:.1f} ms (median)")
    for name, begin, end, fails in (
        ("master killed", store.kill_master, store.start_master, True),
        ("master stopped", store.pause_master, store.resume_master, True),
        ("store killed", store.kill_store, store.start_store, False),
        ("store stopped", store.pause_store, store.resume_store, False),
        ("a third of the packets lost", lambda: link(loss=0.3), link, False),
        ("packets delayed by 0.3 s", lambda: link(delay=0.3), link, True),
        ("packets dropped", lambda: link(blackhole=True), link, True),
    ):
        opened = cluster.openings()
        begin()
        longest, median = cluster.work(seconds)
        if fails:
            until(lambda opened=opened: cluster.work(1.0) and cluster.openings() > opened)  # type: ignore[misc]
        end()
        ended = time.monotonic()
        cluster.share()
        recovery = time.monotonic() - ended
        openings = cluster.openings() - opened
        print(
            f"{name}: longest call {longest:.2f} s, load from the pool {median * 1e3:.1f} ms, "
            f"breakers opened {openings} times, shared again after {recovery:.1f} s"
        )
        assert longest < CALL_SECONDS, name
        assert median < 3 * usual + 0.2, name  # less than a deadline
    total = merge_statistics(traffic.stop() for traffic in groups)
    assert not total.errors, "\n".join(total.errors)
    print(f"other engines: {total.counts['compared']} blocks compared, 0 wrong")
    for daemon in cluster.daemons:
        with OffloadClient(daemon.directory, engine="observer") as observer:
            assert not broken_invariants(observer)
    cluster.close_engines()
    for daemon in cluster.daemons:
        check_released(daemon.directory, RECOVERY_SECONDS)
        _, traceback, text = daemon.log().partition("Traceback")
        assert not traceback, text[:3000]


@pytest.mark.parametrize("kind", ["evictable", "pinned"])
def test_a_full_store_is_not_a_failure(stack: ExitStack, kind: str) -> None:
    """The store evicts, or refuses puts. New blocks are shared as soon as there is room."""
    megabytes = 16
    cluster = Cluster(stack, megabytes << 20)
    cluster.share()
    refused = cluster.fill(2 * megabytes, kind)
    if kind == "evictable":
        assert refused < megabytes  # the rest was evicted
    else:
        assert refused
        dropped = cluster.a.tier().dropped_writes
        until(lambda: cluster.drop_writes() > dropped, RECOVERY_SECONDS)
        cluster.fill(0, kind)
    cluster.share()
    for engine in cluster.engines:
        assert (engine.tier().openings, engine.tier().errors) == (0, 0)
