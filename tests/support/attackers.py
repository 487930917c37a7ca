"""Hostile clients in a process of their own, for some seconds.

    python -m support.attackers DIRECTORY KIND SECONDS

KIND: "largest", the largest legal messages of every kind, without receiving anything; "layouts",
layouts of 250,000 references, of one reference too many, and valid ones that do not fit into the
pool; "ids", connections with routing ids in the form of those that libzmq chooses,
opened and closed all the time; "silent", connections to the descriptor socket that send nothing;
"sibling", all requests of a sibling, without fetching a descriptor.
"""

from __future__ import annotations

import itertools
import os
import random
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import zmq

from kvferry.client import Fingerprint, OffloadClient, Timeline, shared_empty
from kvferry.daemon.core.composition import Composition
from kvferry.proto.codec import encode
from kvferry.proto.errors import KVFerryError
from kvferry.proto.keys import MAX_KEY_BYTES
from kvferry.proto.lending import MAX_USES, BorrowMemory, MemoryLent, Uses
from kvferry.proto.messages import (
    MAX_JOB_IDS,
    AllocateKVCaches,
    Cancel,
    ClientMessage,
    Error,
    FindInTiers,
    OpenNamespace,
    Pin,
    Submit,
    Subscribe,
    Touch,
    Wait,
)
from kvferry.proto.protocol import make_hello
from kvferry.proto.specs import (
    MAX_KEYS,
    MAX_REFS,
    MAX_TENSORS,
    GPULoadStoreSpec,
    KeyLoadStoreSpec,
    KVLayout,
    TensorLayout,
    TensorRef,
)
from support.raw_client import RawClient
from support.time_limits import TIMEOUT

# Connections that are open at the same time.
MAX_OPEN = 200
PAGE = 64
TENSORS = (TensorLayout(1, PAGE, PAGE),) * MAX_TENSORS
REFS = tuple(TensorRef(tensor, PAGE) for tensor in range(MAX_TENSORS))


def send_largest(directory: Path, seconds: float) -> int:
    """Two connections of an engine whose timeline does not advance: its jobs stay in flight."""
    keys, ids = [os.urandom(MAX_KEY_BYTES) for _ in range(64 * MAX_KEYS)], range(MAX_KEYS)
    engine, numbers, sent = f"rude {os.getpid()}", itertools.count(1), 0
    fingerprint = Fingerprint("model", PAGE, key_bytes=MAX_KEY_BYTES)
    many, layout = tuple(range(MAX_JOB_IDS)), KVLayout(TENSORS, (REFS,) * 4)

    def message() -> ClientMessage:
        number, at = next(numbers), random.randrange(64) * MAX_KEYS
        some, gpu = tuple(keys[at : at + MAX_KEYS]), GPULoadStoreSpec(ids)
        store = Submit(number, gpu, KeyLoadStoreSpec(some, 0, some))
        load = Submit(number, KeyLoadStoreSpec(some), gpu, 1 << 62)
        others = FindInTiers(number, some), Cancel(many), Wait(number, many), Subscribe()
        allocate = AllocateKVCaches(number, layout, 1 << 40)
        return random.choice((store, load, Touch(some), Pin(some), allocate, *others))

    with (
        OffloadClient(directory, engine=engine, timeout=TIMEOUT) as client,
        zmq.Context() as context,
    ):
        client.open_namespace(fingerprint, cpu_bytes_to_use=8 * MAX_KEYS * PAGE, mirror=False)
        tensor = shared_empty((MAX_KEYS, PAGE), device="cpu")
        timeline = Timeline.create("cpu")
        client.register_kv_caches({"layer": tensor}, num_blocks=MAX_KEYS, timeline=timeline)
        sockets = [context.socket(zmq.DEALER) for _ in range(2)]
        for dealer in sockets:
            for option in (zmq.SNDHWM, zmq.RCVHWM):
                dealer.setsockopt(option, 2)
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.connect(f"ipc://{directory / 'kvferry.sock'}")
            dealer.send(encode(make_hello("rude", engine)))
            dealer.send(encode(OpenNamespace(1, fingerprint)))
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for dealer in sockets:
                if dealer.poll(1, zmq.POLLOUT):
                    dealer.send(encode(message()))
                    sent += 1
        for dealer in sockets:
            dealer.close()
        timeline.close()
    return sent


def send_layouts(directory: Path, seconds: float) -> int:
    largest = KVLayout(TENSORS, (REFS,) * (MAX_REFS // MAX_TENSORS))
    too_large = KVLayout(TENSORS, (*largest.groups, REFS[:1]))
    too_many_bytes = msgspec.msgpack.encode(
        ["allocatekvcaches", 1, [TENSORS, [REFS] * 60, 1], None, None, False]
    )
    end, sent = time.monotonic() + seconds, 0
    with RawClient(directory, "rude", timeout=TIMEOUT) as raw:
        while time.monotonic() < end:
            raw.send(too_many_bytes)
            raw.send(AllocateKVCaches(2, too_large))
            raw.send(AllocateKVCaches(3, largest, (1 << 48) - 1))
            for _ in range(3):
                raw.recv(Error)
                sent += 1
    return sent


def connect_with_chosen_ids(directory: Path, seconds: float) -> int:
    end, opened = time.monotonic() + seconds, deque[zmq.Socket[bytes]]()
    with zmq.Context() as context:
        context.set(zmq.MAX_SOCKETS, 2 * MAX_OPEN)
        for number in itertools.count():
            if time.monotonic() > end:
                break
            routing_id = b"\0" + (number << 12 & 0xFFFFFFFF).to_bytes(4, "big")
            dealer = context.socket(zmq.DEALER)
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.setsockopt(zmq.ROUTING_ID, routing_id)
            dealer.connect(f"ipc://{directory / 'kvferry.sock'}")
            dealer.send(b"no message")
            opened.append(dealer)
            if len(opened) > MAX_OPEN:
                opened.popleft().close()
            time.sleep(0.001)
        while opened:
            opened.popleft().close()
    return number


def connect_silently(directory: Path, seconds: float) -> int:
    end, opened, connected = time.monotonic() + seconds, deque[socket.socket](), 0
    while time.monotonic() < end:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.setblocking(False)
        with suppress(BlockingIOError):  # the kernel's queue is full
            connection.connect(str(directory / "fds.sock"))
            connected += 1
        opened.append(connection)
        if len(opened) > MAX_OPEN:
            opened.popleft().close()
        time.sleep(0.001)
    for connection in opened:
        connection.close()
    return connected


def send_as_sibling(directory: Path, seconds: float) -> int:
    keys = tuple(os.urandom(MAX_KEY_BYTES) for _ in range(MAX_USES))
    fingerprint, sent = Fingerprint("model", PAGE, key_bytes=MAX_KEY_BYTES), 0
    composition, nbytes = Composition(((PAGE,),), 1).number, 2 * MAX_USES * PAGE
    with OffloadClient(directory, engine=f"rude {os.getpid()}", timeout=TIMEOUT) as client:
        name = client.open_namespace(fingerprint, cpu_bytes_to_use=nbytes).name
        client.allocate_kv_caches(KVLayout((TensorLayout(MAX_USES, PAGE, PAGE),), (REFS[:1],)))
        client.transfer_async(1, (GPULoadStoreSpec(range(MAX_USES)), KeyLoadStoreSpec(keys)))
        client.wait([1])
        requests: list[ClientMessage] = [
            Uses(name, keys),
            BorrowMemory(1, name, composition),
            BorrowMemory(2, name, composition, 0),
        ]
        with RawClient(directory, f"rude sibling {os.getpid()}", timeout=TIMEOUT) as raw:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                for request in requests:
                    raw.send(request)
                    sent += 1
                assert raw.recv(MemoryLent).region
    return sent


KINDS: dict[str, Callable[[Path, float], int]] = {
    "largest": send_largest,
    "layouts": send_layouts,
    "ids": connect_with_chosen_ids,
    "silent": connect_silently,
    "sibling": send_as_sibling,
}


def main(arguments: Sequence[str] = sys.argv[1:]) -> None:
    directory, kind, seconds = arguments
    try:
        print(KINDS[kind](Path(directory), float(seconds)), flush=True)
    except (KVFerryError, TimeoutError) as error:
        sys.exit(f"{kind}: {error}")


if __name__ == "__main__":
    main()
