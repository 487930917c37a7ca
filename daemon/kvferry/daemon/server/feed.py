"""KV events out: a PUB socket for routers and indexers.

Whoever listens too slowly misses some, and sees a gap in the numbers.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from pathlib import Path
from typing import cast

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from kvferry.daemon.core.actions import Publish
from kvferry.daemon.server.door import Door
from kvferry.proto.errors import Code, Refused
from kvferry.proto.events import batches_of

HIGH_WATER = 1_000
"""Messages kept for a subscriber that does not read: some 20 MiB, of hashes of 32 bytes."""
POLLIN = int(zmq.POLLIN)


class Feed:
    """Publishes at `address`, a ZeroMQ endpoint; "off": nowhere. Raises Refused (BAD_CONFIG)."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self._socket: zmq.Socket[bytes] | None = None
        self._sequences: Counter[str] = Counter()
        self._encoder = msgspec.msgpack.Encoder()
        if address == "off":
            return
        self._socket = context.socket(zmq.PUB)
        self._socket.setsockopt(zmq.SNDHWM, HIGH_WATER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._door = Door(Path(address.removeprefix("ipc://"))) if is_path(address) else None
        try:
            if self._door is None:
                self._socket.bind(address)
            else:
                self._door.bind(self._socket)
                self._door.open()
        except zmq.ZMQError as error:
            self._socket.close()
            raise Refused(
                Code.BAD_CONFIG, f"events.publish cannot be had: {error}", address
            ) from error
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_ACCEPTED)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._monitor.fileno(), self._watch)
        self._watch()

    def publish(self, action: Publish) -> None:
        if self._socket is None:
            return
        topic = action.namespace.encode()
        for batch in batches_of(action.news, action.block_size, time.time()):
            number = self._sequences[action.namespace]
            self._sequences[action.namespace] += 1
            frames = [topic, number.to_bytes(8, "big"), self._encoder.encode(batch)]
            with contextlib.suppress(zmq.Again):
                self._socket.send_multipart(frames, zmq.NOBLOCK)

    def close(self) -> None:
        if self._socket is not None:
            self._loop.remove_reader(self._monitor.fileno())
            if self._door is not None:
                self._door.close()
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._socket.close()

    def _watch(self) -> None:
        while cast(int, self._monitor.get(zmq.EVENTS)) & POLLIN:
            event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            if self._door is not None:  # elsewhere libzmq only waits
                self._door.came(int(event["value"]))


def is_path(address: str) -> bool:
    """Whether an endpoint is a file; not so names in the abstract namespace, which begin with @."""
    return address.startswith("ipc://") and not address.startswith("ipc://@")
