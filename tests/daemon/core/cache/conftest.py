"""Fixtures: empty caches, one for each policy."""

from __future__ import annotations

import pytest

from kvferry.daemon.core.cache.cache import Cache
from kvferry.daemon.core.cache.policies import POLICIES


@pytest.fixture(params=POLICIES)
def policy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def cache(policy: str) -> Cache:
    """An empty cache of four blocks."""
    return Cache(4, policy)
