"""Fixtures of daemons that are killed and started again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.reconnecting_fixture import DaemonService
from support.restarting_fixture import RestartedService


@pytest.fixture
def daemon_service(tmp_path: Path) -> Iterator[DaemonService]:
    service = DaemonService(tmp_path)
    yield service
    service.close()


@pytest.fixture
def restarted_service(tmp_path: Path) -> Iterator[RestartedService]:
    """A daemon whose service manager keeps the pool."""
    service = RestartedService(tmp_path)
    with service.manager:
        service.start()
        yield service
