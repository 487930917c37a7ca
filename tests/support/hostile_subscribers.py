"""Hostile subscribers of KV events, in a process of their own.

    python -m support.hostile_subscribers SOCKET KIND CONNECTIONS MESSAGES

KIND: "topics", each message subscribes to 100 random bytes; "frames", messages of 1 MiB; "silent",
connections that subscribe to nothing. A connection that is closed by the publisher is opened again
for the remaining messages. A libzmq subscriber would keep all topics in its own memory, so this one
implements ZMTP.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack

from support.child_processes import children_of
from support.time_limits import TIMEOUT

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB"
TOPIC_BYTES = 100
FRAME_BYTES = 1 << 20


def connect(path: str) -> socket.socket:
    """A connection after the handshake. Raises OSError if it is closed or not answered."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(TIMEOUT)
        connection.connect(path)
        connection.sendall(GREETING + bytes([4, len(READY)]) + READY)
        reply = b""
        while b"READY" not in reply:
            read = connection.recv(4096)
            if not read:
                raise ConnectionResetError("closed during the handshake")
            reply += read
    except BaseException:
        connection.close()
        raise
    return connection


def message(kind: str) -> bytes:
    if kind == "frames":
        return b"\x02" + FRAME_BYTES.to_bytes(8, "big") + b"\x01" + os.urandom(FRAME_BYTES - 1)
    return bytes([0, TOPIC_BYTES + 1, 1]) + os.urandom(TOPIC_BYTES)


def send_all(path: str, kind: str, messages: int) -> int:
    """Send messages. Returns how often the connection was closed and opened again."""
    sent = closed = 0
    while sent < messages:
        try:
            with connect(path) as connection:
                while sent < messages:
                    sent += 1
                    connection.sendall(message(kind))
        except OSError:
            closed += 1
            time.sleep(0.02)
    return closed


def main(arguments: Sequence[str] = sys.argv[1:]) -> None:
    path, kind, connections, messages = arguments
    if kind == "silent":
        with ExitStack() as opened:
            for _ in range(int(connections)):
                try:
                    opened.enter_context(connect(path))
                except OSError:
                    time.sleep(0.02)
            time.sleep(1)
        return
    for _ in range(int(connections)):
        print(send_all(path, kind, int(messages)), flush=True)


def publishers_of(pid: int) -> list[int]:
    """The processes that publish KV events for a daemon."""
    return children_of(pid, b"KV events")


if __name__ == "__main__":
    main()
