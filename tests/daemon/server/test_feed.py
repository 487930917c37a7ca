"""What is published has a bounded size, however much there is of it, and whoever does not read."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import zmq

from kvferry.daemon.core.actions import Publish
from kvferry.daemon.server.feed import HIGH_WATER, Feed
from kvferry.proto.events import MOST_IN_A_BATCH
from kvferry.proto.keys import EventKind, offload_key
from kvferry.proto.messages import KeyEvent, News

KEYS = tuple(offload_key(n.to_bytes(32, "big")) for n in range(5 * MOST_IN_A_BATCH))


async def test_a_subscriber_that_does_not_read_costs_a_bounded_number_of_bytes(
    short_path: Path,
) -> None:
    """It finds what was kept for it, and a gap behind that."""
    address = f"ipc://{short_path}/events.sock"
    with zmq.Context() as context, context.socket(zmq.SUB) as listener:
        feed = Feed(context, address)
        listener.setsockopt(zmq.RCVHWM, 1)
        listener.setsockopt(zmq.RCVTIMEO, 500)
        listener.setsockopt(zmq.SUBSCRIBE, b"")
        listener.connect(address)
        time.sleep(0.2)  # a subscription takes a moment
        for number in range(HIGH_WATER):
            feed.publish(Publish("some", 16, News(number, (KeyEvent(EventKind.STORED, KEYS),), 1)))
        heard: list[list[bytes]] = []
        try:
            while True:
                heard.append(listener.recv_multipart())
        except zmq.Again:
            pass
        sizes = [len(payload) for _, _, payload in heard]
        numbers = [int.from_bytes(number, "big") for _, number, _ in heard]
        assert max(sizes) < 50 * MOST_IN_A_BATCH
        assert numbers[0] == 0
        assert numbers == sorted(set(numbers))
        assert len(numbers) < 2 * HIGH_WATER
        feed.publish(Publish("some", 16, News(1, (KeyEvent(EventKind.CLEARED, ()),), 1)))
        _, last, payload = listener.recv_multipart()
        assert msgspec.msgpack.decode(payload)[1] == [["AllBlocksCleared"]]
        assert int.from_bytes(last, "big") == 5 * HIGH_WATER
        feed.close()
