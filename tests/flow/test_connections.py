"""Connections that are no sessions: peers of old protocols, silent ones, and ended ones."""

from __future__ import annotations

import socket
from contextlib import ExitStack, suppress

import pytest

from kvferry.client import LocalDaemon, OffloadClient
from kvferry.testing.engine import until
from support.raw_client import RawClient
from support.time_limits import PROMPTLY, TIMEOUT

GREETINGS = {
    "ZMTP 1.0": b"\x01\x00",
    "ZMTP 2.0": b"\xff" + bytes(8) + b"\x7f\x01\x05\x00\x00",
}


@pytest.mark.parametrize("version", GREETINGS)
def test_a_peer_of_an_old_zmtp_version_is_disconnected(kvferryd: LocalDaemon, version: str) -> None:
    """Such a peer would choose its routing id before its credentials are checked."""
    with socket.socket(socket.AF_UNIX) as old:
        old.settimeout(TIMEOUT)
        old.connect(str(kvferryd.directory / "kvferry.sock"))
        old.sendall(GREETINGS[version])
        with suppress(ConnectionResetError):
            while old.recv(4096):  # the daemon's greeting, then end of file
                pass
    with RawClient(kvferryd.directory, "engine") as raw:
        raw.register()


def test_silent_connections_to_the_descriptor_socket_do_not_delay_others(
    kvferryd: LocalDaemon,
) -> None:
    with ExitStack() as connections:
        for _ in range(300):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connections.enter_context(connection)
            connection.setblocking(False)
            with suppress(BlockingIOError):  # the kernel's queue is full
                connection.connect(str(kvferryd.directory / "fds.sock"))
        with RawClient(kvferryd.directory, "engine", timeout=PROMPTLY) as raw:
            raw.register()


def test_a_dropped_connection_ends_its_session(kvferryd: LocalDaemon) -> None:
    """The process continues and has not sent Goodbye."""
    with OffloadClient(kvferryd.directory, engine="observer") as observer:
        raw = RawClient(kvferryd.directory, "dropped")
        raw.register()
        raw.drop()
        until(lambda: observer.status().sessions == 1, PROMPTLY)
