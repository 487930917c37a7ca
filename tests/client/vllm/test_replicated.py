"""Ranks with the same KV: each block is stored once per host, through vLLM's own scheduler."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kvferry.client import LocalDaemon, OffloadClient
from kvferry.client import namespace as client_namespace
from kvferry.client.vllm import request_state, scheduler_side
from kvferry.proto.status import NamespaceStatus
from kvferry.testing.engine import until
from support.patient_daemon import PatientDaemon
from support.time_limits import TIMEOUT

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

# Of 200 tokens: three chunks each.
PROMPTS = [[(number * 37 + n * 11) % 900 for n in range(200)] for number in range(8)]
CHUNKS = 3 * len(PROMPTS)


@pytest.fixture(scope="module")
def ranks() -> Any:
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    from support import vllm_ranks

    return vllm_ranks


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    monkeypatch.setattr(client_namespace, "SEARCH_TIMEOUT", TIMEOUT)
    monkeypatch.setattr(scheduler_side, "LOOKUP_TIMEOUT", TIMEOUT)
    monkeypatch.setattr(scheduler_side, "MIN_LOOKUP_TIMEOUT", TIMEOUT)
    monkeypatch.setattr(request_state, "SEARCH_SECONDS", TIMEOUT)


@pytest.fixture
def daemons(short_path: Path) -> Iterator[list[LocalDaemon]]:
    """Two daemons that are siblings."""
    with ExitStack() as running:
        folders = [short_path / "0", short_path / "1"]
        directories = ":".join(map(str, folders))
        options = {"siblings_enabled": "true", "siblings_directories": directories}
        options["state_dir"] = str(short_path / "state")
        yield start(running, folders, **options)


def start(running: ExitStack, folders: list[Path], **options: Any) -> list[LocalDaemon]:
    """Daemons in these folders."""
    return [
        running.enter_context(PatientDaemon(pool_bytes=4 << 20, runtime_dir=folder, **options))
        for folder in folders
    ]


def open_core(ranks: Any, daemons: list[LocalDaemon]) -> Any:
    """An engine whose daemons find each other's blocks."""
    core = ranks.RankedCore([daemon.directory for daemon in daemons], host_bytes=4 << 20)
    until(lambda: all(is_linked(daemon) for daemon in daemons))
    return core


def is_linked(daemon: LocalDaemon) -> bool:
    with OffloadClient(daemon.directory, engine="observer") as client:
        siblings = client.status().siblings
        return [each.is_on and each.mapped_bytes > 0 for each in siblings] == [True]


def namespace_of(daemon: LocalDaemon) -> NamespaceStatus:
    with OffloadClient(daemon.directory, engine="observer") as client:
        (namespace,) = client.namespaces()
        return namespace


def test_each_block_is_stored_once_and_loaded_by_all_ranks(
    ranks: Any, daemons: list[LocalDaemon]
) -> None:
    first = open_core(ranks, daemons)
    assert first.run(*PROMPTS) == [0] * len(PROMPTS)
    first.settle()
    until(lambda: sum(map(len, first.stored_keys())) == CHUNKS)
    one, two = first.stored_keys()
    assert one
    assert two
    assert not one & two
    assert sum(namespace_of(daemon).stored for daemon in daemons) == CHUNKS
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
    assert sum(namespace_of(daemon).stored for daemon in daemons) == CHUNKS
    assert not first.wrong + second.wrong
    second.close()


def test_after_a_reset_each_block_is_stored_once_again(
    ranks: Any, daemons: list[LocalDaemon]
) -> None:
    core = open_core(ranks, daemons)
    core.run(*PROMPTS)
    core.settle()
    until(lambda: sum(map(len, core.stored_keys())) == CHUNKS)
    core.scheduler.reset_prefix_cache(reset_connector=True)
    assert core.run(*PROMPTS) == [0] * len(PROMPTS)
    core.run_until(lambda: not core.manager.is_resetting)
    until(lambda: all(is_linked(daemon) for daemon in daemons))
    assert core.scheduler.kv_cache_manager.reset_prefix_cache()
    core.run(*PROMPTS)
    core.settle()
    until(lambda: len(set().union(*core.stored_keys())) == CHUNKS)
    assert not core.wrong
    core.close()


def test_blocks_on_the_disks_of_their_writers_are_loaded_by_all_ranks(
    ranks: Any, short_path: Path
) -> None:
    folders = [short_path / "0", short_path / "1"]

    def start_both(running: ExitStack) -> list[LocalDaemon]:
        directories = ":".join(map(str, folders))
        options = {"siblings_enabled": "true", "siblings_directories": directories}
        options["state_dir"] = str(short_path / "state")
        disk = {"tiers_disk_size": "64MiB", "tiers_disk_write": "write_through"}
        return [
            *start(running, folders[:1], tiers_disk_path=short_path / "disk0", **options, **disk),
            *start(running, folders[1:], tiers_disk_path=short_path / "disk1", **options, **disk),
        ]

    with ExitStack() as running:
        daemons = start_both(running)
        first = open_core(ranks, daemons)
        first.run(*PROMPTS)
        first.settle()
        until(lambda: sum(written_to_disk(daemon) for daemon in daemons) == CHUNKS)
        first.close()
    with ExitStack() as running:
        daemons = start_both(running)
        second = open_core(ranks, daemons)
        until(lambda: all(tiers_are_on(daemon) for daemon in daemons))
        assert second.stored_keys() == [set(), set()]
        assert second.run(*PROMPTS) == [192] * len(PROMPTS)
        assert not first.wrong + second.wrong
        second.close()


def tiers_are_on(daemon: LocalDaemon) -> bool:
    with OffloadClient(daemon.directory, engine="observer") as client:
        return all(tier.is_on for tier in client.status().tiers)


def written_to_disk(daemon: LocalDaemon) -> int:
    with OffloadClient(daemon.directory, engine="observer") as client:
        return sum(tier.written for tier in client.status().tiers)


def test_without_siblings_each_rank_stores_all_blocks(ranks: Any, short_path: Path) -> None:
    with ExitStack() as running:
        daemons = start(running, [short_path / "0", short_path / "1"])
        core = ranks.RankedCore([daemon.directory for daemon in daemons], host_bytes=4 << 20)
        core.run(*PROMPTS)
        core.settle()
        assert [namespace_of(daemon).stored for daemon in daemons] == [CHUNKS] * 2
        core.close()


def test_if_siblings_do_not_find_each_other_each_rank_stores_all_blocks(
    ranks: Any, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the third request on whose blocks a rank has not found; and what the GPU still has."""
    monkeypatch.setattr(request_state, "SEARCH_SECONDS", 0.0)
    with ExitStack() as running:
        folders = [short_path / "a" / "0", short_path / "b" / "1"]
        daemons = start(running, folders, siblings_enabled="true")
        directories = [daemon.directory for daemon in daemons]
        for found in (0, 0, 192):
            core = ranks.RankedCore(directories, host_bytes=4 << 20)
            assert [core.run(prompt)[0] for prompt in PROMPTS] == [found] * len(PROMPTS)
            core.settle()
            assert not core.wrong
            core.close()


@pytest.mark.parametrize("when", ["before", "searching", "loading"])
def test_the_daemon_of_one_rank_dies(ranks: Any, daemons: list[LocalDaemon], when: str) -> None:
    """Before the prompts arrive, or while it should search for or load their blocks."""
    core = open_core(ranks, daemons)
    core.run(*PROMPTS)
    core.settle()
    until(lambda: sum(map(len, core.stored_keys())) == CHUNKS)
    core.close()
    core = open_core(ranks, daemons)
    if when == "loading":
        assert core.run(*PROMPTS) == [192] * len(PROMPTS)
        core.settle()
        assert core.scheduler.kv_cache_manager.reset_prefix_cache()
    if when != "before":
        daemons[1].process.send_signal(signal.SIGSTOP)
        names = [core.add(prompt) for prompt in PROMPTS]
        for _ in range(3):
            core.step()
        if when == "loading":
            assert core.loads_in_flight() == [False, True]
        daemons[1].kill()
        core.run_until(lambda: all(name in core.finished for name in names))
    else:
        daemons[1].kill()
        until(lambda: core.manager.poll() or core.manager.gone is not None)
        assert core.run(*PROMPTS) == [0] * len(PROMPTS)
    assert not core.wrong
    core.close()
