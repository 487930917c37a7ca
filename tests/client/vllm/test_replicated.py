"""Ranks with the same KV: each block is stored once per host, through vLLM's own scheduler."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvferry.client import LocalDaemon, OffloadClient
from kvferry.client import namespace as client_namespace
from kvferry.client.vllm import request_state, scheduler_side
from kvferry.proto.status import DaemonStatus
from kvferry.testing.engine import until
from support.patient_daemon import PatientDaemon
from support.time_limits import TIMEOUT
from support.vllm_stand_ins import prompt

# Three chunks each.
PROMPTS = [prompt(number) for number in range(8)]
CHUNKS = 3 * len(PROMPTS)


@pytest.fixture
def ranks(core: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of engines with two ranks, which wait for answers of busy daemons."""
    from support import vllm_ranks

    monkeypatch.setattr(client_namespace, "SEARCH_TIMEOUT", TIMEOUT)
    monkeypatch.setattr(scheduler_side, "LOOKUP_TIMEOUT", TIMEOUT)
    monkeypatch.setattr(scheduler_side, "MIN_LOOKUP_TIMEOUT", TIMEOUT)
    monkeypatch.setattr(request_state, "SEARCH_SECONDS", TIMEOUT)
    return vllm_ranks


@contextmanager
def siblings(folder: Path, **options: Any) -> Iterator[list[LocalDaemon]]:
    """Two daemons that lend each other blocks. Each has a disk if there are options of one."""
    folders = [folder / "0", folder / "1"]
    options |= {"siblings_enabled": "true", "siblings_directories": ":".join(map(str, folders))}
    with ExitStack() as running:
        daemons = []
        for each in folders:
            if "tiers_disk_size" in options:
                options["tiers_disk_path"] = folder / f"disk of {each.name}"
            options |= {"runtime_dir": each, "state_dir": str(folder / "state")}
            daemons.append(running.enter_context(PatientDaemon(pool_bytes=4 << 20, **options)))
        yield daemons


@pytest.fixture
def daemons(short_path: Path) -> Iterator[list[LocalDaemon]]:
    with siblings(short_path) as running:
        yield running


def open_core(ranks: Any, daemons: list[LocalDaemon]) -> Any:
    """An engine whose daemons find each other's blocks."""
    core = ranks.RankedCore([daemon.directory for daemon in daemons], host_bytes=4 << 20)
    until(lambda: all(is_linked(daemon) for daemon in daemons))
    return core


def status_of(daemon: LocalDaemon) -> DaemonStatus:
    with OffloadClient(daemon.directory, engine="observer") as client:
        return client.status()


def is_linked(daemon: LocalDaemon) -> bool:
    return [one.is_on and one.mapped_bytes > 0 for one in status_of(daemon).siblings] == [True]


def stored(daemons: list[LocalDaemon]) -> list[int]:
    """The host blocks that each daemon has stored."""
    found = []
    for daemon in daemons:
        with OffloadClient(daemon.directory, engine="observer") as client:
            found += [namespace.stored for namespace in client.namespaces()]
    return found


def store_all(core: Any) -> None:
    core.run(*PROMPTS)
    core.settle()
    until(lambda: sum(map(len, core.stored_keys())) == CHUNKS)


def test_each_block_is_stored_once_and_loaded_by_all_ranks(
    ranks: Any, daemons: list[LocalDaemon]
) -> None:
    first = open_core(ranks, daemons)
    store_all(first)
    one, two = first.stored_keys()
    assert one
    assert two
    assert not one & two
    assert sum(stored(daemons)) == CHUNKS
    # What the GPU has is offered again, and not stored again.
    first.run(*PROMPTS)
    first.settle()
    assert first.stored_keys() == [one, two]
    first.close()

    second = open_core(ranks, daemons)
    assert second.run(*PROMPTS) == [192] * len(PROMPTS)
    assert second.stored_keys() == [one | two] * 2
    assert second.loaded == CHUNKS
    second.settle()
    assert sum(stored(daemons)) == CHUNKS
    # After a reset as well.
    second.scheduler.reset_prefix_cache(reset_connector=True)
    assert second.run(*PROMPTS) == [0] * len(PROMPTS)
    second.run_until(lambda: not second.manager.is_resetting)
    until(lambda: all(is_linked(daemon) for daemon in daemons))
    second.run_anew(*PROMPTS)
    second.settle()
    until(lambda: len(set().union(*second.stored_keys())) == CHUNKS)
    assert not first.wrong + second.wrong
    second.close()


def test_blocks_on_the_disks_of_their_writers_are_loaded_by_all_ranks(
    ranks: Any, short_path: Path
) -> None:
    disk = {"tiers_disk_size": "64MiB", "tiers_disk_write": "write_through"}
    with siblings(short_path, **disk) as daemons:
        first = open_core(ranks, daemons)
        store_all(first)
        until(lambda: sum(t.written for one in daemons for t in status_of(one).tiers) == CHUNKS)
        first.close()
    with siblings(short_path, **disk) as daemons:
        second = open_core(ranks, daemons)
        until(lambda: all(tier.is_on for one in daemons for tier in status_of(one).tiers))
        assert second.stored_keys() == [set(), set()]
        assert second.run(*PROMPTS) == [192] * len(PROMPTS)
        assert not first.wrong + second.wrong
        second.close()


@pytest.mark.parametrize("when", ["searching", "loading"])
def test_the_daemon_of_one_rank_dies(ranks: Any, daemons: list[LocalDaemon], when: str) -> None:
    """While it should search for or load the blocks of prompts."""
    core = open_core(ranks, daemons)
    store_all(core)
    core.close()
    core = open_core(ranks, daemons)
    if when == "loading":
        assert core.run(*PROMPTS) == [192] * len(PROMPTS)
        core.settle()
        assert core.scheduler.kv_cache_manager.reset_prefix_cache()
    daemons[1].process.send_signal(signal.SIGSTOP)
    names = [core.add(prompt) for prompt in PROMPTS]
    for _ in range(3):
        core.step()
    if when == "loading":
        assert core.loads_in_flight() == [False, True]
    daemons[1].kill()
    core.run_until(lambda: all(name in core.finished for name in names))
    assert not core.wrong
    core.close()
