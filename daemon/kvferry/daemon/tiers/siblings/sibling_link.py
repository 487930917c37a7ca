"""The session of this daemon at one sibling, for one namespace.

    connecting --NamespaceLent, pool mapped--> on <--> "its namespace was reset"
        ^___________ lost, or no answer ________|

Once per second the link borrows the namespace again: that shows whether the sibling answers, and
compares the generations. A sibling whose namespace is behind has missed a reset, and resets it.
Messages of a sibling are checked like those of a client. Called on the thread of the links' event
loop, except where a method says otherwise.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TypeVar

import structlog
import zmq

from kvferry.client.transport.connection import Connection
from kvferry.client.transport.fd_client import FdExchange
from kvferry.daemon.tiers.siblings.key_feed import KeyFeed
from kvferry.daemon.tiers.siblings.key_table import KeyTable
from kvferry.daemon.tiers.siblings.mapped_pool import MappedPool
from kvferry.proto import messages as wire
from kvferry.proto.codec import decode_daemon_message, encode
from kvferry.proto.errors import Code, ErrorInfo, Gone, KVFerryError, Refused, error_of
from kvferry.proto.fd_passing import FetchFd
from kvferry.proto.lending import (
    BlocksLocated,
    BorrowNamespace,
    BorrowPool,
    LocateBlocks,
    NamespaceLent,
    PoolLent,
    ResetLent,
)
from kvferry.proto.message import Message
from kvferry.proto.protocol import make_hello

# Seconds between two questions to a sibling, and between two attempts to connect.
ASK_EVERY = 1.0
# Seconds until a sibling that does not answer is disconnected, so that its memory is unmapped. It
# may have been stopped, or its machine is busy.
ANSWER_SECONDS = 5.0
# Seconds after which a sibling with an unanswered request gets no others: what a request of an
# engine loses if a sibling stops, once.
PROMPT_SECONDS = 0.2
# Seconds for a sibling to confirm a reset. If it does not, it must reset its namespace before
# anything is copied from it.
RESET_SECONDS = 4.0
# Messages of a sibling that are handled before others get their turn.
MESSAGES_AT_ONCE = 16
# Characters of a reason, which may be the sibling's: it must fit an answer to the daemon.
MAX_STATE = 512
ON = "on"
# The request id of the Hello, which has none.
_HELLO = 0
log = structlog.get_logger()
Reply = TypeVar("Reply", bound=Message)


class SiblingLink:
    """A session at one sibling, for one namespace.

    directory: of the sibling. store: see Namespace.store_name. keys: an empty table.

    state: ON, or why nothing is copied. keys: those of the sibling. pool: None if it is not mapped.
    """

    def __init__(self, directory: Path, store: str, keys: KeyTable) -> None:
        self.directory, self.store, self.keys = directory, store, keys
        self.state = "connecting"
        # Of this daemon's namespace; None: it has no session.
        self._own_generation: int | None = None
        self.pool: MappedPool | None = None
        self._feed = KeyFeed(store, keys)
        self._connection: Connection | None = None
        # Why there is no connection. Not the exception: its traceback would keep a pool.
        self._error = ErrorInfo(Code.DAEMON_GONE, "the sibling is not connected yet")
        self._pending: dict[int, tuple[asyncio.Future[Message], float]] = {}
        self._numbers = count(_HELLO + 1)
        # Resets of this daemon, and how many of them the sibling has done, or had nothing to reset.
        self._resets = self._confirmed = 0
        self._resetting, self._reset_done = asyncio.Lock(), asyncio.Event()
        # Whether a process listens in the directory.
        self._is_alive = True

    @property
    def is_usable(self) -> bool:
        """Whether blocks can be copied now. Any thread."""
        now = time.monotonic()
        return self._is_current and all(
            now - begun < PROMPT_SECONDS for _, begun in tuple(self._pending.values())
        )

    @property
    def window(self) -> int:
        """Of the mapped pool, see LentFiles; -1 if there is none. Any thread."""
        pool = self.pool
        return -1 if pool is None else pool.window

    def note_generation(self, generation: int | None) -> None:
        """The generation of this daemon's namespace. Any thread."""
        self._own_generation = generation
        self._update()

    async def run(self) -> None:
        """Keep the session, until cancelled."""
        while True:
            try:
                await self._keep_session()
            except Exception as error:
                self._lose(error)
                if isinstance(error, Refused) or not self._is_alive:
                    self._reset_done.set()  # there is nothing to wait for
            finally:
                self._disconnect()
            await asyncio.sleep(ASK_EVERY)

    async def locate(self, keys: Sequence[bytes], seconds: float) -> BlocksLocated:
        """Where the blocks of keys are. Raises KVFerryError if the sibling does not answer."""
        message = LocateBlocks(next(self._numbers), tuple(keys))
        located = await self._request(message, BlocksLocated, seconds)
        if {len(located.offsets), len(located.checksums), len(located.versions)} != {len(keys)}:
            raise self._wrong_reply(located)
        return located

    async def reset(self) -> None:
        """Reset the sibling's namespace. Nothing is copied until the sibling has confirmed it."""
        self._resets += 1
        self._reset_done.clear()
        self._update()
        with suppress(KVFerryError, TimeoutError):  # then the session repeats it
            async with asyncio.timeout(RESET_SECONDS):
                if self._feed.generation:
                    await self._send_reset()
                elif self._is_alive:
                    await self._reset_done.wait()

    # The session

    async def _keep_session(self) -> None:
        loop = asyncio.get_running_loop()
        self._check_alive()
        self._connection = Connection(self.directory)
        for descriptor in self._connection.filenos():
            loop.add_reader(descriptor, self._receive)
        name = f"sibling-{os.getppid()}"
        welcome = await self._request(make_hello(name, name), wire.Welcome, ANSWER_SECONDS)
        while True:
            await self._borrow(welcome.session_id)
            self._update()
            await asyncio.sleep(ASK_EVERY)

    def _check_alive(self) -> None:
        """Raise Gone if no process listens: ZeroMQ would wait for one."""
        self._is_alive = False
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as probe:
            try:
                probe.connect(str(self.directory / "fds.sock"))
            except BlockingIOError:  # many others connect
                pass
            except OSError as error:
                raise Gone(Code.DAEMON_GONE, f"no daemon runs there ({error.strerror})") from error
        self._is_alive = True

    async def _borrow(self, session: str) -> None:
        snapshot, self._feed.is_incomplete = self._feed.is_incomplete, False
        # A reset that is due raises the generation by itself. If both did, the sibling would be
        # ahead, and this daemon would be reset.
        resets = self._resets
        generation = 0 if self._confirmed < resets else self._own_generation or 0
        message = BorrowNamespace(next(self._numbers), self.store, generation, snapshot)
        lent = await self._request(message, NamespaceLent, ANSWER_SECONDS)
        self._feed.generation = lent.generation
        if not lent.generation:
            self.pool, self.state = None, "it has no namespace with these blocks"
            self._confirm(resets)
            return
        await self._send_reset()
        if self.pool is None:
            self.pool = await self._map_pool(session)
        self._require_connection()
        same = self._feed.generation == self._own_generation
        self.state = ON if same else "its namespace was reset, and this one was not yet"

    @property
    def _is_current(self) -> bool:
        """Whether there is a pool, and both namespaces have had the same resets. Any thread."""
        same = self._feed.generation == self._own_generation
        return self.pool is not None and same and self._confirmed == self._resets

    def _update(self) -> None:
        """Show the daemon whether blocks can be copied."""
        self.keys.is_active = self._is_current

    async def _send_reset(self) -> None:
        """Have the sibling reset its namespace, if it has not confirmed all resets."""
        async with self._resetting:
            if self._confirmed < (resets := self._resets):
                await self._request(ResetLent(next(self._numbers)), wire.Done, RESET_SECONDS)
                self._confirm(resets)

    def _confirm(self, resets: int) -> None:
        self._confirmed = resets
        if resets == self._resets:
            self._reset_done.set()

    async def _map_pool(self, session: str) -> MappedPool:
        pool, first = None, 0
        while True:
            message = BorrowPool(next(self._numbers), first)
            lent = await self._request(message, PoolLent, ANSWER_SECONDS)
            if pool is None:
                pool = MappedPool(lent.chunk_bytes, lent.start)
                first = pool.first
            if lent.first != first:
                raise self._wrong_reply(lent)
            for handle in lent.handles:
                pool.add_chunk(await self._fetch_fd(session, handle))
            if lent.table is not None:
                pool.add_table(await self._fetch_fd(session, lent.table))
            if lent.page is not None:
                pool.add_page(await self._fetch_fd(session, lent.page), lent.incarnation)
            first += len(lent.handles)
            if first >= lent.end or not lent.handles:
                pool.map()
                return pool

    async def _fetch_fd(self, session: str, handle: int) -> int:
        deadline = time.monotonic() + ANSWER_SECONDS
        with FdExchange(self.directory, FetchFd(session, handle)) as exchange:
            while (reply := exchange.read_reply()) is None:
                if time.monotonic() > deadline:
                    raise _silent(self.directory, ANSWER_SECONDS)
                await asyncio.sleep(0.001)
        if len(reply[1]) != 1:
            text = f"the sibling passed {len(reply[1])} descriptors, not one"
            raise Refused(Code.BAD_MESSAGE, text, len(reply[1]))
        return reply[1][0]

    # Messages

    async def _request(
        self, message: wire.ClientMessage, kind: type[Reply], seconds: float
    ) -> Reply:
        """The reply to a message. Raises KVFerryError."""
        connection = self._require_connection()
        number: int = getattr(message, "request_id", _HELLO)
        future = asyncio.get_running_loop().create_future()
        self._pending[number] = future, time.monotonic()
        connection.send(encode(message))
        asyncio.get_running_loop().call_soon(self._receive)  # sending consumes the socket's edge
        try:
            async with asyncio.timeout(seconds):  # wait_for may lose a cancellation
                reply = await future
        except TimeoutError:
            raise _silent(self.directory, seconds) from None
        finally:
            del future  # with its exception it is a cycle, which would keep a pool
        if not isinstance(reply, kind):
            raise self._wrong_reply(reply)
        return reply

    def _require_connection(self) -> Connection:
        if self._connection is None:
            raise error_of(self._error)
        return self._connection

    def _receive(self) -> None:
        if self._connection is None:
            return
        try:
            if self._connection.receive_messages(self._handle, MESSAGES_AT_ONCE):
                asyncio.get_running_loop().call_soon(self._receive)
            self._connection.check_alive()
        except Exception as error:
            self._lose(error)

    def _handle(self, data: bytes) -> None:
        match decode_daemon_message(data):
            case wire.Snapshot() | wire.KeyEvents() as message:
                self._feed.apply(message)
                self._update()
            case wire.Error(request_id, info):
                number = _HELLO if request_id is None else request_id
                self._resolve(number, error_of(info))
            case wire.Goodbye(reason):
                raise Gone(Code.DAEMON_GONE, f"the sibling closed the session: {reason}")
            case reply:
                self._resolve(getattr(reply, "request_id", _HELLO), reply)

    def _resolve(self, number: int, reply: Message | KVFerryError) -> None:
        future, _ = self._pending.pop(number, (None, 0.0))
        if future is None or future.done():
            return
        if isinstance(reply, KVFerryError):
            future.set_exception(reply)
            future.exception()  # its request may have ended
        else:
            future.set_result(reply)

    # The end

    def _lose(self, error: Exception) -> None:
        """The session has ended, or the sibling cannot be trusted. `run` connects again."""
        if not isinstance(error, KVFerryError):
            if not isinstance(error, OSError | zmq.ZMQError):
                reason = "".join(traceback.format_exception(error, limit=-4))
                log.error("sibling disconnected", sibling=str(self.directory), reason=reason)
            error = Gone(Code.DAEMON_GONE, f"the session with the sibling failed: {error!r}")
        self._error = error.info
        self._disconnect()
        self.state = str(error)[:MAX_STATE]

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        self.pool = None
        if self.state == ON:
            self.state = "connecting"
        self._update()
        self._feed.end()
        for future, _ in tuple(self._pending.values()):
            if not future.done():
                future.set_exception(error_of(self._error))
                future.exception()  # its request may have ended
        self._pending.clear()
        if connection is not None:
            for descriptor in connection.filenos():
                asyncio.get_running_loop().remove_reader(descriptor)
            connection.close(linger=False)

    def _wrong_reply(self, reply: Message) -> Refused:
        """The error of a reply that the sibling must not send, which ends the session."""
        kind = type(reply).__name__
        text = f"the sibling sent a wrong {kind}; install the same kvferry on both sides"
        error = Refused(Code.BAD_MESSAGE, text, kind)
        self._lose(error)
        return error


def _silent(sibling: Path, seconds: float) -> Gone:
    text = f"the sibling does not answer within {seconds:g} s; it may be stopped"
    return Gone(Code.TIMEOUT, text, str(sibling))
