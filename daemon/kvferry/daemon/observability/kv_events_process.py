"""The process that publishes KV events on a ZeroMQ XPUB socket.

    python -m kvferry.daemon.observability.kv_events_process TITLE CHANNEL LISTENER ADDRESS FIRST

libzmq stores the topics of all subscribers in a tree that takes about 50 bytes per byte of a topic,
and it reads everything that a connection sends before it returns. No option limits the tree, and
the caller cannot interrupt the read. So the limit is one of the process, RLIMIT_DATA: if it is
exceeded, libzmq aborts, and the daemon starts another process (kv_events.py).

CHANNEL is a stream socket to the daemon. The daemon sends ChannelMessages, each preceded by its
size. This process sends one byte whenever there is a first subscriber or no subscriber is left. It
ends when the channel is closed.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import struct
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import zmq
from setproctitle import setproctitle

from kvferry.proto.events import Place, batches_of
from kvferry.proto.messages import KeyEvents

# Bytes that the process may allocate after its start: 20 MiB for a subscriber that does not read
# (1,000 messages of 512 hashes), and the topics of some thousand subscribers.
MEMORY_BUDGET = 48 << 20
# Messages queued for a subscriber that does not read.
SEND_HIGH_WATER = 1_000
# A subscription is one message. The name of a namespace has 16 bytes.
MAX_SUBSCRIPTION_BYTES = 256
# Subscriptions read before the channel is read again.
SUBSCRIPTIONS_PER_TURN = 1_000
# The first subscriber connects before this process runs. Its subscription must arrive before the
# first event is published; if it sends none, the events are dropped.
FIRST_SUBSCRIPTION_MS = 1_000
CHANNEL_READ_BYTES = 256 << 10
SIZE = struct.Struct("!I")


class ChannelMessage(msgspec.Struct, frozen=True, array_like=True):
    """Events of a namespace for the publisher.

    gap: earlier events were dropped. block_size: tokens in a block. time: seconds since the epoch.
    place: where the blocks are.
    """

    gap: bool
    namespace: str
    block_size: int
    time: float
    key_events: KeyEvents
    place: Place


class Subscriptions:
    """The number of subscribed topics, as XPUB reports them."""

    def __init__(self, xpub: zmq.Socket[bytes]) -> None:
        self._xpub = xpub
        self._topics = 0

    def __bool__(self) -> bool:
        return self._topics > 0

    def read(self) -> None:
        """Read up to SUBSCRIPTIONS_PER_TURN messages of subscribers."""
        for _ in range(SUBSCRIPTIONS_PER_TURN):
            try:
                message = self._xpub.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            if message[:1] == b"\1":
                self._topics += 1
            elif message[:1] == b"\0":
                self._topics -= 1


class SequenceNumbers:
    """The number of the next message of each namespace.

    first: larger than all numbers of earlier processes.
    """

    def __init__(self, first: int) -> None:
        self._next: defaultdict[str, int] = defaultdict(lambda: first)

    def skip_number(self) -> None:
        """Skip one number in all namespaces, because events of one of them were dropped."""
        for namespace in self._next:
            self._next[namespace] += 1

    def take_number(self, namespace: str) -> bytes:
        number = self._next[namespace]
        self._next[namespace] += 1
        return number.to_bytes(8, "big")


def messages_in(data: bytearray) -> Iterator[bytes]:
    """Remove and yield the complete messages of the bytes read from the channel."""
    start = 0
    while len(data) - start >= SIZE.size:
        (size,) = SIZE.unpack_from(data, start)
        end = start + SIZE.size + size
        if len(data) < end:
            break
        yield bytes(data[start + SIZE.size : end])
        start = end
    del data[:start]


class Publisher:
    """Publishes what the channel carries. first: the first sequence number."""

    def __init__(self, xpub: zmq.Socket[bytes], channel: socket.socket, first: int) -> None:
        self._xpub, self._channel = xpub, channel
        self._subscriptions = Subscriptions(xpub)
        self._numbers = SequenceNumbers(first)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ChannelMessage)

    def run(self) -> None:
        """Publish until the daemon closes the channel."""
        if self._xpub.poll(FIRST_SUBSCRIPTION_MS):
            self._subscriptions.read()
        subscribed = self._report()
        poller = zmq.Poller()
        poller.register(self._xpub, zmq.POLLIN)
        poller.register(self._channel, zmq.POLLIN)
        data = bytearray()
        while True:
            ready = dict(poller.poll())
            if self._xpub in ready:
                self._subscriptions.read()
                if bool(self._subscriptions) is not subscribed:
                    subscribed = self._report()
            if self._channel.fileno() in ready:
                read = self._channel.recv(CHANNEL_READ_BYTES)
                if not read:
                    return
                data += read
                for message in messages_in(data):
                    self._publish(self._decoder.decode(message))

    def _report(self) -> bool:
        subscribed = bool(self._subscriptions)
        self._channel.send(bytes([subscribed]))
        return subscribed

    def _publish(self, message: ChannelMessage) -> None:
        if message.gap:
            self._numbers.skip_number()
        topic = message.namespace.encode()
        events, size, time = message.key_events, message.block_size, message.time
        for batch in batches_of(events, size, time, message.place):
            number = self._numbers.take_number(message.namespace)
            self._xpub.send_multipart([topic, number, self._encoder.encode(batch)])


def limit_memory(budget: int) -> None:
    """Let allocations fail beyond the current data size plus `budget` bytes."""
    with Path("/proc/self/status").open() as status:
        used = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (used + budget, used + budget))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main(arguments: Sequence[str] = sys.argv[1:]) -> None:
    title, channel, listener, address, first = arguments
    setproctitle(f"kvferryd: {title}")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the daemon ends this process
        signal.signal(number, signal.SIG_IGN)
    xpub = zmq.Context().socket(zmq.XPUB)
    xpub.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER)
    xpub.setsockopt(zmq.LINGER, 0)
    xpub.setsockopt(zmq.MAXMSGSIZE, MAX_SUBSCRIPTION_BYTES)
    xpub.setsockopt(zmq.USE_FD, int(listener))
    limit_memory(MEMORY_BUDGET)
    xpub.bind(address)
    Publisher(xpub, socket.socket(fileno=int(channel)), int(first)).run()
    os._exit(0)  # do not wait for subscribers


if __name__ == "__main__":
    main()
