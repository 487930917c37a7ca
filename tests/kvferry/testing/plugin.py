"""Fixtures for tests of code that uses kvferry. In your conftest.py:

    pytest_plugins = ["kvferry.testing.plugin"]

    def test_something(kvferryd, kvferry_client): ...       # a daemon of the test's own, on the CPU
    def test_a_small_pool(start_kvferryd):
        daemon = start_kvferryd(pool_bytes=1 << 20, limits_max_stores=4)

Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any, Protocol

import pytest

from kvferry.client import LocalDaemon, OffloadClient

POOL_BYTES = 16 << 20


class StartKvferryd(Protocol):
    def __call__(
        self, device: str = "cpu", *, pool_bytes: int = POOL_BYTES, **options: Any
    ) -> LocalDaemon: ...


@pytest.fixture
def start_kvferryd() -> Iterator[StartKvferryd]:
    """start_kvferryd(device="cpu", **options) -> LocalDaemon. All are stopped after the test.

    If the test fails, pytest shows their logs.
    """
    with ExitStack() as running:

        def start(
            device: str = "cpu", *, pool_bytes: int = POOL_BYTES, **options: Any
        ) -> LocalDaemon:
            daemon = running.enter_context(LocalDaemon(device, pool_bytes=pool_bytes, **options))
            running.callback(_print_log, daemon)
            return daemon

        yield start


def _print_log(daemon: LocalDaemon) -> None:
    with suppress(FileNotFoundError):  # the test has closed the daemon
        print(daemon.log())


@pytest.fixture
def kvferryd(start_kvferryd: StartKvferryd) -> LocalDaemon:
    """A daemon on the CPU, with a host pool of 16 MiB."""
    return start_kvferryd()


@pytest.fixture
def kvferry_client(kvferryd: LocalDaemon) -> Iterator[OffloadClient]:
    """A client of `kvferryd`, of the engine "default"."""
    with OffloadClient(kvferryd.directory) as client:
        yield client
