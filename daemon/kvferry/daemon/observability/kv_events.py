"""KV events for routers and indexers, published by a separate process (kv_events_process.py).

The daemon owns the listening socket. The process starts when the first subscriber connects, and is
restarted if it ends: subscribers then reconnect and see a gap in the sequence numbers. Events are
sent to the process only while there are subscribers, through a bounded channel. Events that do not
fit are dropped, which is also a gap. Event loop only.
"""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import sys
import time
from contextlib import suppress
from pathlib import Path

import msgspec
import structlog

from kvferry.daemon.core.actions import PublishKVEvents
from kvferry.daemon.observability.kv_events_process import MEMORY_BUDGET, SIZE, ChannelMessage
from kvferry.daemon.observability.tcp_listener import listen_tcp, parse_address
from kvferry.proto.errors import Code, Refused
from kvferry.proto.keys import EventKind

# Bytes in the channel above which events are dropped. The kernel's buffer is not counted.
MAX_QUEUED_BYTES = 4 << 20
BACKLOG = 64
# Seconds before the process is restarted: a process that always exits at once must not use a core.
RESTART_SECONDS = 1.0
# The first sequence number of each process is a multiple of this, above all earlier numbers.
NUMBERS_PER_PROCESS = 1 << 32
PROCESS, TITLE = "kvferry.daemon.observability.kv_events_process", "KV events"

log = structlog.get_logger()


class KVEventPublisher(asyncio.Protocol):
    """Publishes at `address`: ipc://path, ipc://@name, tcp://host:port, or "off".

    restart_after, max_queued_bytes: see RESTART_SECONDS and MAX_QUEUED_BYTES. Raises Refused
    (BAD_CONFIG). As an asyncio protocol it is the daemon's end of the channel.
    """

    def __init__(
        self,
        address: str,
        *,
        restart_after: float = RESTART_SECONDS,
        max_queued_bytes: int = MAX_QUEUED_BYTES,
    ) -> None:
        self._restart_after, self._max_queued_bytes = restart_after, max_queued_bytes
        self._loop = asyncio.get_running_loop()
        self._encoder = msgspec.msgpack.Encoder()
        self._channel: asyncio.WriteTransport | None = None
        self._subscribed = False
        self._missed = False
        self._file: tuple[Path, int] | None = None
        self._task: asyncio.Task[None] | None = None
        if address == "off":
            return
        try:
            self._listener = _listen(address)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise Refused(
                Code.BAD_CONFIG,
                f"cannot publish at events.publish = {address!r} ({reason}); set ipc://path, "
                'tcp://host:port or "off"',
                address,
            ) from error
        path = _path(address)
        if path is not None:
            self._file = path, path.lstat().st_ino
        self._task = self._loop.create_task(self._serve())

    @property
    def wanted(self) -> bool:
        """Whether there is a subscriber, or a client that connected and may subscribe."""
        return self._subscribed

    @property
    def queued_bytes(self) -> int:
        """Bytes in the channel that the kernel has not taken yet."""
        return 0 if self._channel is None else self._channel.get_write_buffer_size()

    def publish(self, action: PublishKVEvents) -> None:
        """Send events to the process, or drop them."""
        channel = self._channel
        if not self._subscribed or channel is None:
            self._missed = True
            return
        if not any(event.kind in PUBLISHED for event in action.key_events.events):
            return
        if self.queued_bytes > self._max_queued_bytes:
            self._missed = True
            return
        data = self._encoder.encode(
            ChannelMessage(
                self._missed,
                action.namespace,
                action.block_size,
                time.time(),
                action.key_events,
                action.place,
            )
        )
        self._missed = False
        channel.write(SIZE.pack(len(data)) + data)

    async def close(self) -> None:
        """Stop the process and close the socket."""
        if self._task is None:
            return
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        self._listener.close()
        if self._file is not None:
            path, inode = self._file
            with suppress(OSError):  # the daemon is stopping, and the next one replaces the file
                if path.lstat().st_ino == inode:
                    path.unlink()

    # The channel

    def data_received(self, data: bytes) -> None:
        self._subscribed = data[-1] != 0

    def connection_lost(self, exc: Exception | None) -> None:
        self._subscribed = False

    # The process

    async def _serve(self) -> None:
        first = 0
        while True:
            await self._wait_for_connection()
            status = await self._run_process(first)
            log.warning(
                "KV event publisher exited; it restarts for the next subscriber",
                exit_status=status,
                memory_budget=MEMORY_BUDGET,
            )
            first += NUMBERS_PER_PROCESS
            await asyncio.sleep(self._restart_after)

    async def _wait_for_connection(self) -> None:
        connecting = asyncio.Event()
        self._loop.add_reader(self._listener, connecting.set)
        try:
            await connecting.wait()
        finally:
            self._loop.remove_reader(self._listener)

    async def _run_process(self, first: int) -> int | str:
        """Run one process to its end. Return its exit status, or why it could not be started."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._channel, _ = await self._loop.create_unix_connection(lambda: self, sock=ours)
                # The client that connected will subscribe: send events from now on.
                self._subscribed = True
                process = await self._start(theirs, first)
            try:
                return await process.wait()
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
        except OSError as error:
            return str(error)
        finally:
            self._subscribed = False
            self._missed = True
            if self._channel is not None:
                self._channel.abort()
                self._channel = None

    async def _start(self, channel: socket.socket, first: int) -> asyncio.subprocess.Process:
        # libzmq uses the listening socket, and only the transport of the address.
        ipc = self._listener.family == socket.AF_UNIX
        address = "ipc://kvferry-events" if ipc else "tcp://127.0.0.1:1"
        passed = channel.fileno(), self._listener.fileno()
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            PROCESS,
            TITLE,
            *map(str, passed),
            address,
            str(first),
            stdin=asyncio.subprocess.DEVNULL,
            pass_fds=passed,
        )


# Kinds that are published. Pending and failed stores do not concern subscribers.
PUBLISHED = EventKind.STORED, EventKind.REMOVED, EventKind.CLEARED


def _path(address: str) -> Path | None:
    """The file of an ipc address; None for tcp and for abstract names, which begin with @."""
    place = address.removeprefix("ipc://")
    return None if place == address or place.startswith("@") else Path(place)


def _listen(address: str) -> socket.socket:
    """Raises OSError and ValueError."""
    if address.startswith("ipc://"):
        listener = _listen_at_path(address)
    elif address.startswith("tcp://"):
        listener = listen_tcp(*parse_address(address.removeprefix("tcp://")), BACKLOG)
    else:
        raise ValueError("unknown transport")
    listener.setblocking(False)
    return listener


def _listen_at_path(address: str) -> socket.socket:
    path = _path(address)
    if path is not None and path.exists() and stat.S_ISSOCK(path.lstat().st_mode):
        path.unlink()  # left by a daemon that was killed
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(os.fsencode(path) if path else b"\0" + address[7:].encode())
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener
