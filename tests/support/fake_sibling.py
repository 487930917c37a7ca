"""A sibling that answers as a test says: sockets as those of a daemon, in a thread."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import msgspec
import zmq

from kvferry.proto import messages as wire
from kvferry.proto.codec import (
    decode_client_message,
    decode_descriptor_request,
    encode,
)
from kvferry.proto.fd_passing import FdHandles, FetchFd
from kvferry.proto.lending import BorrowMemory, MemoryLent, Uses
from kvferry.proto.protocol import protocol_number
from kvferry.proto.status import DeviceInfo, Limits


class FakeSibling:
    """answer: returns what follows a BorrowMemory, one or several encoded messages. files: the
    descriptors behind handles."""

    def __init__(self, directory: Path, answer: Callable[[BorrowMemory], list[bytes]]) -> None:
        self.directory, self.answer = directory, answer
        self.files = dict[int, int]()
        self.uses = list[Uses]()
        self.asked, self.sessions = list[BorrowMemory](), 0
        directory.mkdir(exist_ok=True)
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.bind(f"ipc://{directory / 'kvferry.sock'}")
        self._fds = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._fds.bind(str(directory / "fds.sock"))
        self._fds.listen(64)
        self._ends = threading.Event()
        self._threads = [threading.Thread(target=each) for each in (self._serve, self._pass_fds)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._ends.set()
        self._fds.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._fds.close()
        self._router.close(0)
        self._context.term()
        for name in ("kvferry.sock", "fds.sock"):
            (self.directory / name).unlink(missing_ok=True)

    def __enter__(self) -> FakeSibling:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _serve(self) -> None:
        device, limits = DeviceInfo("cpu", "cpu", "host memory"), Limits(1 << 20, 1 << 10, 8)
        while not self._ends.is_set():
            if not self._router.poll(10):
                continue
            identity, data = self._router.recv_multipart()
            match decode_client_message(data):
                case wire.Hello():
                    self.sessions += 1
                    welcome = wire.Welcome(
                        protocol_number(), "boot", "s1", "0.1", os.getpid(), device, limits
                    )
                    self._router.send_multipart([identity, encode(welcome)])
                case BorrowMemory() as request:
                    self.asked.append(request)
                    for message in self.answer(request):
                        self._router.send_multipart([identity, message])
                case Uses() as uses:
                    self.uses.append(uses)

    def _pass_fds(self) -> None:
        while not self._ends.is_set():
            try:
                connection, _ = self._fds.accept()
            except OSError:
                return
            with connection:
                if not (packet := connection.recv(4096)):
                    continue
                request = decode_descriptor_request(packet)
                assert isinstance(request, FetchFd)
                reply = encode(FdHandles((request.handle,)))
                socket.send_fds(connection, [reply], [self.files[request.handle]])


def answer_with(lent: MemoryLent) -> Callable[[BorrowMemory], list[bytes]]:
    """Answers that describe a region, and lend its chunk 0 (handle 1), table (2) and page (3)."""

    def answer(request: BorrowMemory) -> list[bytes]:
        reply = msgspec.structs.replace(lent, request_id=request.request_id)
        if request.first is not None:
            reply = msgspec.structs.replace(reply, handles=(1,), table=2, page=3)
        return [encode(reply)]

    return answer
