"""Which starts of a daemon keep the pool of the previous daemon, and which drop it."""

from __future__ import annotations

from pathlib import Path

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


@pytest.mark.parametrize("option", ["pool_bytes", "pool_chunk"])
def test_a_pool_of_another_size_starts_empty_and_logs_it(
    restarted_service: RestartedService, option: str
) -> None:
    with restarted_service.engine() as engine:
        assert engine.store([0, 1], keys(1)).success
        await_committed(restarted_service.manager, 1)
    restarted_service.restart(**{option: 8 << 20})
    assert "kept pool dropped" in restarted_service.manager.log()
    with restarted_service.engine() as engine:
        assert not engine.opened.reattached
        assert engine.lookup(1) == [Lookup.MISS]
        assert engine.store([0, 1], keys(1)).success
        await_committed(restarted_service.manager, 1)
    restarted_service.restart(**{option: 8 << 20})
    with restarted_service.engine() as engine:
        until(lambda: engine.lookup(1) == [Lookup.HIT])


BAD_OPTIONS: dict[str, dict[str, object]] = {
    "a pool larger than memory": {"pool_bytes": 100 << 40, "pool_chunk": 1 << 40},
    "more chunks than descriptors": {"pool_chunk": 4096, "pool_bytes": 1 << 36, "check": False},
    "a pool that cannot be mapped": {"pool_bytes": 1 << 47, "pool_chunk": 1 << 46, "check": False},
    "an invalid address for metrics": {"metrics_listen": "nowhere"},
    "an invalid address for metrics, with another pool": {
        "metrics_listen": "nowhere",
        "pool_bytes": 8 << 20,
    },
    "an invalid address for events, with pool.keep off": {
        "events_publish": "tcp://nowhere",
        "pool_keep": 0,
    },
}


@pytest.mark.parametrize("option", BAD_OPTIONS)
def test_a_refused_start_keeps_the_pool(restarted_service: RestartedService, option: str) -> None:
    """A start with valid options finds the cache again."""
    with restarted_service.engine() as engine:
        content = engine.fill(range(2), seed=1)
        assert engine.store([0, 1], keys(1)).success
        await_committed(restarted_service.manager, 1)
    names = restarted_service.manager.names
    options = BAD_OPTIONS[option].copy()
    if not options.pop("check", True):
        options["pool_check_memory"] = 0
    assert restarted_service.start_refused(**options) == 2, restarted_service.manager.log()
    assert restarted_service.manager.names == names
    restarted_service.start_as_before()
    with restarted_service.engine() as engine:
        assert engine.opened.reattached
        engine.await_verified()
        assert engine.load(keys(1), [8, 9]).success
        assert torch.equal(engine.read([8, 9]), content)


NO_DEVICE_MEMORY = """
from kvferry.daemon import app
from kvferry.daemon.engine.reference import ReferenceEngine
from kvferry.proto.errors import Code, Failed

def attach(*_):
    raise Failed(Code.COPY_FAILED, "no memory for copy.staging")

ReferenceEngine.attach = attach
app.main()
"""


def test_a_start_that_fails_on_the_device_keeps_the_pool(
    restarted_service: RestartedService,
) -> None:
    """The daemon allocates copy.staging last. The failed start has another pool size, too."""
    with restarted_service.engine() as engine:
        assert engine.store([0, 1], keys(1)).success
        await_committed(restarted_service.manager, 1)
    restarted_service.manager.kill()
    names = restarted_service.manager.names
    restarted_service.manager.command = restarted_service.command(pool_bytes=8 << 20)
    restarted_service.manager.command[1:3] = ["-c", NO_DEVICE_MEMORY]
    restarted_service.manager.start(ready=False)
    assert restarted_service.manager.wait_dead() == 1
    until(lambda: any(s.startswith("failed: ") for s in restarted_service.manager.values("STATUS")))
    assert restarted_service.manager.names == names
    restarted_service.start_as_before()
    with restarted_service.engine() as engine:
        until(lambda: engine.lookup(1) == [Lookup.HIT])


def test_a_refused_first_start_stores_nothing(tmp_path: Path) -> None:
    restarted_service = RestartedService(tmp_path)
    with restarted_service.manager:
        assert restarted_service.start_refused(events_publish="tcp://nowhere") == 2, (
            restarted_service.manager.log()
        )
        assert restarted_service.manager.names == []


@pytest.mark.parametrize(("at", "data"), [(0, b"kvferry0"), (4096 + 12, b"\xff\xff\xff")])
def test_a_block_table_that_is_damaged_or_of_another_version_is_dropped(
    restarted_service: RestartedService, at: int, data: bytes
) -> None:
    with restarted_service.engine() as engine:
        assert engine.store([0, 1], keys(1)).success
        await_committed(restarted_service.manager, 1)
    restarted_service.manager.kill()
    (name,) = [name for name in restarted_service.manager.names if name.startswith("block-table-")]
    for offset in (at, at + (1 << 20) if at else at):  # the record has two copies
        restarted_service.overwrite(name, offset, data)
    restarted_service.start()
    assert "block table dropped" in restarted_service.manager.log()
    until(lambda: name not in restarted_service.manager.names)
    with restarted_service.engine() as engine:
        assert not engine.opened.reattached
        assert engine.lookup(1) == [Lookup.MISS]


def test_pool_keep_false_stores_nothing(tmp_path: Path) -> None:
    restarted_service = RestartedService(tmp_path, pool_keep="false")
    with restarted_service.manager:
        restarted_service.start()
        with restarted_service.engine() as engine:
            assert engine.store([0, 1], keys(1)).success
        assert restarted_service.manager.names == []


def test_a_kept_pool_is_dropped_if_pool_keep_is_false(restarted_service: RestartedService) -> None:
    with restarted_service.engine() as engine:
        assert engine.store([0, 1], keys(1)).success
        await_committed(restarted_service.manager, 1)
    restarted_service.restart(pool_keep="false")
    until(lambda: restarted_service.manager.names == [])
    with restarted_service.engine() as engine:
        assert engine.lookup(1) == [Lookup.MISS]
