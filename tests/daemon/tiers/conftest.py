"""A pool of host blocks for tiers, and tiers in processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvferry.daemon.tier_config import TierConfig
from kvferry.daemon.tiers.tier_process import DEFAULT_TIMES, TierTimes
from kvferry.testing.tier_subjects import PoolMemory, ProcessSubject

from .disk_fixtures import BLOCK, KillableDisk
from .rude_fixtures import Rude, Start


@pytest.fixture
def pool() -> Iterator[PoolMemory]:
    pool = PoolMemory(BLOCK)
    yield pool
    pool.files.close()


@pytest.fixture
def disk(pool: PoolMemory, tmp_path: Path) -> Iterator[KillableDisk]:
    disk = KillableDisk(pool, tmp_path / "tier")
    yield disk
    disk.close()


@pytest.fixture
def start(pool: PoolMemory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """start(config, times, wait=True) -> a tier in a process, which is on unless wait is false."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    with ExitStack() as running:

        def start(
            config: TierConfig, times: TierTimes = DEFAULT_TIMES, wait: bool = True
        ) -> ProcessSubject:
            made = ProcessSubject(pool, config, times)
            running.callback(made.close)
            if wait:
                made.wait_until(lambda: made.client.is_on)
            return made

        yield start


@pytest.fixture
def rude(start: Start, tmp_path: Path) -> Rude:
    return Rude(tmp_path, start)
