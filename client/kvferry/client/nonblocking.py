"""The calls that never wait, shared by both clients; any of them advances a reconnect."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from kvferry.client.connection import Connection, NoConnection
from kvferry.client.effects import Operation, drive, interpret
from kvferry.client.endpoint import check_open, find_daemon, named
from kvferry.client.jobs import TransferResult
from kvferry.client.namespace import Namespace
from kvferry.client.reconnect import Reconnect
from kvferry.client.session import LONGEST, ClientSession, ConnectionState, timed_out
from kvferry.client.session_state import SessionState
from kvferry.proto.errors import Code, Gone, Refused
from kvferry.proto.keys import Lookup, OffloadKey
from kvferry.proto.memory import HostRegion
from kvferry.proto.messages import ClientMessage, Pin, Touch, Unpin, Welcome
from kvferry.proto.specs import TransferSpec

if TYPE_CHECKING:
    import torch

    from kvferry.client.tensors.canonical import CanonicalKVCaches

KVCaches: TypeAlias = (
    "CanonicalKVCaches | Mapping[str, torch.Tensor] | Mapping[str, Sequence[torch.Tensor]]"
)
R = TypeVar("R")
Locate: TypeAlias = Path | str | Callable[[], Path] | None

# Seconds between two looks, while polling, at whether the daemon is still there.
ALIVE_EVERY = 0.02
# Seconds that a lookup does without a look at what has arrived.
FRESH = 200e-6


class NonBlocking:
    """locate: where the daemon is, or a function that finds it at each attempt to connect.
    state: see OffloadClient."""

    def __init__(
        self,
        locate: Locate,
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
            place = named(Path(locate)) if locate else find_daemon()
            check_open(place)
            self._locate = lambda: place
        self._session = ClientSession(
            engine, client, reconnects=reconnect or state is not None, restore=state
        )
        self._reconnect = Reconnect(self._session, self._locate, self._reopen, self._send)
        self._next_look = 0.0
        self._stale_at = 0.0
        if state is None:
            self._connection = Connection(self._locate())
        _clients.add(self)

    @property
    def directory(self) -> Path:
        return self._connection.directory

    @property
    def engine(self) -> str:
        return self._session.engine

    @property
    def daemon(self) -> Welcome:
        """Who the daemon is, and what it allows."""
        assert self._session.welcome is not None
        return self._session.welcome

    @property
    def connected(self) -> bool:
        """Whether the daemon is there, as far as is known, and the session is restored."""
        return self._session.state is ConnectionState.CONNECTED

    @property
    def connecting(self) -> bool:
        """Whether the daemon is away, and polling this client reconnects it."""
        return self.gone is not None and not self._session.closed

    @property
    def gone(self) -> Gone | None:
        """Why the client is not connected, once that is known; None while it is.

        If a daemon refuses to restore the session, its error is the `__cause__`.
        """
        return self._session.gone

    @property
    def incarnation(self) -> int:
        """How many sessions this client had: 1 at first, one more after each reconnect.

        Host blocks by number may have lost their bytes then: if `region.reattached` is false, or,
        for a client that registered nothing, if it is another daemon. Loads from blocks that were
        not stored again are refused (STALE).
        """
        return self._session.incarnation

    @property
    def region(self) -> HostRegion | None:
        """The engine's part of the host pool, as last reported; None without a registration."""
        return self._session.restore.region

    @property
    def namespace(self) -> Namespace:
        """The namespace that was opened; raises Refused (UNKNOWN_NAMESPACE) without one."""
        return self._session.namespace

    def transfer_async(self, job_id: int, spec: TransferSpec, wait_for: int = 0) -> None:
        """Submit a transfer and return at once; get_finished returns its result.

        spec: (source, destination). wait_for: the value of the engine's timeline that must be
        reached first; 0 for none. Raises Refused if the client can tell that the job is not
        acceptable (BAD_SPEC, BAD_KEY, DUPLICATE_JOB, BUSY, STALE, MESSAGE_TOO_LARGE), and Gone
        while it is not connected. A refusal of the daemon is the job's result.
        """
        if self._session.gone is not None:
            self._advance()
        data = self._session.submit(job_id, spec, wait_for)
        self._send(data)
        self._session.submitted(job_id, spec)

    def get_finished(self) -> list[TransferResult]:
        """Results that arrived and were not fetched yet: each once, in order per direction.

        Never waits, also while the daemon is away or stopped.
        """
        self._take_in()
        self._look_now_and_then(time.monotonic())
        return self._session.jobs.results()

    def cancel(self, job_ids: Collection[int]) -> None:
        """Cancel jobs; each still ends once, as cancelled, or as done if it was too late."""
        self._send(self._session.cancel(job_ids))

    def lookup(self, key: OffloadKey) -> Lookup:
        """What the mirror knows of a key, from what arrived no more than 0.2 ms ago.

        HIT: it can be loaded. Unless it is pinned it may be evicted before: the load fails then,
        and is a miss. RETRY while the mirror is incomplete. MISS for everything while the client
        is not connected, and from a reset until it is done. Raises Refused (UNKNOWN_NAMESPACE)
        if no namespace with a mirror was opened.
        """
        now = time.monotonic()
        if now > self._stale_at:
            self._freshen(now)
        return self._session.namespace.mirror.lookup(key)

    def poll(self) -> None:
        """Take in what has arrived, and advance a reconnect; get_finished and lookup do it too."""
        self._freshen(time.monotonic())

    def pin(self, keys: Iterable[OffloadKey]) -> None:
        """Keep resident keys from eviction until `unpin`, as many times as pinned, or `close`.

        Reconnecting restores all pins of keys that the daemon has. Raises Refused (BAD_KEY,
        UNKNOWN_NAMESPACE); so do unpin and touch. None of the three needs a connection.
        """
        namespace = self._session.namespace
        keys = namespace.checked(keys)
        self._send_if_connected(Pin(keys))
        namespace.pin(keys)

    def unpin(self, keys: Iterable[OffloadKey]) -> None:
        """Unpin keys. Raises Refused (NOT_PINNED) if one is not pinned; then none is unpinned."""
        namespace = self._session.namespace
        keys = namespace.checked(keys)
        namespace.check_pinned(keys)
        self._send_if_connected(Unpin(keys))
        namespace.unpin(keys)

    def touch(self, keys: Iterable[OffloadKey], hits: int = 0, misses: int = 0) -> None:
        """Mark keys as recently used: the first becomes the most recent.

        hits, misses: lookups since the last call, for the daemon's statistics.
        """
        self._send_if_connected(Touch(self._session.namespace.checked(keys), hits, misses))

    def reset_async(self) -> None:
        """As `reset`, without waiting: every key is a MISS here at once, and absent there soon.

        While the client is not connected, reconnecting does the reset. If the daemon refuses it,
        every key stays a MISS here, and the next call that polls raises the error. Raises Gone if
        the client does not reconnect.
        """
        request = self._session.reset()
        if not self.connecting:
            self._send(self._session.request(request))

    def _send_if_connected(self, message: ClientMessage) -> None:
        """Send a message that needs no reply, if connected."""
        if self._session.gone is None:
            self._send(self._session.request(message))

    def _send(self, data: bytes) -> None:
        self._connection.send(data)

    def _drain(self) -> None:
        self._take_in()
        self._look()

    def _take_in(self) -> bool:
        """Take in what has arrived; returns whether that was anything. Raises Gone once closed."""
        if self._connection.closed and self._session.gone is not None:
            raise self._session.gone.with_traceback(None)
        news = self._connection.drain(self._session.feed)
        if news and (follow := self._session.snapshot_request()):
            self._send(follow)
        if self._session.gone is not None:
            self._advance()
        return news

    def _freshen(self, now: float) -> None:
        self._stale_at = now + FRESH
        if not self._session.closed:
            self._take_in()
            self._look_now_and_then(now)

    def _look_now_and_then(self, now: float) -> None:
        if now > self._next_look:
            self._next_look = now + ALIVE_EVERY
            self._look()

    def _look(self) -> None:
        """Notice that the connection is lost; messages sent before that count."""
        try:
            self._connection.check_alive()
        except Gone as error:
            if self._session.linked:
                self._connection.drain(self._session.feed)
                self._session.lose(error)
        except Refused as error:  # the attempt to connect fails
            self._session.not_admitted(error)

    def abandon(self) -> None:
        """Give up all jobs and the connection at once, also while the daemon stands still.

        The timeline is revoked, every job in flight ends as lost (get_finished returns it once),
        and polling reconnects with a new session, registration and timeline page. From the return
        of this call on:

        - The daemon copies nothing of these jobs: it reads the page right before each chunk is
          copied or its kernel is launched, also when it continues after SIGSTOP.
        - Only what the GPU was given before may still be copied, which the GPU does at once: at
          most the chunks in flight, and none of a job whose `wait_for` was not reached.
        - Once `connected` is true again, none is in flight: a daemon accepts a registration of
          this engine only when the abandoned one is unmapped.

        So an engine that must be certain keeps the blocks of jobs that may have begun until
        `connected`. Without a timeline only the last of the three holds.

        Values of the timeline go on, but the new page shows only those signalled after
        `connected`: signal again, then wait for that value. With reconnect=False the client ends.
        """
        if self._session.closed:
            return
        self._reconnect.restart()
        self._session.abandon()
        if not isinstance(self._connection, NoConnection):
            self._reopen(self.directory)

    # Reconnecting

    def _advance(self) -> None:
        """Do what can be done at once to reconnect."""
        if not self._session.closed:
            self._reconnect.advance(time.monotonic())

    def _reopen(self, directory: Path) -> None:
        """Replace the socket by a new one: what was sent over the old one and not read is lost."""
        old = self._connection
        if not isinstance(old, NoConnection) and old.directory == directory:
            old.reopen()
        else:
            self._connection = Connection(directory)
            old.close(heard=False)

    def _stop_reconnecting(self) -> None:
        self._session.stop_reconnecting()
        self._reconnect.close()

    def _hang_up(self) -> None:
        heard = self._session.gone is None
        self._connection.close(heard=heard)
        self._end("this client was closed")

    def _disown(self) -> None:
        """In a fork's child: the session and the socket are the parent's."""
        self._connection.closed = True
        self._end("this client was made before a fork, by the parent: make one in the child")

    def _drive(self, operation: Operation[R], timeout: float) -> Generator[float, None, R]:
        """Run an operation within a timeout; yields for how many seconds to wait at most."""
        deadline = time.monotonic() + min(LONGEST, timeout)
        return drive(
            interpret(operation, self._session, lambda: self.directory, self._request),
            self._drain,
            lambda: deadline - time.monotonic(),
            lambda: timed_out("no answer", str(self.directory)),
        )

    def _request(self, message: ClientMessage) -> None:
        self._send(self._session.request(message))

    def _end(self, why: str) -> None:
        self._session.close(Gone(Code.DAEMON_GONE, why, str(self.directory)))


_clients: weakref.WeakSet[NonBlocking] = weakref.WeakSet()


def _disown_all() -> None:
    for client in _clients:
        client._disown()  # noqa: SLF001 - of this module's class


os.register_at_fork(after_in_child=_disown_all)
