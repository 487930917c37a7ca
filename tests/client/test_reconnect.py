"""Reconnect, with a given time and a FakeDaemon."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvferry.client import OffloadClient
from kvferry.client.reconnect import ATTEMPT_TIMEOUT
from kvferry.client.session import ConnectionState
from kvferry.proto import messages as wire

if TYPE_CHECKING:
    from .conftest import FakeDaemon


def test_an_attempt_without_a_reply_is_followed_by_another_one(fake_daemon: FakeDaemon) -> None:
    client = OffloadClient(fake_daemon.directory, engine="engine")
    fake_daemon.silent = True
    client.abandon()
    opened = fake_daemon.opened
    client._reconnect.advance(now := time.monotonic())
    assert fake_daemon.opened == opened + 1
    client._reconnect.advance(now + ATTEMPT_TIMEOUT)
    assert fake_daemon.opened == opened + 1, "the attempt has not timed out yet"
    client._reconnect.advance(now := now + ATTEMPT_TIMEOUT + 1)
    fake_daemon.silent = False
    fake_daemon.received.clear()
    client._reconnect.advance(now)
    assert fake_daemon.received_of(wire.Hello)
    client.wait_connected(1.0)
    assert client._session.state is ConnectionState.CONNECTED
