"""Reconnecting, for all clients.

There is no thread: every call that polls the client calls `advance`, which does what can be done
without waiting. An attempt finds the daemon, opens a new socket and runs the operation `connect`,
which restores the session. After a failed attempt the next one begins after a random pause, which
doubles up to MAX_BACKOFF.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from pathlib import Path

from kvferry.client.effects import PAUSE, Interpreted, interpret
from kvferry.client.operations import connect
from kvferry.client.session import ClientSession, ConnectionState, timed_out
from kvferry.proto.codec import encode
from kvferry.proto.errors import Code, Failed, Gone, KVFerryError

log = logging.getLogger("kvferry")

# Seconds between two attempts: the first and the longest.
FIRST_BACKOFF, MAX_BACKOFF = 0.1, 5.0
# Seconds that an attempt may take. A longer pause between two polls counts as MAX_POLL_GAP: an
# attempt does one step per poll, and a client may poll every few seconds.
ATTEMPT_TIMEOUT, MAX_POLL_GAP = 10.0, 0.1
# Seconds between two polls of a call that waits for a daemon.
POLL_INTERVAL = 0.02


class Reconnect:
    """locate_daemon: returns the runtime directory, or raises KVFerryError. reopen: replaces the
    socket by a new one to the daemon in a directory. send: sends over it. None of them waits.
    """

    def __init__(
        self,
        session: ClientSession,
        locate_daemon: Callable[[], Path],
        reopen: Callable[[Path], None],
        send: Callable[[bytes], None],
    ) -> None:
        self._session = session
        self._locate_daemon, self._reopen, self._send = locate_daemon, reopen, send
        self._directory = Path()
        self._attempt: Interpreted[None] | None = None
        self._next_attempt = self._deadline = self._last_poll = 0.0
        self._backoff = FIRST_BACKOFF
        self._logged: object = session.gone

    def advance(self, now: float) -> None:
        """Do what can be done at once. now: seconds of the monotonic clock."""
        self._deadline += max(0.0, now - self._last_poll - MAX_POLL_GAP)
        self._last_poll = now
        if self._attempt is None:
            self._log_change(self._session.gone)
        if now < self._next_attempt:
            return
        try:
            if self._attempt is None:
                self._attempt = self._begin_attempt(now)
            elif self._session.state is ConnectionState.DISCONNECTED:
                raise Gone(Code.DAEMON_GONE, "the daemon disconnected again")
            if now > self._deadline:
                raise timed_out("the session was not restored", str(self._directory))
            pause = next(self._attempt)
            self._next_attempt = 0.0 if pause is PAUSE else now + pause.seconds
        except StopIteration:
            self._attempt, self._next_attempt, self._backoff = None, 0.0, FIRST_BACKOFF
            self._log_change(None)
        except KVFerryError as error:
            self._fail_attempt(now, error)
        except Exception as error:  # of torch or the system; a poll must not raise it
            log.exception("kvferry: the session was not restored")
            self._fail_attempt(
                now, Failed(Code.MAP_FAILED, f"the session was not restored: {error!r}")
            )

    def restart(self) -> None:
        """Abort the current attempt; the next one begins at once."""
        self.close()
        self._next_attempt, self._backoff = 0.0, FIRST_BACKOFF

    def close(self) -> None:
        if self._attempt is not None:
            self._attempt.close()
            self._attempt = None

    def _begin_attempt(self, now: float) -> Interpreted[None]:
        directory = self._directory = self._locate_daemon()
        self._reopen(directory)
        self._session.socket_opened()
        self._deadline = now + ATTEMPT_TIMEOUT
        session, send = self._session, self._send
        return interpret(
            connect(session), session, lambda: directory, lambda sent: send(encode(sent))
        )

    def _fail_attempt(self, now: float, error: KVFerryError) -> None:
        """Close the attempt, and replace its socket: that ends a session that the daemon opened."""
        began = self._attempt is not None
        self.close()
        self._session.reconnect_failed(error)
        if began:
            self._reopen(self._directory)
        if error.code != Code.TIMEOUT:  # after a timeout the next attempt need not wait
            self._next_attempt = now + random.uniform(self._backoff / 2, self._backoff)
            self._backoff = min(2 * self._backoff, MAX_BACKOFF)

    def _log_change(self, gone: object) -> None:
        if gone is not self._logged:
            self._logged = gone
            client = f"{self._session.client} of engine {self._session.engine}"
            log.warning("kvferry: %s: %s", client, gone or "connected")
