"""KV events reach subscribers, in bounded memory. A gap in the numbers shows lost events."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from kvferry.daemon.core.actions import PublishKVEvents
from kvferry.daemon.observability.kv_events import NUMBERS_PER_PROCESS, KVEventPublisher
from kvferry.proto.errors import Refused
from kvferry.proto.events import (
    MAX_BATCH_HASHES,
    AllBlocksCleared,
    BlockStored,
    KVEventBatch,
    published_hash,
)
from kvferry.proto.keys import EventKind, offload_key
from kvferry.proto.messages import KeyEvent, KeyEvents
from support.child_processes import children_of
from support.eventually import eventually
from support.time_limits import TIMEOUT

KEYS = tuple(offload_key(n.to_bytes(32, "big")) for n in range(5 * MAX_BATCH_HASHES))
LAST = KeyEvent(EventKind.CLEARED, ())


def stored(*keys: bytes, namespace: str = "name") -> PublishKVEvents:
    return PublishKVEvents(namespace, 16, KeyEvents(1, (KeyEvent(EventKind.STORED, keys),), 1))


@pytest.fixture
def address(short_path: Path) -> str:
    return f"ipc://{short_path}/events.sock"


@pytest.fixture
async def publisher(
    request: pytest.FixtureRequest, address: str
) -> AsyncIterator[KVEventPublisher]:
    """A KVEventPublisher. The parameter has its limits."""
    limits = getattr(request, "param", {})
    publisher = KVEventPublisher(address, restart_after=0.05, **limits)
    yield publisher
    await publisher.close()


class EventSubscriber:
    """A subscriber that reads in a thread, so that it does not block the event loop."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket

    async def receive(self) -> tuple[str, int, list[object]]:
        """(namespace, number, events)."""
        topic, number, payload = await asyncio.to_thread(self.socket.recv_multipart)
        batch = msgspec.msgpack.decode(payload, type=KVEventBatch)
        return topic.decode(), int.from_bytes(number, "big"), list(batch.events)

    async def receive_number(self) -> int:
        return (await self.receive())[1]


@pytest.fixture
def subscriber(address: str) -> Iterator[EventSubscriber]:
    """It has a subscription. The test connects it."""
    with zmq.Context() as context, context.socket(zmq.SUB) as zmq_socket:
        zmq_socket.setsockopt(zmq.RCVTIMEO, int(1000 * TIMEOUT))
        zmq_socket.setsockopt(zmq.LINGER, 0)
        zmq_socket.setsockopt(zmq.SUBSCRIBE, b"")
        yield EventSubscriber(zmq_socket)


def publisher_processes() -> set[int]:
    return set(children_of(os.getpid(), b"KV events"))


async def wait_for_process(publisher: KVEventPublisher) -> int:
    """Wait until the publisher has a process. Returns its pid."""
    await eventually(lambda: len(publisher_processes()) == 1)
    (pid,) = publisher_processes()
    return pid


async def test_without_a_subscriber_no_process_runs_and_no_event_is_sent(
    publisher: KVEventPublisher, subscriber: EventSubscriber, address: str
) -> None:
    """A subscriber that connects again sees a gap for the events in between."""
    publisher.publish(stored(KEYS[0]))
    await asyncio.sleep(0.1)
    assert not publisher_processes()
    assert not publisher.wanted
    subscriber.socket.connect(address)
    await eventually(lambda: publisher.wanted)
    publisher.publish(stored(KEYS[1]))
    before = await subscriber.receive_number()
    subscriber.socket.disconnect(address)
    # libzmq ends the connection when the socket is used next.
    await eventually(lambda: subscriber.socket.poll(0) == 0 and not publisher.wanted)
    assert publisher_processes()
    publisher.publish(stored(KEYS[2]))
    subscriber.socket.connect(address)
    await eventually(lambda: publisher.wanted)
    publisher.publish(stored(KEYS[3]))
    publisher.publish(stored(KEYS[4]))
    number = await subscriber.receive_number()
    assert number > before + 1
    assert await subscriber.receive_number() == number + 1


async def test_no_events_are_sent_for_a_connection_without_a_subscription(
    publisher: KVEventPublisher, address: str
) -> None:
    with zmq.Context() as context, context.socket(zmq.SUB) as silent:
        silent.connect(address)
        await eventually(lambda: publisher.wanted)
        await eventually(lambda: not publisher.wanted)


async def test_a_dead_process_is_replaced_and_the_numbers_show_a_gap(
    publisher: KVEventPublisher, subscriber: EventSubscriber, address: str
) -> None:
    subscriber.socket.connect(address)
    pid = await wait_for_process(publisher)
    publisher.publish(stored(KEYS[0]))
    assert await subscriber.receive_number() == 0
    os.kill(pid, signal.SIGKILL)
    await eventually(lambda: not publisher.wanted)
    publisher.publish(stored(KEYS[1]))
    await eventually(lambda: publisher.wanted)
    publisher.publish(stored(KEYS[2]))
    _, number, events = await subscriber.receive()
    assert number == NUMBERS_PER_PROCESS
    assert events == [BlockStored([published_hash(KEYS[2])], None, [], 16, None, "CPU", None)]


@pytest.mark.parametrize("publisher", [{"max_queued_bytes": 256 << 10}], indirect=True)
async def test_queued_bytes_for_a_stopped_process_are_bounded(
    publisher: KVEventPublisher, subscriber: EventSubscriber, address: str
) -> None:
    """Further events are dropped, and a gap shows them."""
    subscriber.socket.connect(address)
    pid = await wait_for_process(publisher)
    publisher.publish(stored(KEYS[0]))
    assert await subscriber.receive_number() == 0
    os.kill(pid, signal.SIGSTOP)
    try:
        for _ in range(100):
            publisher.publish(stored(*KEYS))
            await asyncio.sleep(0)
        assert 256 << 10 < publisher.queued_bytes < (256 << 10) + 50 * len(KEYS)
    finally:
        os.kill(pid, signal.SIGCONT)
    await eventually(lambda: publisher.queued_bytes == 0)
    publisher.publish(PublishKVEvents("name", 16, KeyEvents(1, (LAST,), 1)))
    numbers, events = [0], list[object]()
    while events != [AllBlocksCleared()]:
        _, number, events = await subscriber.receive()
        numbers.append(number)
    steps = [after - before for before, after in itertools.pairwise(numbers)]
    assert set(steps[:-1]) == {1}
    assert steps[-1] == 2
    assert len(numbers) < 100 * 5


async def test_events_are_published_over_tcp(subscriber: EventSubscriber) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(Refused, match="in use"):
            KVEventPublisher(address)
    publisher = KVEventPublisher(address)
    subscriber.socket.connect(address)
    await eventually(lambda: publisher.wanted)
    for number in range(3):
        publisher.publish(stored(KEYS[number]))
    for number in range(3):
        event = BlockStored([published_hash(KEYS[number])], None, [], 16, None, "CPU", None)
        assert await subscriber.receive() == ("name", number, [event])
    await publisher.close()
    assert not publisher_processes()


@pytest.mark.parametrize(
    "address", ["tcp://nowhere", "tcp://127.0.0.1:http", "inproc://here", "ipc:///no/such/folder"]
)
async def test_an_unusable_address_is_refused(address: str) -> None:
    with pytest.raises(Refused, match=r"events\.publish"):
        KVEventPublisher(address)


async def test_closing_keeps_the_socket_file_of_another_daemon(
    short_path: Path, address: str
) -> None:
    path = short_path / "events.sock"
    first = KVEventPublisher(address)
    second = KVEventPublisher(address)
    await first.close()
    assert path.is_socket()
    await second.close()
    assert not path.exists()
