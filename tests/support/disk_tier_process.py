"""A disk tier in its process, which is tried again soon after it was killed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from daemon.tiers.disk_fixtures import disk_setup
from kvferry.daemon.tiers.tier_process import TierTimes
from kvferry.testing.tier_subjects import PoolMemory, ProcessSubject, open_subject

BLOCK = 4096


@contextmanager
def disk_process(root: Path, pool: PoolMemory, size: int = 32 << 20) -> Iterator[ProcessSubject]:
    short_breaks = TierTimes(first_off=0.05, longest_off=0.2)
    with open_subject(replace(disk_setup(root, size), times=short_breaks), pool) as tier:
        assert isinstance(tier, ProcessSubject)
        yield tier
