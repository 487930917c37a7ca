"""Hostile clients in a process of their own, for some seconds.

    python -m support.attackers DIRECTORY KIND SECONDS

KIND: "layouts", layouts of a million references, of one reference too many, and valid ones that do
not fit into the pool; "ids", connections with routing ids in the form of those that libzmq chooses,
opened and closed all the time; "silent", connections to the descriptor socket that send nothing.
"""

from __future__ import annotations

import itertools
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import zmq

from kvferry.proto.errors import KVFerryError
from kvferry.proto.messages import AllocateKVCaches, Error
from kvferry.proto.specs import MAX_REFS, MAX_TENSORS, KVLayout, TensorLayout, TensorRef
from support.raw_client import RawClient

# Connections that are open at the same time.
MAX_OPEN = 200


def send_layouts(directory: Path, seconds: float) -> int:
    tensors = (TensorLayout(1, 64, 64),) * MAX_TENSORS
    refs = tuple(TensorRef(tensor, 64) for tensor in range(MAX_TENSORS))
    largest = KVLayout(tensors, (refs,) * (MAX_REFS // MAX_TENSORS))
    too_large = KVLayout(tensors, (*largest.groups, refs[:1]))
    million = msgspec.msgpack.encode(
        ["allocatekvcaches", 1, [tensors, [refs] * 256, 1], None, None, False]
    )
    end, sent = time.monotonic() + seconds, 0
    with RawClient(directory, "rude", timeout=60) as raw:
        while time.monotonic() < end:
            raw.send(million)
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


KINDS: dict[str, Callable[[Path, float], int]] = {
    "layouts": send_layouts,
    "ids": connect_with_chosen_ids,
    "silent": connect_silently,
}


def main(arguments: Sequence[str] = sys.argv[1:]) -> None:
    directory, kind, seconds = arguments
    try:
        print(KINDS[kind](Path(directory), float(seconds)), flush=True)
    except (KVFerryError, TimeoutError) as error:
        sys.exit(f"{kind}: {error}")


if __name__ == "__main__":
    main()
