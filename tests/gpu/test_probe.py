"""The probe on a GPU passes in each copy mode, and fails no job of an engine."""

from __future__ import annotations

import time

import pytest

from kvferry.client import LocalDaemon, OffloadClient
from kvferry.proto.status import HealthStatus
from kvferry.testing.engine import StartSmallEngine, until

pytestmark = pytest.mark.gpu


def health_of(client: OffloadClient) -> HealthStatus:
    health = client.status().health
    assert health is not None
    return health


@pytest.mark.parametrize("mode", ["auto", "direct", "staged"])
def test_the_daemon_stays_healthy_beside_jobs(mode: str, start_engine: StartSmallEngine) -> None:
    with LocalDaemon("0", pool_bytes=64 << 20, copy_mode=mode, health_every_seconds=0.05) as daemon:
        engine = start_engine(daemon, device="cuda:0")
        until(lambda: health_of(engine.client).healthy)
        end = time.monotonic() + 2
        while time.monotonic() < end:
            results = engine.finish(engine.store([0, 1], [0, 1]), engine.load([0, 1], [2, 3]))
            assert all(result.success for result in results)
            health = health_of(engine.client)
            assert health.healthy, health.reasons
        status = engine.client.status()
        assert status.errors == {}
        assert status.pool.reserved_bytes == 1 << 20
        assert daemon.log().count("unhealthy") == 0
        engine.close()
