"""The base of both clients: a session, its connection, and reconnecting. No call waits.

Each call that polls receives messages, detects a lost connection, and advances a reconnect. All
calls are made in the client's thread.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TypeAlias, TypeVar

import zmq

from kvferry.client.effects import Operation, interpret, run_until_deadline
from kvferry.client.endpoint import check_access, find_daemon, resolve_directory
from kvferry.client.reconnect import Reconnect
from kvferry.client.session import MAX_TIMEOUT, ClientSession, ConnectionState, timed_out
from kvferry.client.session_state import SessionState
from kvferry.client.transport.connection import Connection, NoConnection
from kvferry.proto.errors import Code, Gone, Refused
from kvferry.proto.messages import ClientMessage, Welcome

R = TypeVar("R")
DaemonDirectory: TypeAlias = Path | str | Callable[[], Path] | None


class ReconnectingClient:
    """A session and its connection.

    locate: the daemon's directory, or a function that returns it. state: see OffloadClient.
    """

    def __init__(
        self,
        locate: DaemonDirectory,
        engine: str,
        client: str,
        reconnect: bool,
        state: SessionState | None = None,
    ) -> None:
        if state is not None:
            state.check()
        self._connection: Connection | NoConnection = NoConnection()
        if callable(locate):
            self._locate = locate
        else:
            directory = resolve_directory(Path(locate)) if locate else find_daemon()
            check_access(directory)
            self._locate = lambda: directory
        self._session = ClientSession(
            engine, client, reconnects=reconnect or state is not None, restore=state
        )
        self._reconnect = Reconnect(
            self._session, self._locate, self._reopen_connection, self._send
        )
        self._next_check = 0.0
        self._mirror_expires = 0.0
        if state is None:
            self._connection = Connection(self._locate())
        _clients.add(self)

    @property
    def directory(self) -> Path:
        """The runtime directory of the daemon."""
        return self._connection.directory

    @property
    def engine(self) -> str:
        """The engine's name."""
        return self._session.engine

    @property
    def daemon(self) -> Welcome:
        """The daemon's Welcome: its version, device and limits. Call it only once connected."""
        assert self._session.welcome is not None
        return self._session.welcome

    @property
    def connected(self) -> bool:
        """Whether the session is restored, and no disconnect has been detected."""
        return self._session.state is ConnectionState.CONNECTED

    @property
    def connecting(self) -> bool:
        """Whether the daemon is disconnected, and polling this client reconnects."""
        return self.gone is not None and not self._session.closed

    @property
    def gone(self) -> Gone | None:
        """Why the client is not connected; None if it is, or if no disconnect was detected.

        If a daemon refuses to restore the session, its error is the `__cause__`.
        """
        return self._session.gone

    @property
    def incarnation(self) -> int:
        """Number of sessions so far: 1 at first, one more after each reconnect.

        After a reconnect, host blocks by number may have lost their bytes: if `region.reattached`
        is false, or, for a client without a registration, if it is another daemon. Loads of blocks
        that were not stored again are refused (STALE).
        """
        return self._session.incarnation

    def poll(self) -> None:
        """Receive messages and advance a reconnect; get_finished and lookup do it too."""
        self._refresh_mirror(time.monotonic())

    def abandon(self) -> None:
        """Abandon all jobs and the connection at once, also if the daemon is stopped or hangs.

        The timeline is revoked, every job in flight ends as LOST (get_finished returns it once),
        and polling reconnects with a new session, registration and timeline page. When this call
        has returned:

        - The daemon submits no further chunk of these jobs: it reads the page right before each
          copy and each kernel launch, also when it continues after SIGSTOP.
        - Only chunks that were submitted to the GPU before may still be copied: at most the chunks
          in flight, and none of a job whose `wait_for` was not reached.
        - When `connected` is true again, no chunk is in flight: a daemon accepts a registration of
          this engine only after the abandoned one is unmapped.

        So an engine that needs certainty reuses the blocks of jobs that may have begun only after
        `connected`. Without a timeline, only the last guarantee holds.

        The timeline's values continue, but the new page shows only those signalled after
        `connected`: signal again, then wait for that value. With reconnect=False the client closes.
        """
        if self._session.closed:
            return
        self._reconnect.restart()
        self._session.abandon()
        if not isinstance(self._connection, NoConnection):
            self._reopen_connection(self.directory)

    def _send(self, data: bytes) -> None:
        self._connection.send(data)

    def _poll_connection(self) -> None:
        self._receive_messages()
        self._check_connection()

    def _receive_messages(self) -> bool:
        """Receive messages. Returns whether there were any. Raises Gone if closed."""
        if self._connection.closed and self._session.gone is not None:
            raise self._session.gone.with_traceback(None)
        received = True
        try:
            received = self._connection.receive_messages(self._session.receive_message)
        finally:  # also after the error of one message: no other may follow
            if received:
                for data in self._session.follow_ups(time.monotonic()):
                    self._send(data)
        if self._session.gone is not None:
            self._advance_reconnect()
        return received

    def _refresh_mirror(self, now: float) -> None:
        self._mirror_expires = now + self._connection.mirror_max_age
        if not self._session.closed:
            self._receive_messages()
            self._check_connection_if_due(now)

    def _check_connection_if_due(self, now: float) -> None:
        if now > self._next_check:
            self._next_check = now + self._connection.alive_check_interval
            self._check_connection()

    def _check_connection(self) -> None:
        """Detect a lost connection. Messages that arrived before are still received."""
        try:
            self._connection.check_alive()
        except Gone as error:
            if self._session.has_socket:
                self._connection.receive_messages(self._session.receive_message)
                self._session.connection_lost(error)
        except Refused as error:  # the attempt to connect has failed
            self._session.access_refused(error)

    def _advance_reconnect(self) -> None:
        """Advance a reconnect without waiting."""
        if not self._session.closed:
            self._reconnect.advance(time.monotonic())

    def _reopen_connection(self, directory: Path) -> None:
        """Replace the socket by a new one. Messages that are queued in the old one are lost.

        Without descriptors there is no socket until the next attempt.
        """
        old = self._connection
        try:
            if not isinstance(old, NoConnection) and old.directory == directory:
                old.reopen()
                return
            self._connection = Connection(directory)
        except zmq.ZMQError as error:
            self._connection = NoConnection(f"cannot open a socket: {error}")
        old.close(linger=False)

    def _stop_reconnecting(self) -> None:
        self._session.stop_reconnecting()
        self._reconnect.close()

    def _close_connection(self) -> None:
        linger = self._session.gone is None
        self._connection.close(linger=linger)
        self._close_session("this client was closed")

    def _close_in_fork(self) -> None:
        """In a forked child: the session and the socket belong to the parent."""
        self._connection.closed = True
        self._close_session(
            "this client belongs to the parent process; create one in the forked child"
        )

    def _drive(self, operation: Operation[R], timeout: float) -> Generator[float, None, R]:
        """Run an operation within a timeout; yields the seconds to wait at most, at each pause."""
        deadline = time.monotonic() + min(MAX_TIMEOUT, timeout)
        return run_until_deadline(
            interpret(operation, self._session, lambda: self.directory, self._request),
            self._poll_connection,
            lambda: deadline - time.monotonic(),
            lambda: timed_out("no reply", str(self.directory)),
        )

    def _request(self, message: ClientMessage) -> None:
        self._send(self._session.request(message))

    def _close_session(self, why: str) -> None:
        self._session.close(Gone(Code.DAEMON_GONE, why, str(self.directory)))


_clients: weakref.WeakSet[ReconnectingClient] = weakref.WeakSet()


def _close_in_fork_all() -> None:
    for client in _clients:
        client._close_in_fork()  # noqa: SLF001 - of this class


os.register_at_fork(after_in_child=_close_in_fork_all)
