"""ClientLink: a session and the connection that carries it. It connects again when that is lost.

There is no thread: every call that polls the client receives messages, detects a lost connection,
and does what can be done without waiting to connect again. An attempt finds the daemon, opens a new
socket and restores the session (restoring.py): each poll continues it. After a failed attempt the
next one begins after a random pause, which doubles up to MAX_BACKOFF.

All calls are made in the client's thread.
"""

from __future__ import annotations

import logging
import os
import random
import time
import weakref
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TypeAlias

import zmq

from kvferry.client.session import ClientSession
from kvferry.client.transport.connection import Connection, NoConnection
from kvferry.client.wire import MAX_TIMEOUT, ConnectionState
from kvferry.proto.errors import OTHER_BUILD, Code, Failed, Gone, KVFerryError, Refused
from kvferry.proto.messages import ClientMessage

Attempt: TypeAlias = Coroutine[float, float | None, None]
Restore: TypeAlias = "Callable[[ClientLink, float], Attempt]"

log = logging.getLogger("kvferry")

# Seconds between two attempts: the first and the longest.
FIRST_BACKOFF, MAX_BACKOFF = 0.1, 5.0
# Seconds between two polls of a call that waits for a daemon.
POLL_INTERVAL = 0.02


class ClientLink:
    """A session, its connection, and the attempt to connect again.

    locate: returns the daemon's runtime directory, or raises KVFerryError; called at each attempt.
    restore: an attempt, which is advanced at each poll: it is sent the time of the poll, and yields
        the seconds until the next one, MAX_TIMEOUT for the next message.
    """

    def __init__(
        self, session: ClientSession, locate: Callable[[], Path], restore: Restore
    ) -> None:
        self.session, self.locate, self._restore = session, locate, restore
        self.connection: Connection | NoConnection = NoConnection()
        self._next_check = 0.0
        self._attempt: Attempt | None = None
        self._next_step = 0.0
        self._backoff = FIRST_BACKOFF
        # Why the session was not connected, as logged last.
        self._logged = str(session.wire.gone or "connected")
        _links.add(self)

    @property
    def directory(self) -> Path:
        """The runtime directory of the daemon."""
        return self.connection.directory

    @property
    def connecting(self) -> bool:
        """Whether the daemon is disconnected, and polling connects again."""
        return self.session.wire.gone is not None and not self.session.wire.closed

    # Messages

    def send(self, data: bytes) -> None:
        """Send an encoded message."""
        self.connection.send(data)

    def request(self, message: ClientMessage) -> None:
        """Send a message. Raises Gone if not connected."""
        self.send(self.session.wire.request(message))

    def poll(self) -> None:
        """Receive messages, detect a disconnect, and advance an attempt."""
        self.receive_messages()
        self.check_connection()

    def poll_often(self, now: float) -> None:
        """As `poll`, but detect a disconnect at intervals. now: time.monotonic() in seconds."""
        self.receive_messages()
        if now > self._next_check:
            self._next_check = now + self.connection.alive_check_interval
            self.check_connection()

    async def pause(self, seconds: float) -> None:
        """Wait for the next message, for at most `seconds`. Then poll."""
        self.connection.wait_readable(min(seconds, POLL_INTERVAL) if self.connecting else seconds)
        self.poll()

    def receive_messages(self) -> bool:
        """Receive messages. Returns whether there were any. Raises Gone if closed."""
        if self.connection.closed and self.session.wire.gone is not None:
            raise self.session.wire.gone.with_traceback(None)
        received = True
        try:
            received = self.connection.receive_messages(self.session.receive_message)
        finally:  # also after the error of one message: no other may follow
            if received:
                for data in self.session.opened.follow_ups(time.monotonic()):
                    self.send(data)
        if self.session.wire.gone is not None:
            self.advance(time.monotonic())
        return received

    def check_connection(self) -> None:
        """Detect a lost connection. Messages that arrived before are still received."""
        try:
            self.connection.check_alive()
        except Gone as error:
            if self.session.wire.has_socket:
                self.connection.receive_messages(self.session.receive_message)
                self.session.connection_lost(error)
        except Refused as error:  # the attempt to connect has failed
            self.session.wire.hello_answered(error)

    # Connecting again

    def open_connection(self, directory: Path) -> None:
        """Replace the socket by a new one. Messages that are queued in the old one are lost.

        Without descriptors there is no socket until the next attempt.
        """
        old = self.connection
        try:
            if not isinstance(old, NoConnection) and old.directory == directory:
                old.reopen()
                return
            self.connection = self.make_connection(directory)
        except zmq.ZMQError as error:
            self.connection = NoConnection(f"cannot open a socket: {error}")
        old.close(linger=False)

    def make_connection(self, directory: Path) -> Connection:
        """A new connection. Raises zmq.ZMQError."""
        return Connection(directory)

    def advance(self, now: float) -> None:
        """Do what can be done at once to connect again. now: time.monotonic() in seconds."""
        if not self.connecting:
            return
        if self._attempt is None:
            self._log_change()
        if now < self._next_step:
            return
        try:
            if self._attempt is None:
                self._attempt = self._restore(self, now)
                seconds = self._attempt.send(None)  # begins it
            elif self.session.wire.state is ConnectionState.DISCONNECTED:
                raise Gone(Code.DAEMON_GONE, "the daemon disconnected again")
            else:
                seconds = self._attempt.send(now)
            self._next_step = 0.0 if seconds == MAX_TIMEOUT else now + seconds
        except StopIteration:
            self.restart_attempt()
            self._log_change()
        except KVFerryError as error:
            self._attempt_failed(now, error)
        except Exception as error:  # of torch or the system; a poll must not raise it
            log.exception("kvferry: the session was not restored")
            reason = Failed(Code.MAP_FAILED, f"the session was not restored: {error!r}")
            self._attempt_failed(now, reason)

    def restart_attempt(self) -> None:
        """Abort the current attempt; the next one begins at once."""
        self._abort_attempt()
        self._next_step, self._backoff = 0.0, FIRST_BACKOFF

    def end_session(self, end: Callable[[], None]) -> None:
        """Disconnect at once, also if the daemon is stopped or hangs. end: ends the session."""
        if self.session.wire.closed:
            return
        self.restart_attempt()
        end()
        self._replace_socket()

    def _attempt_failed(self, now: float, error: KVFerryError) -> None:
        """End the attempt, and replace its socket: that ends a session that the daemon opened."""
        self._abort_attempt()
        self.session.reconnect_failed(error)
        self._replace_socket()
        if error.code != Code.TIMEOUT:  # after a timeout the next attempt need not wait
            if error.code in OTHER_BUILD:
                self._backoff = MAX_BACKOFF
            self._next_step = now + random.uniform(self._backoff / 2, self._backoff)
            self._backoff = min(2 * self._backoff, MAX_BACKOFF)

    def _replace_socket(self) -> None:
        if not isinstance(self.connection, NoConnection):
            self.open_connection(self.directory)

    def _abort_attempt(self) -> None:
        if self._attempt is not None:
            self._attempt.close()
            self._attempt = None

    def _log_change(self) -> None:
        session = self.session
        text = str(session.wire.gone or "connected")
        if text != self._logged:
            self._logged = text
            level = logging.WARNING if session.wire.refused is None else logging.ERROR
            if session.wire.gone is None and session.wire.incarnation == 1:
                level = logging.INFO
            client = f"{session.wire.client} of engine {session.wire.engine}"
            log.log(level, "kvferry: %s: %s", client, text)

    # Closing

    @property
    def can_wait(self) -> bool:
        """Whether `pause` can be called."""
        return True

    def stop_reconnecting(self) -> None:
        self.session.stop_reconnecting()
        self._abort_attempt()

    def close(self) -> None:
        """Send the queued messages of a connected session, and close the socket."""
        self.connection.close(linger=self.session.wire.gone is None)
        self._close_session("this client was closed")

    def close_in_fork(self) -> None:
        """In a forked child: the session and the socket belong to the parent."""
        self.connection.closed = True
        self._close_session(
            "this client belongs to the parent process; create one in the forked child"
        )

    def _close_session(self, why: str) -> None:
        self.session.close(Gone(Code.DAEMON_GONE, why, str(self.directory)))


_links: weakref.WeakSet[ClientLink] = weakref.WeakSet()


def _close_in_fork_all() -> None:
    for link in _links:
        link.close_in_fork()


os.register_at_fork(after_in_child=_close_in_fork_all)
