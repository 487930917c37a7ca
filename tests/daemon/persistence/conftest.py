"""Fixture: a pool with stored blocks."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from .stored_pool import StoredPool


@pytest.fixture
async def pool() -> AsyncIterator[StoredPool]:
    pool = StoredPool()
    yield pool
    pool.close()
