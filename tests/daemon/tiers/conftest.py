"""A pool of host blocks for tiers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvferry.testing.tier_subjects import PoolMemory
from support.tiering_fixture import BLOCK


@pytest.fixture
def pool() -> Iterator[PoolMemory]:
    pool = PoolMemory(BLOCK)
    yield pool
    pool.files.close()
