"""Prompts come back from disk, through vLLM's own scheduler and a daemon that is new to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvferry.client import LocalDaemon, OffloadClient
from kvferry.client import namespace as client_namespace
from kvferry.proto.status import TierStatus
from kvferry.testing.engine import until
from support.patient_daemon import PatientDaemon
from support.time_limits import TIMEOUT

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

PROMPTS = [[(number * 37 + n * 11) % 900 for n in range(200)] for number in range(4)]


Start = Callable[..., LocalDaemon]


def tier_of(daemon: LocalDaemon) -> TierStatus:
    with OffloadClient(daemon.directory, engine="observer") as client:
        (tier,) = client.status().tiers
        return tier


@pytest.fixture
def start() -> Iterator[Start]:
    """start(folder, **options) -> a daemon with a disk tier in this folder."""
    with ExitStack() as running:

        def with_tier(folder: Path, **options: Any) -> LocalDaemon:
            given = {"tiers_disk_path": folder / "tier", "tiers_disk_size": "64MiB", **options}
            return running.enter_context(PatientDaemon(pool_bytes=16 << 20, **given))

        yield with_tier


@pytest.mark.parametrize("groups", [("full",), ("full", "window")])
def test_prompts_are_found_on_disk(
    core: Any,
    start: Start,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    groups: tuple[str, ...],
) -> None:
    from kvferry.client.vllm import compat

    monkeypatch.setenv("PYTHONHASHSEED", "0")
    monkeypatch.setattr(client_namespace, "SEARCH_TIMEOUT", TIMEOUT)
    daemon = start(tmp_path, tiers_disk_write="write_through")
    first = core.EngineCore(daemon.directory, groups)
    first.run(*PROMPTS)
    first.settle()
    first.close()
    with OffloadClient(daemon.directory, engine="observer") as client:
        stored = sum(namespace.stored for namespace in client.namespaces())
    assert stored
    until(lambda: tier_of(daemon).written >= stored)
    daemon.stop()

    other = start(tmp_path)
    until(lambda: tier_of(other).state == "on")
    second = core.EngineCore(other.directory, groups)
    core.kvferry_of(
        second.scheduler.connector
    ).connector_scheduler.manager._lookup_timeout = TIMEOUT
    cached = second.run(*PROMPTS)
    assert min(cached) >= 128
    if compat.DISK_SOURCE is not None:
        assert second.sources == {"disk": sum(cached)}
    assert not first.wrong + second.wrong
    second.close()
