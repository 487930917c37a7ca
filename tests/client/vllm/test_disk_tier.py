"""Prompts come back from disk, through vLLM's own scheduler and a daemon that is new to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvferry.client import LocalDaemon, OffloadClient
from kvferry.client import namespace as client_namespace
from kvferry.client.vllm.request_hints import PREFETCH
from kvferry.proto.status import TierStatus
from kvferry.testing.engine import until
from support.patient_daemon import PatientDaemon
from support.time_limits import TIMEOUT
from support.vllm_stand_ins import prompt

PROMPTS = [prompt(number) for number in range(4)]
Start = Callable[[], LocalDaemon]


def tier_of(daemon: LocalDaemon) -> TierStatus:
    with OffloadClient(daemon.directory, engine="observer") as client:
        (tier,) = client.status().tiers
        return tier


@pytest.fixture
def start_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """start_daemon() -> a daemon with a disk tier, always in the same folder, that is on."""
    monkeypatch.setattr(client_namespace, "SEARCH_TIMEOUT", TIMEOUT)
    options: dict[str, Any] = {"tiers_disk_path": tmp_path / "tier", "tiers_disk_size": "64MiB"}
    options |= {"tiers_disk_write": "write_through", "pool_bytes": 16 << 20}
    with ExitStack() as running:

        def start_one() -> LocalDaemon:
            daemon = running.enter_context(PatientDaemon(**options))
            until(lambda: tier_of(daemon).state == "on")
            return daemon

        yield start_one


def fill(start: Any, daemon: LocalDaemon, groups: tuple[str, ...]) -> None:
    """Store all prompts on disk, and stop the daemon."""
    engine = start(*groups, directory=daemon.directory)
    engine.run(*PROMPTS)
    engine.settle()
    stored = engine.namespace().stored
    engine.close()
    assert stored
    until(lambda: tier_of(daemon).written >= stored)
    daemon.stop()


@pytest.mark.parametrize("groups", [("full",), ("full", "window")])
def test_prompts_are_found_on_disk(
    core: Any, start: Any, start_daemon: Start, groups: tuple[str, ...]
) -> None:
    fill(start, start_daemon(), groups)
    engine = start(*groups, directory=start_daemon().directory)
    core.kvferry_of(
        engine.scheduler.connector
    ).connector_scheduler.manager._lookup_timeout = TIMEOUT
    cached = engine.run(*PROMPTS)
    assert min(cached) >= 128
    if core.compat.DISK_SOURCE is not None:
        assert engine.sources == {"disk": sum(cached)}


def test_a_prefetch_hint_reads_a_prompt_although_computing_it_is_faster(
    core: Any, start: Any, start_daemon: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(start, start_daemon(), ("full",))
    daemon = start_daemon()
    engine = start(directory=daemon.directory)
    rate = core.kvferry_of(engine.scheduler.connector)._prefill_rate
    monkeypatch.setattr(rate, "seconds", lambda tokens: 1e-12 * tokens)
    assert engine.run(PROMPTS[0]) == [0]
    assert tier_of(daemon).skipped == 3
    name = engine.add(PROMPTS[1], **{PREFETCH: {}})
    engine.run_until(lambda: name in engine.finished)
    assert engine.finished[name] == 192
    assert tier_of(daemon).skipped == 3
