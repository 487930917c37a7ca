"""Two hosts share a Mooncake Store, and whatever happens to it costs misses only.

Three network namespaces: a host with a mooncake_master and a store process, and two hosts with a
kvferryd and an engine each. Links lose, delay and swallow packets.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from itertools import count

import pytest

from kvferry.client import LocalDaemon, Lookup, OffloadClient
from kvferry.testing.engine import until
from kvferry.testing.mooncake_store import MooncakeStore, is_installed
from support.daemon_invariants import broken_invariants, check_all_gone
from support.lossy_network import LossyNetwork, missing
from support.tiered_engine import PAGE, TieredEngine, keys

pytestmark = [
    pytest.mark.skipif(not is_installed(), reason="Mooncake: pip install 'kvferry[mooncake]'"),
    pytest.mark.skipif(bool(missing()), reason=missing()),
]
# No call of a client takes longer, also on a busy machine: those with a deadline have 0.25 s.
CALL_SECONDS = 5.0
# Until a tier is used again after a fault: the breaker's pause, and the store's own recovery.
RECOVERY_SECONDS = 90.0
RESIDENT = range(16)


class Cluster:
    """store: on a host of its own. a, b: engines of daemons on two other hosts."""

    def __init__(self, stack: ExitStack, segment_bytes: int) -> None:
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
                daemon = LocalDaemon(
                    pool_bytes=1 << 20,
                    tier_mooncake=self.store.address,
                    tier_mooncake_write="write_through",
                    tier_mooncake_admit_after=1,
                )
            self.daemons.append(stack.enter_context(daemon))
            self.engines.append(TieredEngine(daemon, self._engines))
        self.a, self.b = self.engines
        stack.callback(self._engines.close)
        for engine in self.engines:
            until(partial(self._is_on, engine), RECOVERY_SECONDS)
        self._new = count(1000, 4)

    def share(self) -> None:
        """What A stores now, B finds and loads, byte for byte."""
        numbers = range(first := next(self._new), first + 4)
        self.a.store(numbers)

        def resident() -> bool:
            states = {self.b.manager.lookup(key) for key in keys(numbers)}
            if Lookup.MISS in states:
                self.b.find(numbers)
                time.sleep(0.05)
            return states == {Lookup.HIT}

        until(resident, RECOVERY_SECONDS)
        self.b.load(numbers)

    def work(self, seconds: float) -> float:
        """Store at A, search and load at B, all the time. Returns the longest call in seconds."""
        end, longest = time.monotonic() + seconds, 0.0
        while time.monotonic() < end:
            new = range(first := next(self._new), first + 4)
            for call in (
                lambda new=new: self.a.store(new),
                lambda new=new: self.b.find(new),
                lambda: self.b.load(RESIDENT),
            ):
                begin = time.monotonic()
                call()
                longest = max(longest, time.monotonic() - begin)
        return longest

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


def test_what_one_host_stores_another_loads_until_it_is_reset(stack: ExitStack) -> None:
    cluster = Cluster(stack, 64 << 20)
    a, b = cluster.a, cluster.b
    a.store(range(64))
    a.wait_written(64)
    b.promote(range(32))
    b.load(range(32))
    a.manager.reset_cache()
    until(lambda: cluster.store.key_count() < 64)  # a marker is left
    assert b.find(range(32, 64)).prefix == 0
    cluster.share()


def test_no_fault_of_the_store_costs_more_than_misses(stack: ExitStack, long: bool) -> None:
    cluster = Cluster(stack, 64 << 20)
    store, link = cluster.store, cluster.store_host.set_link
    cluster.b.store(RESIDENT)
    until(lambda: {cluster.b.manager.lookup(key) for key in keys(RESIDENT)} == {Lookup.HIT})
    cluster.share()
    for name, begin, end, fails in (
        ("master killed", store.kill_master, store.start_master, True),
        ("master stopped", store.pause_master, store.resume_master, True),
        ("store killed", store.kill_store, store.start_store, False),
        ("store stopped", store.pause_store, store.resume_store, False),
        ("a third of the packets lost", lambda: link(loss=0.3), link, False),
        ("packets delayed by 0.3 s", lambda: link(delay=0.3), link, True),
        ("packets swallowed", lambda: link(blackhole=True), link, True),
    ):
        opened = cluster.openings()
        begin()
        longest = cluster.work(20.0 if long else 3.0)
        end()
        healed = time.monotonic()
        cluster.share()
        recovery = time.monotonic() - healed
        openings = cluster.openings() - opened
        print(f"{name}: longest call {longest:.2f} s, {openings} openings, healed {recovery:.1f} s")
        assert longest < CALL_SECONDS, name
        assert openings > 0 or not fails, f"{name}: the breaker stayed closed"
    for daemon in cluster.daemons:
        with OffloadClient(daemon.directory, engine="observer") as observer:
            assert not broken_invariants(observer)
    cluster.close_engines()
    for daemon in cluster.daemons:
        check_all_gone(daemon.directory, RECOVERY_SECONDS)


def test_a_full_store_forgets_old_blocks_only(stack: ExitStack) -> None:
    """More is stored than it can hold."""
    cluster = Cluster(stack, 16 << 20)
    blocks = 2 * (16 << 20) // PAGE
    for first in range(10_000, 10_000 + blocks, 128):
        cluster.a.store(range(first, first + 128))
    cluster.share()
