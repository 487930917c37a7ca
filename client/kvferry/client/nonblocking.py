"""The calls that never wait, shared by both clients. Each call that polls advances a reconnect."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import zmq

from kvferry.client.effects import Operation, interpret, run_until_deadline
from kvferry.client.endpoint import check_access, find_daemon, resolve_directory
from kvferry.client.jobs import TransferResult
from kvferry.client.namespace import ClientNamespace
from kvferry.client.reconnect import Reconnect
from kvferry.client.session import MAX_TIMEOUT, ClientSession, ConnectionState, timed_out
from kvferry.client.session_state import SessionState
from kvferry.client.tier_searches import SEARCH_TIMEOUT, TierSearch
from kvferry.client.transport.connection import Connection, NoConnection
from kvferry.proto.errors import Code, Gone, Refused
from kvferry.proto.keys import Lookup, OffloadKey
from kvferry.proto.memory import HostRegion
from kvferry.proto.messages import ClientMessage, FindInTiers, Pin, Touch, Unpin, Welcome
from kvferry.proto.specs import TransferSpec

if TYPE_CHECKING:
    import torch

    from kvferry.client.tensors.canonical import CanonicalKVCaches

KVCaches: TypeAlias = (
    "CanonicalKVCaches | Mapping[str, torch.Tensor] | Mapping[str, Sequence[torch.Tensor]]"
)
R = TypeVar("R")
DaemonDirectory: TypeAlias = Path | str | Callable[[], Path] | None


class NonBlockingClient:
    """The part of a client that never waits.

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

    @property
    def region(self) -> HostRegion | None:
        """The engine's region of the host pool, as last reported; None without a registration."""
        return self._session.restore.region

    @property
    def namespace(self) -> ClientNamespace:
        """The opened namespace. Raises Refused (UNKNOWN_NAMESPACE) if there is none."""
        return self._session.namespace

    def transfer_async(self, job_id: int, spec: TransferSpec, wait_for: int = 0) -> None:
        """Submit a transfer and return at once; get_finished returns its result.

        spec: (source, destination). wait_for: the value that the engine's timeline must reach
        before the copy begins; 0 for none. Raises Refused for errors that the client detects
        (BAD_SPEC, BAD_KEY, DUPLICATE_JOB, BUSY, STALE, MESSAGE_TOO_LARGE), and Gone if not
        connected. If the daemon refuses the job, its result has the error.
        """
        if self._session.gone is not None:
            self._advance_reconnect()
        data = self._session.submit(job_id, spec, wait_for)
        self._send(data)
        self._session.submitted(job_id, spec)

    def get_finished(self) -> list[TransferResult]:
        """Results that have arrived: each is returned once, in order per direction.

        Never waits, also while the daemon is disconnected or stopped.
        """
        self._receive_messages()
        self._check_connection_if_due(time.monotonic())
        return self._session.jobs.take_results()

    def cancel(self, job_ids: Collection[int]) -> None:
        """Cancel jobs. Each still has one result: cancelled, or done if it was too late."""
        self._send(self._session.cancel(job_ids))

    def lookup(self, key: OffloadKey) -> Lookup:
        """Look a key up in the mirror, which is at most 0.2 ms older than the received messages.

        HIT: it can be loaded. Unless it is pinned it may be evicted before the load, which then
        fails and is a miss. RETRY: the mirror is incomplete. While the client is not connected, and
        from a reset until it is done, every key is a MISS. Raises Refused (UNKNOWN_NAMESPACE) if no
        namespace with a mirror is open.
        """
        now = time.monotonic()
        if now > self._mirror_expires:
            self._refresh_mirror(now)
        return self._session.namespace.lookup(key, now)

    def find_in_tiers(self, keys: Iterable[OffloadKey], compute_seconds: float = 0.0) -> TierSearch:
        """Find keys below the host pool, without waiting, and promote them to it.

        keys: in prefix order. compute_seconds: the time in which the engine computes the tokens of
        one key; keys are promoted only if that is slower. 0: everything found is promoted.
        Until the daemon has answered, lookups of these keys return RETRY instead of MISS. Nothing
        is found while the client is not connected, or if the daemon has no tiers. Raises Refused
        (BAD_KEY, UNKNOWN_NAMESPACE).
        """
        session, namespace = self._session, self._session.namespace
        search = TierSearch(namespace.checked_keys(keys), time.monotonic() + SEARCH_TIMEOUT)
        if session.gone is not None or not namespace.opened.tiers or not search.keys:
            search.found = 0
            return search
        message = FindInTiers(session.next_request_id(), search.keys, compute_seconds)
        self._send(session.request(message))
        namespace.tier_searches.begin(message.request_id, search)
        return search

    def poll(self) -> None:
        """Receive messages and advance a reconnect; get_finished and lookup do it too."""
        self._refresh_mirror(time.monotonic())

    def pin(self, keys: Iterable[OffloadKey]) -> None:
        """Keep resident keys from eviction until they are unpinned as often, or until `close`.

        Reconnecting restores the pins of keys that the daemon has. Raises Refused (BAD_KEY,
        UNKNOWN_NAMESPACE), as do unpin and touch. None of the three needs a connection.
        """
        namespace = self._session.namespace
        keys = namespace.checked_keys(keys)
        self._send_if_connected(Pin(keys))
        namespace.pin(keys)

    def unpin(self, keys: Iterable[OffloadKey]) -> None:
        """Unpin keys. Raises Refused (NOT_PINNED) if one is not pinned, and unpins none."""
        namespace = self._session.namespace
        keys = namespace.checked_keys(keys)
        namespace.check_pinned(keys)
        self._send_if_connected(Unpin(keys))
        namespace.unpin(keys)

    def touch(self, keys: Iterable[OffloadKey], hits: int = 0, misses: int = 0) -> None:
        """Mark keys as recently used: the first becomes the most recent.

        hits, misses: lookups since the last call, for the daemon's statistics.
        """
        self._send_if_connected(Touch(self._session.namespace.checked_keys(keys), hits, misses))

    def reset_async(self) -> None:
        """As `reset`, without waiting: every key is a MISS here at once.

        If the client is not connected, reconnecting does the reset. If the daemon refuses it, every
        key stays a MISS here, and the next call that polls raises the error. Raises Gone if the
        client does not reconnect.
        """
        request = self._session.reset()
        if not self.connecting:
            self._send(self._session.request(request))

    def _send_if_connected(self, message: ClientMessage) -> None:
        """Send a message that has no reply, if connected."""
        if self._session.gone is None:
            self._send(self._session.request(message))

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
            if received and (subscribe := self._session.snapshot_request()):
                self._send(subscribe)
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

    # Reconnecting

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


_clients: weakref.WeakSet[NonBlockingClient] = weakref.WeakSet()


def _close_in_fork_all() -> None:
    for client in _clients:
        client._close_in_fork()  # noqa: SLF001 - of this class


os.register_at_fork(after_in_child=_close_in_fork_all)
