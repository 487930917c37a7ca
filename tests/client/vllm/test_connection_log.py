"""What vLLM's log says of the connection. No vLLM needed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.client import Code, Gone
from kvferry.client.engines.connection_log import ConnectionLog
from kvferry.client.vllm.engine_config import EngineConfig
from kvferry.client.vllm.scheduler_side import KeysSpec, SchedulerSide
from kvferry.client.vllm.vllm_log import vllm_log
from kvferry.client.vllm.worker_side import WorkerSide
from kvferry.testing.plugin import StartKvferryd
from support.scheduler_helpers import LOOKUP_CODES
from support.vllm_stand_ins import (
    engine_config_at,
    finished,
    gpu_blocks,
    kv_caches,
    open_worker,
)

A, B = b"a" * 8, b"b" * 8


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Returns the messages since the last call, as vLLM's log shows them."""
    caplog.set_level(logging.INFO, "vllm.kvferry")

    def messages() -> list[str]:
        lines = [f"{one.levelname} {one.getMessage()}" for one in caplog.records]
        caplog.clear()
        return lines

    return messages


def client(number: int = 0, blocks: int = 1000, shortfall: str = "", **opened: Any) -> Any:
    """Of the daemon with this number. opened: what differs in the namespace that it opened."""
    values = {"num_blocks": blocks, "name": "aaaa", "policy": "lru", "tiers": ()} | opened
    return SimpleNamespace(
        incarnation=1,
        directory=f"/run/kvferry/GPU-{number}",
        daemon=SimpleNamespace(device=SimpleNamespace(name="NVIDIA H100")),
        namespace=SimpleNamespace(
            opened=SimpleNamespace(**values), host_bytes=blocks << 21, shortfall=shortfall
        ),
    )


def manager(*clients: Any, writers: int = 1, gone: Any = None) -> Any:
    return SimpleNamespace(clients=clients, gone=gone, writers=SimpleNamespace(count=writers))


def log_of(*chunk_tokens: int) -> ConnectionLog:
    return ConnectionLog(vllm_log, chunk_tokens, ("store auto",))


@pytest.mark.parametrize(
    ("clients", "writers", "tokens", "parts"),
    [
        ([client()], 1, (64,), ["1.95 GiB of host memory, 64,000 tokens, namespace aaaa"]),
        ([client()], 1, (64, 64), ["at least 32,000 tokens"]),
        ([client()], 1, (256, 64, 4), ["at least 3,710 tokens"]),
        ([client(0), client(1, 500)], 1, (16,), ["2.93 GiB", " 8,000 tokens"]),
        ([client(0), client(1, 500)], 2, (16,), ["2.93 GiB", " 24,000 tokens"]),
        ([client()], 1, (64,), ["policy lru, store auto, siblings disabled, tiers: none"]),
        (
            [client(tiers=("siblings", "disk"), policy="arc")],
            1,
            (64,),
            ["policy arc, store auto, siblings enabled, tiers: disk"],
        ),
        ([client(7)], 1, (64,), [", daemon /run/kvferry/GPU-7 (NVIDIA H100)"]),
        ([client(0), client(1)], 1, (64,), [", daemons /run/kvferry/GPU-0 (NV", "GPU-1 (NV"]),
    ],
)
def test_the_start_says_what_the_engine_got(
    said: Callable[[], list[str]],
    clients: list[Any],
    writers: int,
    tokens: tuple[int, ...],
    parts: list[str],
) -> None:
    log_of(*tokens).update(manager(*clients, writers=writers))
    (line,) = said()
    assert line.startswith("INFO kvferry: ")
    for part in parts:
        assert part in line


def test_less_memory_than_asked_for_is_a_warning(said: Callable[[], list[str]]) -> None:
    log_of(64).update(manager(client(shortfall="another namespace has 2 GiB; stop it")))
    summary, warning = said()
    assert summary.startswith("INFO")
    assert warning.startswith("WARNING kvferry: less host memory")
    assert warning.endswith("/run/kvferry/GPU-0: another namespace has 2 GiB; stop it")


def test_a_reconnect_is_logged_if_it_changes_something(said: Callable[[], list[str]]) -> None:
    log, one = log_of(64), client()
    log.update(manager(one, gone="not connected yet"))
    assert not said()
    log.update(manager(one))
    assert len(said()) == 1
    log.update(manager(one))
    one.incarnation = 2
    log.update(manager(one))
    assert not said()
    one.incarnation, one.namespace.opened.num_blocks = 3, 500
    log.update(manager(one))
    assert "32,000 tokens" in said()[0]


# Without a daemon


def scheduler(config: EngineConfig) -> Any:
    return SchedulerSide(config, LOOKUP_CODES, events=False)


def worker(config: EngineConfig) -> Any:
    return WorkerSide(config, kv_caches())


@pytest.mark.parametrize("start", [scheduler, worker])
def test_an_absent_daemon_is_waited_for_while_the_engine_runs(
    said: Callable[[], list[str]], start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(*_: object) -> Path:
        raise Gone(Code.DAEMON_GONE, "no daemon")

    monkeypatch.setattr(EngineConfig, "find_daemon", find)
    start(engine_config_at("unused")).shutdown()
    (line,) = [line for line in said() if "for now" in line]
    assert line.startswith(f"WARNING kvferry: the {start.__name__} continues without its daemon")


@pytest.mark.parametrize("start", [scheduler, worker])
def test_a_refusal_is_not_an_absence(
    start_kvferryd: StartKvferryd, said: Callable[[], list[str]], start: Any
) -> None:
    """It is logged when the engine starts, also if that stays idle."""
    daemon = start_kvferryd()
    start(engine_config_at(daemon.directory, cpu_bytes_to_use=1 << 40)).shutdown()
    lines = said()
    assert not [line for line in lines if "for now" in line]
    (line,) = [line for line in lines if "pool_full" in line]
    assert "; request less host memory" in line


# Loads


def test_the_first_load_is_logged(
    start_kvferryd: StartKvferryd, said: Callable[[], list[str]]
) -> None:
    side = open_worker(start_kvferryd())
    side.load(1, KeysSpec((A,)), gpu_blocks(1))  # fails: it was not stored
    side.store(2, gpu_blocks(1, 2), KeysSpec((A, B)))
    assert len(finished(side, 2)) == 2
    assert not [line for line in said() if "first load" in line]
    for job_id in (3, 4):
        side.load(job_id, KeysSpec((A, B)), gpu_blocks(3, 4))
    assert len(finished(side, 2)) == 2
    (line,) = [line for line in said() if "first load" in line]
    assert line.startswith("INFO kvferry: first load from host memory: 8 KiB in ")
    side.shutdown()
