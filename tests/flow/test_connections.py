"""Hostile connections: chosen routing ids, old protocols, silent connections, and floods.

An honest client runs beside them, and its jobs complete.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import zmq

from kvferry.client import LocalDaemon, OffloadClient
from kvferry.daemon.access.connections import PER_USER
from kvferry.testing.engine import SmallEngine, StartSmallEngine, until
from support.time_limits import TIMEOUT

GREETINGS = {
    "ZMTP 1.0": b"\x01\x00",
    "ZMTP 2.0": b"\xff" + bytes(8) + b"\x7f\x01\x05\x00\x00",
}


@pytest.fixture
def engine(start_engine: StartSmallEngine, kvferryd: LocalDaemon) -> SmallEngine:
    return start_engine(kvferryd)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def can_store(engine: SmallEngine, block: int) -> bool:
    value = engine.worker.write([block], 1)
    (result,) = engine.finish(engine.store([block], [block], wait_for=value))
    return result.success


def connect(path: Path, kind: int = socket.SOCK_STREAM) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, kind)
    connection.settimeout(TIMEOUT)
    connection.connect(str(path))
    return connection


@pytest.mark.parametrize("version", GREETINGS)
def test_a_peer_of_an_old_zmtp_version_is_disconnected(
    engine: SmallEngine, kvferryd: LocalDaemon, version: str
) -> None:
    """Such a peer would choose its routing id before its credentials are checked."""
    with connect(kvferryd.directory / "kvferry.sock") as old:
        old.sendall(GREETINGS[version])
        with suppress(ConnectionResetError):
            while old.recv(4096):  # the daemon's greeting, then end of file
                pass
    assert can_store(engine, 1)


def test_chosen_routing_ids_are_bounded(
    engine: SmallEngine, kvferryd: LocalDaemon, stack: ExitStack
) -> None:
    """The ids have the form of those that libzmq chooses.

    libzmq aborts when its counter of connections reaches an id that a client has chosen. The limit
    of connections per user makes this take months.
    """
    context = stack.enter_context(zmq.Context())
    address = f"ipc://{kvferryd.directory / 'kvferry.sock'}"
    connections = []
    for number in range(PER_USER.live + 40):
        connection = context.socket(zmq.DEALER)
        stack.callback(connection.close, 0)
        connection.setsockopt(zmq.ROUTING_ID, b"\0" + (number << 22).to_bytes(4, "big"))
        connection.setsockopt(zmq.RECONNECT_IVL, 1000)
        connection.connect(address)
        connection.send(b"no message, but each admitted connection receives a reply")
        connections.append(connection)
    until(lambda: any(connection.poll(0) for connection in connections))
    time.sleep(2)  # for replies to connections beyond the limit
    answered = sum(connection.poll(0) for connection in connections)
    assert 0 < answered <= PER_USER.live
    assert can_store(engine, 1)
    for connection in connections:
        connection.close(0)

    def can_connect() -> bool:
        with OffloadClient(kvferryd.directory, timeout=TIMEOUT) as client:
            return client.status().pid == kvferryd.pid

    assert can_connect()


def test_silent_connections_to_the_descriptor_socket_do_not_delay_others(
    kvferryd: LocalDaemon, start_engine: StartSmallEngine, stack: ExitStack
) -> None:
    """An engine that starts must pass its descriptors within ten seconds."""
    for _ in range(300):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stack.enter_context(connection)
        connection.setblocking(False)
        try:
            connection.connect(str(kvferryd.directory / "fds.sock"))
        except BlockingIOError:  # the kernel's queue is full
            continue
    assert can_store(start_engine(kvferryd), 1)


def test_a_client_waits_in_the_parent_directory_for_a_daemon_that_starts_later(
    tmp_path: Path,
) -> None:
    started: list[LocalDaemon] = []

    def start() -> None:
        time.sleep(0.5)
        started.append(LocalDaemon(runtime_dir=tmp_path, pool_bytes=1 << 20))

    thread = threading.Thread(target=start)
    thread.start()
    try:
        with OffloadClient(tmp_path, timeout=TIMEOUT) as client:
            assert client.directory == tmp_path / "cpu"
    finally:
        thread.join()
        started[0].stop()


def test_a_removed_socket_makes_the_daemon_unhealthy(
    engine: SmallEngine, kvferryd: LocalDaemon
) -> None:
    client = engine.client

    def healthy() -> bool:
        health = client.status().health
        return health is not None and health.healthy

    until(healthy)
    (kvferryd.directory / "fds.sock").unlink()

    def reported() -> bool:
        health = client.status().health
        return health is not None and any("was removed" in why for why in health.reasons)

    until(reported)
