"""Short forms of `make soak` and `make load`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvferry.client import LocalDaemon
from support import load
from support.soak import SoakOptions, soak

pytestmark = pytest.mark.timeout(300)


def test_soak(device: str, seed: int) -> None:
    """The tier becomes full; the pool above it is smaller."""
    options = SoakOptions(
        30.0, faults=0.7, tier_bytes=16 << 20, pool_bytes=14 << 20, device=device, seed=seed
    )
    verdict = soak(options, print)
    print(verdict.record())
    assert not verdict.errors, "\n".join(verdict.errors)
    assert verdict.statistics.counts["compared"] > 0
    assert sum(verdict.faults.values()) > 0
    assert verdict.tier["written"] > 0
    assert verdict.tier["promoted"] > 0


def test_load(start_daemon: Callable[..., LocalDaemon], device: str) -> None:
    """64 clients: nothing is dropped, and each job has a result. Speed is not checked."""
    options = load.LoadOptions(rate=1000.0, seconds=4.0, device=device, drain_seconds=60)
    total = load.run(start_daemon().directory, options)
    print(load.record(options, total))
    assert not total.errors, "\n".join(total.errors)
    assert total.counts["done"] == total.counts["offered"] > 1000
