"""A daemon's sockets without a daemon: a sibling that answers what a test wants."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec
import zmq

from kvferry.proto import messages as wire
from kvferry.proto.codec import decode_client_message, decode_descriptor_request, encode
from kvferry.proto.fd_passing import FdHandles, FetchFd
from kvferry.proto.lending import (
    BlocksLocated,
    BorrowNamespace,
    BorrowPool,
    LocateBlocks,
    NamespaceLent,
    PoolLent,
    ResetLent,
)
from kvferry.proto.status import DeviceInfo, Limits

Answers: TypeAlias = Sequence[wire.DaemonMessage | bytes]
# Milliseconds between two looks whether the test has ended.
POLL_MS = 20
CHUNK = 1 << 16


class FakeSibling:
    """Answers each message with what `answer` returns; honest where a test replaces nothing.

    received: all messages. descriptors: by the handles of PoolLent; table: that of the block table,
    which is the incarnation page, too.
    keys: of its namespace.
    """

    def __init__(self, directory: Path, descriptors: dict[int, int]) -> None:
        self.received: list[wire.ClientMessage] = []
        self.descriptors = descriptors
        self.table: int | None = None
        self.keys: tuple[bytes, ...] = ()
        self.generation = 1
        self.answer: Callable[[wire.ClientMessage], Answers] = self.honest_answer
        # Messages to send to all sessions, unasked.
        self.unasked: list[wire.DaemonMessage | bytes] = []
        self._stopping = threading.Event()
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.bind(f"ipc://{directory / 'kvferry.sock'}")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(directory / "fds.sock"))
        self._listener.listen()
        self._listener.settimeout(POLL_MS / 1000)
        self._threads = [threading.Thread(target=each) for each in (self._serve, self._pass_fds)]
        for thread in self._threads:
            thread.start()

    def honest_answer(self, message: wire.ClientMessage) -> Answers:
        match message:
            case wire.Hello():
                device, limits = DeviceInfo("cpu", "cpu", "host memory"), Limits(1 << 20, 1, 1)
                return [wire.Welcome(1, "boot", "s", "0.1", 1, device, limits)]
            case BorrowNamespace(number):
                lent = NamespaceLent(number, self.generation)
                if not self.generation:
                    return [lent]
                return [lent, wire.Snapshot(0, 0, False, self.keys, True, self.generation)]
            case BorrowPool(number):
                handles = tuple(each for each in self.descriptors if each != self.table)
                pool = PoolLent(number, CHUNK, 0, len(handles), handles)
                return [msgspec.structs.replace(pool, table=self.table, page=self.table)]
            case LocateBlocks(number, keys):
                return [BlocksLocated(number, *[(0,) * len(keys)] * 3)]
            case ResetLent(number):
                return [wire.Done(number)]
        return []

    def close(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        self._listener.close()
        self._router.close()
        self._context.term()

    def _serve(self) -> None:
        identities = set[bytes]()
        while not self._stopping.is_set():
            while self.unasked:
                for identity in identities:
                    self._send(identity, self.unasked[0])
                del self.unasked[0]
            if not self._router.poll(POLL_MS):
                continue
            identity, data = self._router.recv_multipart()
            identities.add(identity)
            received = decode_client_message(data)
            self.received.append(received)
            for message in self.answer(received):
                self._send(identity, message)

    def _send(self, identity: bytes, message: wire.DaemonMessage | bytes) -> None:
        data = message if isinstance(message, bytes) else encode(message)
        self._router.send_multipart([identity, data])

    def _pass_fds(self) -> None:
        while not self._stopping.is_set():
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            with connection:
                packet = connection.recv(4096)
                if not packet:  # whether this daemon runs
                    continue
                request = decode_descriptor_request(packet)
                assert isinstance(request, FetchFd)
                reply = encode(FdHandles((request.handle,)))
                socket.send_fds(connection, [reply], [self.descriptors[request.handle]])
