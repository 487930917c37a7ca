"""The pidfd of the process at the other end of a connection."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.daemon.transport.peers import SO_PEERPIDFD, open_pidfd
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
