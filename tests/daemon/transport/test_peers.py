"""Which process a message is from, and its pidfd."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvferry.daemon.transport.peers import SO_PEERPIDFD, Peers, open_pidfd
from kvferry.proto.errors import Code, Refused
from kvferry.proto.messages import Hello
from support.time_limits import TIMEOUT

CLIENT = """
import socket, sys, time
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(sys.argv[1])
    time.sleep(1000)
"""


@pytest.fixture
def client(short_path: Path) -> Iterator[tuple[socket.socket, subprocess.Popen[bytes]]]:
    """A connection, and the process at its other end."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(short_path / "socket"))
        listener.listen()
        listener.settimeout(TIMEOUT)
        command = [sys.executable, "-c", CLIENT, str(short_path / "socket")]
        with subprocess.Popen(command) as process:
            connection, _ = listener.accept()
            with connection:
                yield connection, process
                process.kill()


def has_exited(pidfd: int, seconds: float) -> bool:
    return bool(select.select([pidfd], [], [], seconds)[0])


@pytest.mark.parametrize("visible", [True, False])
def test_the_pidfd_reports_the_exit_of_the_process(
    client: tuple[socket.socket, subprocess.Popen[bytes]], visible: bool
) -> None:
    """A process in another PID namespace has no pid here, but its socket has its pidfd."""
    connection, process = client
    try:
        connection.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError:
        if not visible:
            pytest.skip("Linux before 6.5 has no SO_PEERPIDFD")
    pidfd = open_pidfd(connection.fileno(), process.pid if visible else 0)
    assert pidfd is not None
    try:
        assert not has_exited(pidfd, 0.0)
        process.kill()
        assert has_exited(pidfd, TIMEOUT)
    finally:
        os.close(pidfd)


class ConnectedFrame:
    """A frame that came through a connection of this process. number: its descriptor."""

    def __init__(self) -> None:
        self.ends = socket.socketpair()
        self.number = self.ends[0].fileno()

    def get(self, name: Any) -> Any:
        return self.number if name == zmq.SRCFD else f"localhost:{os.getuid()}::{os.getpid()}"

    def close(self) -> None:
        for end in self.ends:
            end.close()


async def test_a_message_that_outlives_its_connection_opens_no_session() -> None:
    """Although the number of its connection is that of another client now."""
    ended = list[tuple[str, str]]()
    peers = Peers(lambda peer, why: ended.append((peer.session, why)))
    connection: Any = ConnectedFrame()

    def add(session: str, number: int) -> None:
        identity = b"\0" + number.to_bytes(4)
        peers.add_peer(session, identity, connection, Hello(1, 1, "client", "engine"))

    def refuses(session: str, number: int) -> bool:
        with pytest.raises(Refused) as refused:
            add(session, number)
        return refused.value.code == Code.NO_SESSION

    peers.connection_closed(connection.number)
    assert refuses("of a closed connection", 1)
    peers.connection_opened(connection.number)
    add("first", 3)
    assert refuses("of an earlier connection", 2)
    assert ended == []
    add("second", 4)  # the end of the first one is noticed late
    assert ended == [("first", "connection closed")]
    peers.close()
    connection.close()
