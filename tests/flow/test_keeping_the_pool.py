"""Which starts of a daemon keep the pool of the previous daemon, and which drop it."""

from __future__ import annotations

import pytest
import torch

from kvferry.client import (
    Lookup,
)
from kvferry.testing.engine import until
from support.restarting_fixture import (
    RestartedService,
    keys,
)

from .block_tables import await_committed


@pytest.fixture
def stored(restarted_service: RestartedService) -> RestartedService:
    """A daemon with a stored key."""
    with restarted_service.engine() as engine:
        engine.fill(range(2), seed=1)
        assert engine.store([0, 1], keys(1)).success
        await_committed(restarted_service.manager, 1)
    return restarted_service


def test_a_pool_of_another_size_starts_empty_and_logs_it(stored: RestartedService) -> None:
    stored.restart(pool_bytes=8 << 20)
    assert "kept pool dropped" in stored.manager.log()
    with stored.engine() as engine:
        assert not engine.opened.reattached
        assert engine.lookup(1) == [Lookup.MISS]


def test_a_pool_is_dropped_and_not_kept_if_pool_keep_is_false(stored: RestartedService) -> None:
    stored.restart(pool_keep="false")
    until(lambda: stored.manager.names == [])
    with stored.engine() as engine:
        assert engine.lookup(1) == [Lookup.MISS]
        assert engine.store([0, 1], keys(1)).success
    assert stored.manager.names == []


BAD_OPTIONS: list[dict[str, object]] = [
    {"pool_bytes": 100 << 40, "pool_chunk": 1 << 40},  # larger than memory
    {"pool_bytes": 1 << 47, "pool_chunk": 1 << 46, "pool_check_memory": 0},  # cannot be mapped
    {"metrics_listen": "nowhere", "pool_bytes": 8 << 20},
    {"events_publish": "tcp://nowhere", "pool_keep": 0},
]
# A daemon that cannot allocate copy.staging, which it does last.
NO_DEVICE_MEMORY = """
from kvferry.daemon import app
from kvferry.daemon.engine.reference import ReferenceEngine
from kvferry.proto.errors import Code, Failed

def attach(*_):
    raise Failed(Code.COPY_FAILED, "no memory for copy.staging")

ReferenceEngine.attach = attach
app.main()
"""


def test_refused_and_failed_starts_keep_the_pool(stored: RestartedService) -> None:
    """A start with valid options finds the cache again."""
    manager = stored.manager
    names = manager.names
    for options in BAD_OPTIONS:
        assert stored.start_refused(**options) == 2, manager.log()
        assert manager.names == names
    manager.command = stored.command(pool_bytes=8 << 20)
    manager.command[1:3] = ["-c", NO_DEVICE_MEMORY]
    manager.start(ready=False)
    assert manager.wait_dead() == 1
    until(lambda: any(s.startswith("failed: ") for s in manager.values("STATUS")))
    assert manager.names == names
    stored.start_as_before()
    with stored.engine() as engine:
        assert engine.opened.reattached
        engine.await_verified()
        content = engine.fill([0, 1], seed=1)
        assert engine.load(keys(1), [8, 9]).success
        assert torch.equal(engine.read([8, 9]), content)
