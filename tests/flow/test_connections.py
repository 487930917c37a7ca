"""Connections that a daemon has to survive: chosen routing ids, old protocols, silent ones, floods.

An honest client is beside them, and its jobs go on.
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


def works(engine: SmallEngine, block: int) -> bool:
    value = engine.worker.write([block], 1)
    (stored,) = engine.finish(engine.store([block], [block], wait_for=value))
    return stored.success


def connect(path: Path, kind: int = socket.SOCK_STREAM) -> socket.socket:
    one = socket.socket(socket.AF_UNIX, kind)
    one.settimeout(10)
    one.connect(str(path))
    return one


@pytest.mark.parametrize("version", GREETINGS)
def test_a_peer_of_an_old_zmtp_version_is_disconnected(
    engine: SmallEngine, kvferryd: LocalDaemon, version: str
) -> None:
    """Such a peer would name its routing id before anybody asked who it is."""
    with connect(kvferryd.directory / "kvferry.sock") as old:
        old.sendall(GREETINGS[version])
        with suppress(ConnectionResetError):
            while old.recv(4096):  # the daemon's own greeting, and then the end
                pass
    assert works(engine, 1)


def test_ids_in_the_form_of_automatic_ones_are_bounded(
    engine: SmallEngine, kvferryd: LocalDaemon, stack: ExitStack
) -> None:
    """libzmq would abort once its counter of new connections meets a chosen id. A user has so few
    connections at a time that this takes months."""
    context = stack.enter_context(zmq.Context())
    address = f"ipc://{kvferryd.directory / 'kvferry.sock'}"
    planted = []
    for number in range(PER_USER.live + 40):
        one = context.socket(zmq.DEALER)
        stack.callback(one.close, 0)
        one.setsockopt(zmq.ROUTING_ID, b"\0" + (number << 22).to_bytes(4, "big"))
        one.setsockopt(zmq.RECONNECT_IVL, 1000)
        one.connect(address)
        one.send(b"no message, but every one of a connection that was admitted is answered")
        planted.append(one)
    time.sleep(2)
    answered = sum(one.poll(0) for one in planted)
    assert 0 < answered <= PER_USER.live
    assert works(engine, 1)
    for one in planted:
        one.close(0)

    def joins() -> bool:
        with OffloadClient(kvferryd.directory, timeout=20) as client:
            return client.status().pid == kvferryd.pid

    assert joins()


def test_silent_connections_to_the_descriptor_socket_do_not_delay_others(
    kvferryd: LocalDaemon, start_engine: StartSmallEngine, stack: ExitStack
) -> None:
    """An engine that starts hands descriptors over, and has ten seconds for it."""
    for _ in range(300):
        one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stack.enter_context(one)
        one.setblocking(False)
        try:
            one.connect(str(kvferryd.directory / "fds.sock"))
        except BlockingIOError:  # the kernel's queue is full
            continue
    assert works(start_engine(kvferryd), 1)


def test_a_client_waits_in_the_folder_above_for_a_daemon_that_starts_later(tmp_path: Path) -> None:
    started: list[LocalDaemon] = []

    def start() -> None:
        time.sleep(0.5)
        started.append(LocalDaemon(runtime_dir=tmp_path, pool_bytes=1 << 20))

    thread = threading.Thread(target=start)
    thread.start()
    try:
        with OffloadClient(tmp_path, timeout=30) as client:
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

    until(healthy, 30)
    (kvferryd.directory / "fds.sock").unlink()

    def reported() -> bool:
        health = client.status().health
        return health is not None and any("was removed" in why for why in health.reasons)

    until(reported, 10)
