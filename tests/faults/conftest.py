"""Fixtures of the tests with faults: length, random numbers, daemons and engines."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvferry.client import LocalDaemon
from support.traffic_processes import TrafficProcesses

POOL_BYTES = 32 << 20


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    number = int(request.config.option.seed)
    print(f"--seed {number}")  # pytest shows it if the test fails
    return number


@pytest.fixture
def rng(seed: int) -> random.Random:
    return random.Random(seed)


@pytest.fixture
def start_daemon(device: str, short_path: Path) -> Iterator[Callable[..., LocalDaemon]]:
    """start_daemon(**options) -> a daemon of the device, always in the same directory."""
    name = "0" if device.startswith("cuda") else device
    with ExitStack() as running:

        def start(**options: Any) -> LocalDaemon:
            chosen: dict[str, Any] = {
                "pool_bytes": POOL_BYTES,
                "runtime_dir": short_path,
                **options,
            }
            return running.enter_context(LocalDaemon(name, **chosen))

        yield start


@pytest.fixture
def start_traffic() -> Iterator[Callable[[Path], TrafficProcesses]]:
    with ExitStack() as running:
        yield lambda directory: running.enter_context(TrafficProcesses(directory))
