"""The client's ZeroMQ socket."""

from __future__ import annotations

from pathlib import Path

import zmq

from kvferry.client.transport.connection import Connection


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
