"""The daemon's worker processes: Python modules that serve requests of the daemon.

The kernel kills such a process when the daemon dies, even if it is stopped or still starts: its
stdin is a pipe of which the daemon has the other end, and the kernel signals SIGKILL when that is
closed. A process cannot ask for that before it runs, and code cannot run in it before exec, because
the daemon has threads. The process's end is daemon_connection.py. Event loop only.
"""

from __future__ import annotations

import asyncio
import fcntl
import math
import os
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

import structlog

from kvferry.daemon.daemon_connection import MAX_DATAGRAM, NOTICE, NUMBER, READY

# Seconds for a killed process to end when the daemon stops. One that reads from a device that hangs
# takes longer; the kernel ends it after the daemon.
REAP_SECONDS = 10.0
R = TypeVar("R")

log = structlog.get_logger()


class ProcessDied(Exception):
    """The process that got a request is dead and reaped, so that it touches nothing any longer."""


@dataclass(frozen=True, slots=True)
class Program:
    """The program of a worker process. name: for the log, and its title in ps.

    module: its `main` calls `connect_to_daemon`, which returns `arguments`. descriptors: those that
    the process inherits, under the same numbers.
    """

    name: str
    module: str
    arguments: Sequence[str]
    descriptors: Sequence[int]


@dataclass(frozen=True, slots=True)
class ProcessTimes:
    """In seconds. start: until the process is ready; it is killed then.

    first_restart, last_restart: until a process that has ended is started again, at first and at
    most; each time it takes twice as long, until `note_progress`. end: for the process to end by
    itself.
    """

    start: float = 60.0
    end: float = 10.0
    first_restart: float = 0.2
    last_restart: float = 30.0


def _ignore(*_: object) -> None:
    """A hook that does nothing."""


def _seconds_from_now(seconds: float) -> Callable[[], float]:
    """Returns a function that returns how many of them are left."""
    end = time.monotonic() + seconds
    return lambda: end - time.monotonic()


def _spawn(program: Program, descriptor: int) -> subprocess.Popen[bytes]:
    """Start a process that inherits this socket, and ends with the daemon. Raises OSError."""
    read_end, write_end = os.pipe()
    command = [sys.executable, "-P", "-m", program.module, program.name]
    with os.fdopen(read_end, "rb", 0):
        try:
            process = subprocess.Popen(
                [*command, str(descriptor), str(os.getpid()), *program.arguments],
                stdin=read_end,
                pass_fds=(descriptor, *program.descriptors),
            )
        except OSError:
            os.close(write_end)
            raise
        weakref.finalize(process, os.close, write_end)
        fcntl.fcntl(read_end, fcntl.F_SETOWN, process.pid)
        fcntl.fcntl(read_end, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(read_end, fcntl.F_SETFL, os.O_ASYNC)
    return process


class ChildProcess:
    """A worker process, which is started again whenever it has ended, and the requests to it.

        start -> ready -> lost (killed, or it has ended) -> reaped -> pause -> start ...

    A request waits for a process that is ready, and fails with the process that got it, once that
    is reaped. So memory that a request names is safe when the request has ended. Its sender judges
    when it is late (`wait`), calls `kill`, and repeats it:

    - A tier bounds each request, and kills the process some time after a deadline. Only drops are
      repeated, until they are confirmed. `lost` trips the circuit breaker.
    - The checksum client calls `start` itself, so that an error refuses the start of the daemon. It
      repeats each request, and kills the process if no reply has arrived for some time. `lost`
      counts deaths and raises after too many, which ends `run` and so the daemon.

    notice: called with the payloads of READY and of notices. lost: called with the reason when the
    process is lost while `run` runs; also if none can be started, with `pid` None.
    """

    def __init__(
        self,
        program: Program,
        times: ProcessTimes,
        notice: Callable[[bytes], None] = _ignore,
        lost: Callable[[str], None] = _ignore,
    ) -> None:
        self._program, self._times = program, times
        self._notice, self._lost = notice, lost
        self._loop = asyncio.get_running_loop()
        self._numbers = count(READY + 1)
        # Requests without a reply, and those of a process that is lost and not reaped.
        self._requests: dict[int, tuple[asyncio.Future[Any], Callable[[bytes], Any]]] = {}
        self._doomed: set[asyncio.Future[Any]] = set()
        self._outgoing: deque[bytes] = deque()
        # None once it is reaped; its socket is None once it is lost.
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._is_ready = self._is_ending = self._was_ready = False
        self._restart_in = times.first_restart
        # An error of `notice` or of a `receive`, for `run`.
        self._error: Exception | None = None
        # Ends with the next change of any of these.
        self._changed: asyncio.Future[None] = self._loop.create_future()

    @property
    def pid(self) -> int | None:
        """None if there is no process, or it is reaped."""
        return None if self._process is None else self._process.pid

    @property
    def is_ready(self) -> bool:
        return self._is_ready

    @property
    def in_flight(self) -> int:
        """Requests that have not ended."""
        return len(self._requests) + len(self._doomed)

    def start(self) -> None:
        """Start the process. If this raises OSError, no process is left."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ExitStack() as undo:
            undo.callback(ours.close)
            with theirs:
                process = _spawn(self._program, theirs.fileno())
            undo.callback(process.wait)
            undo.callback(process.kill)
            self._pidfd = os.pidfd_open(process.pid)
            undo.pop_all()
        ours.setblocking(False)
        self._process, self._socket, self._was_ready = process, ours, False
        self._loop.add_reader(ours.fileno(), self._receive)
        self._loop.add_reader(self._pidfd, self._reap)

    async def run(self) -> None:
        """Start the process if it is not started, and again whenever it has ended, until cancelled.

        Then the process ends as by `close`. Raises what a hook has raised.
        """
        try:
            while True:
                if self._process is None:
                    try:
                        self.start()
                    except OSError as error:
                        self._call(self._lost, f"cannot start: {error}")
                limit = self._times.start
                if not await self._run_until(self._is_started, _seconds_from_now(limit)):
                    self.kill(f"not ready within {limit} s")
                await self._run_until(self._is_reaped)
                await asyncio.sleep(self._restart_in)
                self._restart_in = min(self._times.last_restart, 2 * self._restart_in)
        finally:
            await self.close()

    async def close(self) -> None:
        """Disconnect, after which the process ends by itself, or is killed."""
        self._is_ending = True
        self._disconnect()
        if not await self._until(self._is_reaped, _seconds_from_now(self._times.end)):
            log.warning("process killed", process=self._program.name, reason="it does not end")
            assert self._process is not None
            self._process.send_signal(signal.SIGKILL)
            await self._until(self._is_reaped, _seconds_from_now(REAP_SECONDS))

    def send(self, payload: bytes, receive: Callable[[bytes], R]) -> asyncio.Future[R]:
        """Send a request, once a process is ready and its socket has room.

        receive: called with the payload of the reply when it arrives; the future gets what it
        returns, or ProcessDied. Without `run` it may never end.
        """
        number, future = next(self._numbers), self._loop.create_future()
        self._requests[number] = future, receive
        self._outgoing.append(NUMBER.pack(number) + payload)
        self._flush()
        return future

    async def wait(
        self,
        reply: asyncio.Future[Any],
        seconds: float,
        progress: Callable[[], float] = lambda: 0.0,
    ) -> bool:
        """Wait for a reply. False: it is late, or the process is lost (see `is_late`).

        seconds: from the call on, from `progress()` on if that is later (in time.monotonic()), and
        from when the process is ready. A reply counts that has arrived and that the event loop was
        too busy to read. If the caller is cancelled, the request is not.
        """
        begun = math.inf

        def left() -> float:
            nonlocal begun
            if self._is_ready:
                begun = min(begun, time.monotonic())
            return max(begun, progress()) + seconds - time.monotonic()

        await self._until(lambda: reply.done() or reply in self._doomed, left, reply)
        return reply.done() and reply.exception() is None

    def is_late(self, reply: asyncio.Future[Any]) -> bool:
        """After `wait` was False: whether the process may still reply."""
        return self._is_ready and not reply.done()

    async def until_ready(self) -> None:
        await self._until(lambda: self._is_ready)

    def read_arrived(self) -> None:
        """Handle the messages that have arrived."""
        if self._socket is None:
            return
        (left,) = struct.unpack("i", fcntl.ioctl(self._socket, termios.FIONREAD, bytes(4)))
        while left > 0 and self._socket is not None:
            left -= self._receive() or left

    def note_progress(self) -> None:
        """The process works: restart it soon if it ends."""
        self._restart_in = self._times.first_restart

    def kill(self, why: str) -> None:
        """Kill the process, if it is not lost."""
        if self._socket is None or self._process is None:
            return
        self._process.send_signal(signal.SIGKILL)
        self._disconnect()
        if not self._is_ending:
            self._call(self._lost, why)

    def _is_started(self) -> bool:
        """Whether the process is ready, or will not get ready."""
        return self._is_ready or self._socket is None

    def _is_reaped(self) -> bool:
        return self._process is None

    async def _run_until(
        self, condition: Callable[[], bool], left: Callable[[], float] = lambda: math.inf
    ) -> bool:
        """Like `_until`, but raises what a hook has raised."""
        is_met = await self._until(lambda: self._error is not None or condition(), left)
        if self._error is not None:
            raise self._error
        return is_met

    async def _until(
        self,
        condition: Callable[[], bool],
        left: Callable[[], float] = lambda: math.inf,
        *futures: asyncio.Future[Any],
    ) -> bool:
        """Wait for a condition, which is judged after each change and when a future ends.

        False: it is still unmet when no seconds are left and all arrived messages are handled.
        """
        while True:
            if condition():
                return True
            seconds = left()
            if seconds > 0:
                ends = {self._changed, *futures}
                timeout = seconds if seconds < math.inf else None
                await asyncio.wait(ends, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            else:
                self.read_arrived()
                if left() <= 0:
                    return condition()

    def _note_change(self) -> None:
        changed, self._changed = self._changed, self._loop.create_future()
        changed.set_result(None)

    def _receive(self) -> int:
        """Handle the next message, or the end. Returns its bytes; 0: there is none."""
        assert self._socket is not None
        try:
            data = self._socket.recv(MAX_DATAGRAM)
        except BlockingIOError:
            return 0
        except OSError:
            data = b""
        if not data:
            self.kill("it has ended")
            return 0
        (number,), payload = NUMBER.unpack_from(data), data[NUMBER.size :]
        if number == READY:
            self._is_ready = self._was_ready = True
            self._call(self._notice, payload)
            self._flush()
            self._note_change()
        elif number == NOTICE:
            self._call(self._notice, payload)
        else:
            self._call(self._end_request, number, payload)
        return len(data)

    def _end_request(self, number: int, payload: bytes) -> None:
        future, receive = self._requests.pop(number)
        result = receive(payload)
        if not future.done():  # it is, if it was cancelled
            future.set_result(result)

    def _call(self, hook: Callable[..., None], *arguments: Any) -> None:
        """Call a hook; `run` raises its error."""
        try:
            hook(*arguments)
        except Exception as error:
            self._error = self._error or error
            self._note_change()

    def _flush(self) -> None:
        if self._socket is None or not self._is_ready:
            return
        try:
            while self._outgoing:
                self._socket.send(self._outgoing[0])
                self._outgoing.popleft()
        except BlockingIOError:
            self._loop.add_writer(self._socket.fileno(), self._flush)
            return
        except OSError:  # it has ended; `_receive` follows
            self._outgoing.clear()
        self._loop.remove_writer(self._socket.fileno())

    def _disconnect(self) -> None:
        if self._socket is None:
            return
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        self._socket = None
        if self._is_ready:
            self._is_ready = False
            self._doomed |= {future for future, _ in self._requests.values()}
            self._requests.clear()
            self._outgoing.clear()
        self._note_change()

    def _reap(self) -> None:
        assert self._process is not None
        # Messages that it sent before its end, such as the reason.
        while self._socket is not None and self._receive():
            pass
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.kill("it has ended")
        status, self._process = self._process.wait(), None
        if not self._is_ending:
            level = log.warning if self._was_ready or status < 0 else log.debug  # see `lost`
            level("process ended", process=self._program.name, status=status)
        doomed, self._doomed = self._doomed, set()
        for future in doomed:
            if not future.done():
                future.set_exception(ProcessDied(f"{self._program.name}: exit status {status}"))
                future.exception()  # it may have no reader
        self._note_change()
