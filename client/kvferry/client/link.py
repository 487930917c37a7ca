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
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import zmq

from kvferry.client.call import Call
from kvferry.client.restoring import connect
from kvferry.client.session import MAX_TIMEOUT, ClientSession, ConnectionState
from kvferry.client.transport.connection import Connection, NoConnection
from kvferry.proto.codec import encode
from kvferry.proto.errors import OTHER_BUILD, Code, Failed, Gone, KVFerryError, Refused
from kvferry.proto.messages import ClientMessage

T = TypeVar("T")
log = logging.getLogger("kvferry")

# Seconds between two attempts: the first and the longest.
FIRST_BACKOFF, MAX_BACKOFF = 0.1, 5.0
# Seconds for which an attempt waits for one reply.
ATTEMPT_TIMEOUT = 10.0
# Seconds between two polls of a call that waits for a daemon.
POLL_INTERVAL = 0.02


class ClientLink:
    """A session, its connection, and the attempt to connect again.

    locate: returns the daemon's runtime directory, or raises KVFerryError; called at each attempt.
    """

    def __init__(self, session: ClientSession, locate: Callable[[], Path]) -> None:
        self.session, self.locate = session, locate
        self.connection: Connection | NoConnection = NoConnection()
        self._next_check = 0.0
        self._attempt: Coroutine[float, float | None, None] | None = None
        self._next_step = 0.0
        self._backoff = FIRST_BACKOFF
        # Why the session was not connected, as logged last.
        self._logged = str(session.gone or "connected")
        _links.add(self)

    @property
    def directory(self) -> Path:
        """The runtime directory of the daemon."""
        return self.connection.directory

    @property
    def connecting(self) -> bool:
        """Whether the daemon is disconnected, and polling connects again."""
        return self.session.gone is not None and not self.session.closed

    # Messages

    def send(self, data: bytes) -> None:
        """Send an encoded message."""
        self.connection.send(data)

    def request(self, message: ClientMessage) -> None:
        """Send a message. Raises Gone if not connected."""
        self.send(self.session.request(message))

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
        if self.connection.closed and self.session.gone is not None:
            raise self.session.gone.with_traceback(None)
        received = True
        try:
            received = self.connection.receive_messages(self.session.receive_message)
        finally:  # also after the error of one message: no other may follow
            if received:
                for data in self.session.follow_ups(time.monotonic()):
                    self.send(data)
        if self.session.gone is not None:
            self.advance(time.monotonic())
        return received

    def check_connection(self) -> None:
        """Detect a lost connection. Messages that arrived before are still received."""
        try:
            self.connection.check_alive()
        except Gone as error:
            if self.session.has_socket:
                self.connection.receive_messages(self.session.receive_message)
                self.session.connection_lost(error)
        except Refused as error:  # the attempt to connect has failed
            self.session.access_refused(error)

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
                self._attempt = self._restore_session(now)
                seconds = self._attempt.send(None)  # begins it
            elif self.session.state is ConnectionState.DISCONNECTED:
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
        if self.session.closed:
            return
        self.restart_attempt()
        end()
        self._replace_socket()

    async def _restore_session(self, now: float) -> None:
        self.open_connection(self.locate())
        self.session.socket_opened()
        await connect(Attempt(self, now))

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
        text = str(session.gone or "connected")
        if text != self._logged:
            self._logged = text
            level = logging.WARNING if session.refused is None else logging.ERROR
            if session.gone is None and session.incarnation == 1:
                level = logging.INFO
            client = f"{session.client} of engine {session.engine}"
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
        self.connection.close(linger=self.session.gone is None)
        self._close_session("this client was closed")

    def close_in_fork(self) -> None:
        """In a forked child: the session and the socket belong to the parent."""
        self.connection.closed = True
        self._close_session(
            "this client belongs to the parent process; create one in the forked child"
        )

    def _close_session(self, why: str) -> None:
        self.session.close(Gone(Code.DAEMON_GONE, why, str(self.directory)))


@dataclass(frozen=True, slots=True)
class _NextPoll:
    """Returns to the poll that advances the attempt; the outcome is the time of the next poll."""

    seconds: float

    def __await__(self) -> Generator[float, float, float]:
        return (yield self.seconds)


class Attempt(Call):
    """The call that restores the session. Each wait in it has its own deadline, because it ends at
    a poll, and a client may poll every few seconds."""

    def __init__(self, link: ClientLink, now: float) -> None:
        super().__init__(link, ATTEMPT_TIMEOUT)
        self._now = now

    async def until(self, ready: Callable[[], T | None], seconds: float = MAX_TIMEOUT) -> T:
        self._deadline = self._now + ATTEMPT_TIMEOUT
        return await super().until(ready, seconds)

    def _seconds_left(self) -> float:
        return self._deadline - self._now

    async def _pause(self, seconds: float) -> None:
        self._now = await _NextPoll(seconds)

    def _send(self, message: ClientMessage) -> None:
        self.link.send(encode(message))


_links: weakref.WeakSet[ClientLink] = weakref.WeakSet()


def _close_in_fork_all() -> None:
    for link in _links:
        link.close_in_fork()


os.register_at_fork(after_in_child=_close_in_fork_all)
