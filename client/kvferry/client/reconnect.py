"""Reconnecting: the only implementation, for all clients and for the adapters over them.

Whatever call polls the client advances it: `advance` does what can be done at once, without a
thread. An attempt finds the daemon, opens a new socket and runs the operation `connect`, which
restores the session. After an attempt that failed, the next begins after a pause, which doubles up
to a limit and is random, so that clients do not all connect at once.
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

# Seconds between two attempts, at most: the first and the longest.
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
# Seconds that an attempt may take.
ATTEMPT_TIMEOUT = 10.0
# Seconds between two polls of a call that waits for a daemon.
TICK = 0.02


class Reconnect:
    """locate: returns the folder of the daemon's sockets, or raises KVFerryError.
    reopen: replaces the socket by one to the daemon in a folder. send: sends over it. None waits.
    """

    def __init__(
        self,
        session: ClientSession,
        locate: Callable[[], Path],
        reopen: Callable[[Path], None],
        send: Callable[[bytes], None],
    ) -> None:
        self._session = session
        self._locate, self._reopen, self._send = locate, reopen, send
        self._directory = Path()
        self._attempt: Interpreted[None] | None = None
        self._next = self._deadline = 0.0
        self._pause = FIRST_PAUSE
        self._logged: object = session.gone

    def advance(self, now: float) -> None:
        """Do what can be done at once. now: seconds of the monotonic clock."""
        if self._attempt is None:
            self._log(self._session.gone)
        if now < self._next:
            return
        try:
            if self._attempt is None:
                self._attempt = self._begin(now)
            elif self._session.state is ConnectionState.DISCONNECTED:
                raise Gone(Code.DAEMON_GONE, "the daemon disconnected again")
            if now > self._deadline:
                raise timed_out("the session was not restored", str(self._directory))
            pause = next(self._attempt)
            self._next = 0.0 if pause is PAUSE else now + pause.seconds
        except StopIteration:
            self._attempt, self._next, self._pause = None, 0.0, FIRST_PAUSE
            self._log(None)
        except KVFerryError as error:
            self._fail(now, error)
        except Exception as error:  # of torch or the system: a poll is no place to raise it
            log.exception("kvferry: the session was not restored")
            self._fail(now, Failed(Code.MAP_FAILED, f"the session was not restored: {error!r}"))

    def restart(self) -> None:
        """Give the current attempt up; the next one begins at once."""
        self.close()
        self._next, self._pause = 0.0, FIRST_PAUSE

    def close(self) -> None:
        if self._attempt is not None:
            self._attempt.close()
            self._attempt = None

    def _begin(self, now: float) -> Interpreted[None]:
        directory = self._directory = self._locate()
        self._reopen(directory)
        self._session.connect()
        self._deadline = now + ATTEMPT_TIMEOUT
        session, send = self._session, self._send
        return interpret(
            connect(session), session, lambda: directory, lambda sent: send(encode(sent))
        )

    def _fail(self, now: float, error: KVFerryError) -> None:
        """Close the attempt. A session that the daemon may have begun ends with its socket."""
        began = self._attempt is not None
        self.close()
        self._session.attempt_failed(error)
        if began:
            self._reopen(self._directory)
        if error.code != Code.TIMEOUT:  # nobody answered: the next attempt need not wait
            self._next = now + random.uniform(self._pause / 2, self._pause)
            self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def _log(self, gone: object) -> None:
        if gone is not self._logged:
            self._logged = gone
            who = f"{self._session.client} of engine {self._session.engine}"
            log.warning("kvferry: %s: %s", who, gone or "connected")
