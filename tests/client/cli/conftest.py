"""Fixtures of the command line's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvferry.client import LocalDaemon


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """So wide that no table cell wraps, even with the large numbers of a busy machine."""
    monkeypatch.setenv("COLUMNS", "160")


@pytest.fixture(scope="module")
def daemon() -> Iterator[LocalDaemon]:
    with LocalDaemon(pool_bytes=64 << 20) as daemon:
        yield daemon
