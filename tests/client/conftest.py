"""A FakeDaemon and its clients."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvferry.client import OffloadClient
from kvferry.client.session import ClientSession
from kvferry.proto.codec import encode
from support.client_keys import FINGERPRINT, A, B
from support.client_session import WELCOME
from support.fake_daemon import FakeDaemon


@pytest.fixture
def start_fake_daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., FakeDaemon]]:
    """start_fake_daemon(num_blocks) -> a daemon; clients of its directory are connected to it.

    The directory has a real socket file, because clients wait until a daemon has bound one.
    """
    running: dict[Path, FakeDaemon] = {}
    resources = ExitStack()

    def start(num_blocks: int = 8) -> FakeDaemon:
        directory = Path(
            resources.enter_context(tempfile.TemporaryDirectory(prefix="fake-daemon-"))
        )
        bound = resources.enter_context(socket.socket(socket.AF_UNIX))
        bound.bind(str(directory / "kvferry.sock"))
        running[directory] = FakeDaemon(directory, num_blocks)
        return running[directory]

    monkeypatch.setattr("kvferry.client.link.Connection", running.__getitem__)
    with resources:
        yield start


@pytest.fixture
def fake_daemon(start_fake_daemon: Callable[..., FakeDaemon]) -> FakeDaemon:
    return start_fake_daemon()


@pytest.fixture
def client(fake_daemon: FakeDaemon) -> OffloadClient:
    """A client of `fake_daemon` that does not reconnect and has opened no namespace."""
    return OffloadClient(fake_daemon.directory, engine="engine", timeout=2.0, reconnect=False)


@pytest.fixture
def tenant(fake_daemon: FakeDaemon, client: OffloadClient) -> OffloadClient:
    """`client` in a namespace. Key A is ready, key B is pending. `received` is empty."""
    fake_daemon.store(A)
    fake_daemon.reserve(B)
    client.open_namespace(FINGERPRINT)
    fake_daemon.received.clear()
    return client


@pytest.fixture
def session() -> ClientSession:
    session = ClientSession("engine", "client")
    session.receive_message(encode(WELCOME))
    return session
