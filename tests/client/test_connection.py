"""The client's ZeroMQ socket."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from kvferry.client.transport.connection import Connection
from kvferry.proto.codec import MAX_REPLY_BYTES
from kvferry.proto.errors import Gone
from kvferry.testing.engine import until


@contextmanager
def connected(directory: Path) -> Iterator[tuple[Connection, Callable[[bytes], None]]]:
    """A connection, and a function that sends it a message."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        router.bind(f"ipc://{directory / 'kvferry.sock'}")
        connection = Connection(directory)
        connection.send(b"hello")
        identity, _ = router.recv_multipart()

        def send(message: bytes) -> None:
            router.send_multipart([identity, message])

        yield connection, send
        connection.close()


def test_other_work_may_come_between_two_messages(tmp_path: Path) -> None:
    received: list[bytes] = []
    with connected(tmp_path) as (connection, send):
        connection.receives_at_once = 1
        for message in (b"1", b"2", b"3"):
            send(message)
        until(lambda: connection.receive_messages(received.append))
        assert received == [b"1"]
        until(lambda: connection.receive_messages(received.append) and len(received) > 1)
        until(lambda: connection.receive_messages(received.append) or received[-1] == b"3")
        assert received == [b"1", b"2", b"3"]
        assert not connection.receive_messages(received.append)


def test_a_message_beyond_all_limits_ends_the_connection(tmp_path: Path) -> None:
    received: list[bytes] = []
    with connected(tmp_path) as (connection, send):
        send(bytes(2 * MAX_REPLY_BYTES))
        until(lambda: connection.receive_messages(received.append))
        send(bytes(2 * MAX_REPLY_BYTES + 1))
        with pytest.raises(Gone, match="disconnected"):
            wait_until_disconnected(connection)
        assert not connection.receive_messages(received.append)


def wait_until_disconnected(connection: Connection) -> None:
    while True:
        connection.wait_readable(1.0)
        connection.check_alive()


def accepts(router: zmq.Socket[bytes], identity: bytes, message: bytes) -> bool:
    try:
        router.send_multipart([identity, message])
    except zmq.Again:
        return False
    return True


def test_a_client_that_does_not_poll_holds_a_bounded_number_of_messages(tmp_path: Path) -> None:
    """At the bound the daemon omits key events.

    Else an engine that is idle for a night would handle all of its events in the next poll.
    """
    received: list[bytes] = []
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.SNDHWM, 256)
        router.setsockopt(zmq.SNDTIMEO, 500)
        router.setsockopt(zmq.RCVTIMEO, 10_000)
        router.setsockopt(zmq.LINGER, 0)
        router.bind(f"ipc://{tmp_path / 'kvferry.sock'}")
        connection = Connection(tmp_path)
        connection.send(b"hello")
        identity, _ = router.recv_multipart()
        message = bytes(1000)
        sent = next(number for number in range(50_000) if not accepts(router, identity, message))
        while len(received) < sent:
            connection.wait_readable(1.0)
            connection.receive_messages(received.append)
        router.send_multipart([identity, b"last"])
        while received[-1] != b"last":
            connection.wait_readable(1.0)
            connection.receive_messages(received.append)
        assert received == [message] * sent + [b"last"]
        connection.close()
