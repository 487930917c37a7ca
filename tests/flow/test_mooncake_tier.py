"""Two daemons with one Mooncake Store: what one engine computes, the other's daemon finds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from kvferry.client import LocalDaemon
from kvferry.testing.engine import until
from kvferry.testing.mooncake_store import MooncakeStore, is_installed
from support.patient_daemon import PatientDaemon
from support.tiered_engine import PAGE, SECONDS, TieredEngine

pytestmark = pytest.mark.skipif(
    not is_installed(), reason="MOONCAKE IS NOT TESTED: install mooncake-transfer-engine-non-cuda"
)


@pytest.fixture
def store() -> Iterator[MooncakeStore]:
    with MooncakeStore(segment_bytes=64 << 20) as store:
        yield store


Enter = Callable[[type[LocalDaemon]], TieredEngine]


@pytest.fixture
def enter(store: MooncakeStore) -> Iterator[Enter]:
    """enter(kind of daemon) -> an engine of a daemon of its own, with the store as its tier. The
    daemon has 32 host blocks for it.
    """
    with ExitStack() as stack:

        def engine(kind: type[LocalDaemon]) -> TieredEngine:
            daemon = kind(
                pool_bytes=1 << 20,
                tier_mooncake=store.address,
                tier_mooncake_write="write_through",
                tier_mooncake_admit_after=1,
            )
            stack.enter_context(daemon)
            made = TieredEngine(daemon, stack, cpu_bytes_to_use=32 * PAGE)
            until(lambda: made.tier().state == "on", SECONDS)
            return made

        yield engine


def test_what_one_daemon_stores_the_other_loads_until_one_resets(enter: Enter) -> None:
    here, there = enter(PatientDaemon), enter(PatientDaemon)
    here.store(range(16))
    here.wait_written(16)
    there.promote(range(16))
    there.load(range(16))  # compares the bytes
    tier = there.tier()
    assert (tier.name, tier.promoted, tier.written) == ("mooncake", 16, 0)
    assert (tier.checksum_failures, tier.errors) == (0, 0)
    here.client.reset()
    there.store(range(100, 132))  # evicts them
    assert there.find(range(16)).prefix == 0
    here.store(range(4))
    here.wait_written(20)
    there.promote(range(4))
    there.load(range(4))


def test_a_store_that_does_not_answer_costs_an_engine_only_what_it_has(
    store: MooncakeStore, enter: Enter
) -> None:
    engine = enter(LocalDaemon)
    store.pause_master()
    seconds = list[float]()
    for number in range(40):
        engine.store([number])
        begin = time.monotonic()
        assert engine.find([number, number + 1]).prefix == 1
        seconds.append(time.monotonic() - begin)
        engine.load([number])
    # The library gives up after a second, a lookup earlier; then the tier is off.
    assert statistics.median(seconds) < 0.5
    assert engine.tier().state != "on"
    store.resume_master()
    until(lambda: engine.tier().state == "on", SECONDS)
    store.wait_until_mounted()
    engine.store(range(100, 104))
    engine.wait_written(1)
