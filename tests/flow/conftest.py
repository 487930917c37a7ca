"""Fixtures of daemons that are killed and started again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.restarting_daemons import RestartingDaemons
from support.restarting_fixture import RestartedService


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[RestartingDaemons]:
    """Daemons that run one after another, each with an empty pool."""
    with RestartingDaemons("cpu", tmp_path, pool_bytes=1 << 20) as running:
        yield running


@pytest.fixture
def restarted_service(tmp_path: Path) -> Iterator[RestartedService]:
    """A daemon whose service manager keeps the pool."""
    service = RestartedService(tmp_path)
    with service.manager:
        service.start()
        yield service
