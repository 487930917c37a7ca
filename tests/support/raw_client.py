"""A session without the SDK: any bytes, any messages, in any order.

It shows how the daemon treats a wrong, old or hostile client; the SDK checks what it sends. A
`RawClient` sends nothing by itself, except Hello if it has the name of an engine.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import zmq

from kvferry.client.transport.fd_client import FdExchange, SocketBusy
from kvferry.client.wire import timed_out
from kvferry.proto.codec import decode_daemon_message, encode
from kvferry.proto.fd_passing import FdRequest, FetchFd, SendFds
from kvferry.proto.memory import FdAllocation, Location
from kvferry.proto.messages import (
    Allocated,
    AllocateKVCaches,
    ClientMessage,
    DaemonMessage,
    Finished,
    Goodbye,
    Registered,
    RegisterKVCaches,
    Submit,
    Welcome,
)
from kvferry.proto.protocol import make_hello
from kvferry.proto.results import JobResult
from kvferry.proto.specs import (
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    KVLayout,
    TensorLayout,
    TensorRef,
)
from support.time_limits import TIMEOUT

M = TypeVar("M")


class RawClient:
    """A DEALER connected to a daemon; with `engine`, with a session."""

    def __init__(
        self, directory: Path, engine: str | None = None, timeout: float = TIMEOUT
    ) -> None:
        self.directory, self.timeout = directory, timeout
        self.session = ""
        self.on_gpu = False
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        # If nobody calls `drop`: a context that is collected with its socket waits forever.
        self._dropped = weakref.finalize(self, _drop, self._context, self._socket)
        self._socket.connect(f"ipc://{directory / 'kvferry.sock'}")
        if engine is not None:
            try:
                welcome = self.ask(make_hello("raw", engine), Welcome)
            except BaseException:
                self.drop()
                raise
            self.on_gpu = welcome.device.kind != "cpu"

    def send(self, *frames: bytes | ClientMessage) -> None:
        """Send the frames of one message: bytes unchanged, messages encoded."""
        self._socket.send_multipart([f if isinstance(f, bytes) else encode(f) for f in frames])

    def recv(self, kind: type[M], timeout: float | None = None) -> M:
        """The next message of this kind; others are dropped."""
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or not self._socket.poll(int(left * 1e3) + 1):
                raise TimeoutError(f"no {kind.__name__} received")
            message: DaemonMessage = decode_daemon_message(self._socket.recv())
            if isinstance(message, Welcome | Goodbye):
                self.session = message.session_id if isinstance(message, Welcome) else ""
            if isinstance(message, kind):
                return message

    def ask(self, message: bytes | ClientMessage, kind: type[M]) -> M:
        self.send(message)
        return self.recv(kind)

    def result(self, job_id: int, timeout: float | None = None) -> JobResult:
        """The result of a job; results of other jobs are dropped."""
        while True:
            for result in self.recv(Finished, timeout).results:
                if result.job_id == job_id:
                    return result

    def deposit(self, *descriptors: int) -> tuple[int, ...]:
        return pass_fds(self.directory, SendFds(self.session), descriptors, self.timeout)[0]

    def register(self, num_blocks: int = 8, page: int = 64) -> Registered | Allocated:
        """Register one tensor in shared memory, without torch; on a GPU the daemon allocates it."""
        size = num_blocks * page
        if self.on_gpu:
            return self.ask(AllocateKVCaches(1, one_tensor(num_blocks, page), size), Allocated)
        descriptor = os.memfd_create("raw-tensor", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, size)
            (ticket,) = self.deposit(descriptor)
        finally:
            os.close(descriptor)
        allocations, locations = (FdAllocation(ticket, size),), (Location(0, 0),)
        layout = one_tensor(num_blocks, page)
        message = RegisterKVCaches(1, layout, allocations, locations, host_bytes=size)
        return self.ask(message, Registered)

    def close(self) -> None:
        """Send Goodbye if there is a session, then close."""
        try:
            if self.session:
                self.ask(Goodbye(), Goodbye)
        finally:
            self.drop()

    def drop(self) -> None:
        """Close the socket without Goodbye."""
        self._dropped()

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _drop(context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes]) -> None:
    socket.close()
    context.term()


def one_tensor(num_blocks: int = 8, page: int = 64, stride: int | None = None) -> KVLayout:
    """A layout of one tensor, one group, factor 1."""
    tensor = TensorLayout(num_blocks, page, stride or page)
    return KVLayout((tensor,), ((TensorRef(0, page),),))


def store(job_id: int, gpu: Sequence[int], host: Sequence[int], wait_for: int = 0) -> Submit:
    """The message that stores blocks of the only group."""
    src = GPULoadStoreSpec(np.asarray(gpu, dtype=np.int64))
    return Submit(job_id, src, CPULoadStoreSpec(np.asarray(host, dtype=np.int64)), wait_for)


def load(job_id: int, host: Sequence[int], gpu: Sequence[int], wait_for: int = 0) -> Submit:
    """The message that loads blocks of the only group."""
    back = store(job_id, gpu, host)
    return Submit(job_id, back.dst, back.src, wait_for)


def collect(directory: Path, session: str, ticket: int, timeout: float) -> int:
    """A descriptor that the daemon holds under a ticket."""
    _, (descriptor,) = pass_fds(directory, FetchFd(session, ticket), (), timeout)
    return descriptor


def pass_fds(
    directory: Path, request: FdRequest, descriptors: Sequence[int], timeout: float
) -> tuple[tuple[int, ...], list[int]]:
    """One exchange on the descriptor socket; raises Gone (TIMEOUT) and what the daemon replies."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            with FdExchange(directory, request, descriptors) as exchange:
                while (reply := exchange.read_reply()) is None:
                    _sleep_until(deadline, directory)
                return reply
        except SocketBusy:
            _sleep_until(deadline, directory)


def _sleep_until(deadline: float, directory: Path) -> None:
    """Sleep for a moment. Raises Gone (TIMEOUT) after the deadline."""
    if time.monotonic() > deadline:
        raise timed_out("no answer", str(directory))
    time.sleep(1e-3)
