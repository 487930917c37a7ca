"""KV events out: a PUB socket for routers and indexers. Whoever listens too slowly misses some."""

from __future__ import annotations

import contextlib
import time
from collections import Counter

import msgspec
import zmq

from kvferry.daemon.core.actions import Publish
from kvferry.proto.errors import Code, Refused
from kvferry.proto.events import batch_of

HIGH_WATER = 10_000


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
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._socket.close()
            raise Refused(
                Code.BAD_CONFIG, f"KV events cannot be published there: {error}", address
            ) from error

    def publish(self, action: Publish) -> None:
        if self._socket is None:
            return
        batch = batch_of(action.news, action.block_size, time.time())
        if batch is None:
            return
        number = self._sequences[action.namespace]
        self._sequences[action.namespace] += 1
        frames = [action.namespace.encode(), number.to_bytes(8, "big"), self._encoder.encode(batch)]
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart(frames, zmq.NOBLOCK)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
