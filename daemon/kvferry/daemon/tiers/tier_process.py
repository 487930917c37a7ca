"""Starts, kills, reaps and restarts the process of a tier. Event loop only."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import socket
import struct
import subprocess
import termios
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog

from kvferry.daemon.processes import start_worker
from kvferry.daemon.tiers.messages import (
    MAX_BYTES,
    TierArguments,
    TierReply,
    TierRequest,
    decode_reply,
    encode,
)

WORKER = "kvferry.daemon.tiers.tier_worker"
# Seconds for the process to write everything back when the daemon stops.
CLOSE_SECONDS = 10.0

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class TierTimes:
    """How long a tier may take, and how long one that fails is left alone, in seconds."""

    # Until the process has opened its tier. Registering a large pool with a network card takes
    # longest.
    start: float = 60.0
    # After a deadline, until a process that has not answered is killed. A busy or throttled device
    # takes a second for the reads that have begun; a process that is killed costs more than
    # waiting, because its tier gets no requests meanwhile.
    grace: float = 2.0
    # Until a process that has ended is started again: at first, and at most.
    first_restart: float = 0.2
    last_restart: float = 30.0
    # For which the circuit breaker turns the tier off: at first, and at most.
    first_off: float = 1.0
    longest_off: float = 60.0


DEFAULT_TIMES = TierTimes()


@dataclass(frozen=True, slots=True)
class TierSpec:
    """name: for logs and metrics. module, options: see TierArguments."""

    name: str
    module: str
    options: dict[str, Any]
    times: TierTimes = DEFAULT_TIMES


@dataclass(frozen=True, slots=True)
class PoolFiles:
    """The host pool: descriptors of its chunks, all but the last of `chunk_bytes`."""

    descriptors: Sequence[int]
    chunk_bytes: int
    nbytes: int


class TierProcess:
    """receive: called with each reply. lost: when no reply follows, with the reason; the process
    may still run. reaped: when the process is dead, so that it cannot touch the pool any more.
    """

    def __init__(
        self,
        spec: TierSpec,
        pool: PoolFiles,
        receive: Callable[[TierReply], None],
        lost: Callable[[str], None],
        reaped: Callable[[], None],
    ) -> None:
        self._spec, self._pool = spec, pool
        self._receive_reply, self._lost, self._reaped = receive, lost, reaped
        self._loop = asyncio.get_running_loop()
        self._outgoing: deque[bytes] = deque()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._restart_in = spec.times.first_restart
        # Starts the process, or kills it if it does not get ready.
        self._timer: asyncio.TimerHandle | None = None
        self._closed: asyncio.Future[None] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process; if that is impossible, try again later. It has `times.start`
        seconds until `note_started` is called.
        """
        pool = self._pool
        chunks = tuple(pool.descriptors)

        def arguments(number: int) -> list[str]:
            given = TierArguments(
                os.getpid(),
                number,
                chunks,
                pool.chunk_bytes,
                pool.nbytes,
                self._spec.module,
                self._spec.options,
            )
            return [msgspec.json.encode(given).decode()]

        try:
            self._process, self._socket = start_worker(WORKER, arguments, chunks)
        except OSError as error:
            log.warning("tier process cannot be started", tier=self._spec.name, reason=str(error))
            self._restart_later()
            return
        self._loop.add_reader(self._socket.fileno(), self._receive)
        self._pidfd = os.pidfd_open(self._process.pid)
        self._loop.add_reader(self._pidfd, self._reap)
        self._timer = self._loop.call_later(self._spec.times.start, self._kill_unready)

    def send(self, request: TierRequest) -> None:
        """Send a request, or keep it until the socket has room. It is lost if the process is."""
        if self._socket is not None:
            self._outgoing.append(encode(request))
            self._flush()

    def read_arrived(self) -> None:
        """Handle the replies that have arrived. Call it before a reply counts as late: if the event
        loop was busy, it may be among them."""
        if self._socket is None:
            return
        (left,) = struct.unpack("i", fcntl.ioctl(self._socket, termios.FIONREAD, bytes(4)))
        while left > 0 and self._socket is not None:
            left -= self._receive() or left

    def note_started(self) -> None:
        """The process has opened its tier."""
        self._stop_timer()

    def note_progress(self) -> None:
        """The process works: restart it soon if it ends."""
        self._restart_in = self._spec.times.first_restart

    def kill(self, why: str) -> None:
        """Kill the process; `reaped` follows."""
        if self._socket is None or self._process is None:
            return
        self._disconnect()
        self._process.send_signal(signal.SIGKILL)
        self._lost(why)

    async def close(self) -> None:
        """End the process after it has written everything back, or after CLOSE_SECONDS."""
        self._stop_timer()
        if self._process is None:
            return
        self._closed = self._loop.create_future()
        self._disconnect()
        try:
            await asyncio.wait_for(asyncio.shield(self._closed), CLOSE_SECONDS)
        except TimeoutError:
            log.warning("tier process killed", tier=self._spec.name, reason="it does not end")
            self._process.send_signal(signal.SIGKILL)
            await self._closed

    def _kill_unready(self) -> None:
        self.read_arrived()
        if self._timer is not None:
            self.kill(f"not ready within {self._spec.times.start} s")

    def _receive(self) -> int:
        """Handle the next reply, or the end. Returns the bytes of the reply; 0: there is none."""
        assert self._socket is not None
        try:
            data = self._socket.recv(MAX_BYTES)
        except BlockingIOError:
            return 0
        except OSError:
            data = b""
        if data:
            self._receive_reply(decode_reply(data))
        else:
            self.kill("it has ended")
        return len(data)

    def _flush(self) -> None:
        if self._socket is None:
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
        self._stop_timer()
        self._outgoing.clear()
        if self._socket is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())
            self._socket.close()
            self._socket = None

    def _reap(self) -> None:
        assert self._process is not None
        # What it sent before its end, such as the reason.
        while self._socket is not None and self._receive():
            pass
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        status, self._process = self._process.wait(), None
        if self._socket is not None:
            self._disconnect()
            self._lost("it has ended")
        self._reaped()
        if self._closed is not None:
            self._closed.set_result(None)
        else:
            log.warning("tier process ended", tier=self._spec.name, status=status)
            self._restart_later()

    def _restart_later(self) -> None:
        self._timer = self._loop.call_later(self._restart_in, self.start)
        self._restart_in = min(self._spec.times.last_restart, 2 * self._restart_in)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
