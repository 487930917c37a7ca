"""Fixtures for tests of several packages of the daemon."""

from __future__ import annotations

import pytest

from kvferry.daemon.memory import fd_closer


@pytest.fixture
def close_without_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Close descriptors in the calling thread, so that their number is exact."""
    monkeypatch.setattr(fd_closer.Closer, "close_later", lambda _, close: close())
