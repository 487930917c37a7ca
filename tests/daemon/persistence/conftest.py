"""Fixtures: a pool with stored blocks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest

from support.background import in_background

from .stored_pool import StoredPool


@pytest.fixture
async def make_pool() -> AsyncIterator[Callable[[], StoredPool]]:
    """Makes pools of equal bytes. The processes of their checksum clients start with first use."""
    pools = list[StoredPool]()

    def make() -> StoredPool:
        pools.append(StoredPool())
        return pools[-1]

    yield make
    for pool in pools:
        await pool.close()


@pytest.fixture
async def pool(make_pool: Callable[[], StoredPool]) -> AsyncIterator[StoredPool]:
    """A pool whose checksum client runs."""
    pool = make_pool()
    async with in_background(pool.checksums.run()):
        yield pool
