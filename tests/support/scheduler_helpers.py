"""Scheduler sides of a vLLM connector, and short functions for their tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from kvferry.client import KVFerryError, OffloadClient
from kvferry.client.vllm.scheduler_side import SchedulerSide
from kvferry.proto.keys import Lookup
from support.time_limits import TIMEOUT
from support.vllm_stand_ins import engine_config_at, request, wait_connected

A, B, C, D = b"a" * 8, b"b" * 8, b"c" * 8, b"d" * 8
LOOKUP_CODES = {
    Lookup.HIT: "hit",
    Lookup.MISS: "miss",
    Lookup.HIT_PENDING: "pending",
    Lookup.RETRY: "retry",
}


def open_side(daemon: Any, **options: Any) -> SchedulerSide:
    """A scheduler's side that is connected. options: `events`, and of engine_config_at."""
    events = options.pop("events", False)
    config = engine_config_at(daemon.directory, **options)
    side = SchedulerSide(config, LOOKUP_CODES, events=events)
    wait_connected(side._manager)
    return side


def answers(side: SchedulerSide, *keys: bytes, name: str = "request") -> list[str]:
    side.begin_lookups(name)
    return [side.lookup(key, request(name)) for key in keys]


def until(condition: Callable[[], bool], side: SchedulerSide) -> None:
    """Let the scheduler's side run until then. A failure shows the daemon's status."""
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not met within {TIMEOUT} s; {_describe_daemon(side)}")
        side.on_schedule_end()
        time.sleep(0.01)


def _describe_daemon(side: SchedulerSide) -> str:
    (directory,) = side._config.directories
    try:
        with OffloadClient(directory, engine="observer") as client:
            return f"{client.status()}, {client.namespaces()}"
    except KVFerryError as error:
        return f"the daemon has no status: {error}"
