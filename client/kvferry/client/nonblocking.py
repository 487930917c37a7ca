"""NonBlockingClient: the base of both clients, with the calls that never wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypedDict

from kvferry.client.call import Call
from kvferry.client.endpoint import locate_daemon
from kvferry.client.jobs import TransferResult
from kvferry.client.link import ClientLink
from kvferry.client.namespace import ClientNamespace
from kvferry.client.process_bound import ProcessBound
from kvferry.client.restoring import restore_session
from kvferry.client.retentions import Retention
from kvferry.client.session import ClientSession
from kvferry.client.session_state import SessionState
from kvferry.client.splitting import key_batches
from kvferry.client.tier_searches import TierSearch
from kvferry.client.validation import check_fields, checked_seconds
from kvferry.client.wire import ConnectionState
from kvferry.proto.errors import Gone
from kvferry.proto.hints import Release, Retain
from kvferry.proto.keys import Lookup, OffloadKey
from kvferry.proto.memory import HostRegion
from kvferry.proto.messages import ClientMessage, Hello, Pin, Spare, Touch, Unpin, Welcome
from kvferry.proto.specs import TransferSpec

if TYPE_CHECKING:
    from kvferry.client.arrays import KVTensors
    from kvferry.client.tensors.canonical import CanonicalKVCaches


class Saved(NamedTuple):
    """Tokens whose KV was loaded, and the seconds in which the engine computes so many."""

    tokens: int = 0
    seconds: float = 0.0


NOTHING_SAVED = Saved()

KVCaches: TypeAlias = "CanonicalKVCaches | KVTensors"
DaemonDirectory: TypeAlias = Path | str | Callable[[], Path] | None


class ClientOptions(TypedDict, total=False):
    """Options of OffloadClient and AsyncOffloadClient.connect.

    engine: the name under which KV caches are registered; the same in all processes of an engine.
    client: a name for the daemon's log.
    timeout: seconds that a call waits at most, unless it is given its own timeout; math.inf for no
        limit. Connecting also waits so long for a daemon.
    reconnect: when the connection is lost, reconnect to the next daemon, with the same namespace,
        tensors and pins. False: the client has one session, and is closed when that ends.
    state: the state to restore once connected. Creating the client then does not wait, polling
        connects, and `gone` says why it is not connected yet. For engines that must not wait.
    """

    engine: str
    client: str
    timeout: float
    reconnect: bool
    state: SessionState | None


class NonBlockingClient(ProcessBound):
    """The part of a client that never waits.

    link_type: how it waits. directory, and the others: see OffloadClient and ClientOptions.
    """

    INSTEAD = "create a client in each process"

    def __init__(
        self,
        link_type: type[ClientLink],
        directory: DaemonDirectory,
        *,
        engine: str = "default",
        client: str | None = None,
        timeout: float = 10.0,
        reconnect: bool = True,
        state: SessionState | None = None,
    ) -> None:
        client = type(self).__name__ if client is None else client
        check_fields(Hello, client=client, engine=engine)
        checked_seconds("timeout", timeout)
        # The directory in which a daemon may not have started yet.
        self._named: Path | str | None = None
        if callable(directory):
            locate = directory
        else:
            self._named, locate = directory, cache(partial(locate_daemon, directory))
            if state is not None:
                locate()  # raises what waiting would not change
        self._session = ClientSession(
            engine, client, reconnects=reconnect or state is not None, restore=state
        )
        self._link = link_type(self._session, locate, restore_session)
        self._mirror_expires = 0.0
        self.timeout = timeout

    @property
    def directory(self) -> Path:
        """The runtime directory of the daemon."""
        return self._link.directory

    @property
    def engine(self) -> str:
        """The engine's name."""
        return self._session.wire.engine

    @property
    def daemon(self) -> Welcome:
        """The daemon's Welcome: its version, device and limits. Call it only once connected."""
        assert self._session.wire.welcome is not None
        return self._session.wire.welcome

    @property
    def connected(self) -> bool:
        """Whether the session is restored, and no disconnect has been detected."""
        return self._session.wire.state is ConnectionState.CONNECTED

    @property
    def connecting(self) -> bool:
        """Whether the daemon is disconnected, and polling this client reconnects."""
        return self._link.connecting

    @property
    def gone(self) -> Gone | None:
        """Why the client is not connected; None if it is, or if no disconnect was detected.

        If a daemon refuses to restore the session, its error is the `__cause__`.
        """
        return self._session.wire.gone

    @property
    def incarnation(self) -> int:
        """Number of sessions so far: 1 at first, one more after each reconnect.

        After a reconnect, host blocks by number may have lost their bytes: if `region.reattached`
        is false, or, for a client without a registration, if it is another daemon. Loads of blocks
        that were not stored again are refused (STALE).
        """
        return self._session.wire.incarnation

    @property
    def region(self) -> HostRegion | None:
        """The engine's region of the host pool, as last reported; None without a registration."""
        return self._session.restore.region

    @property
    def namespace(self) -> ClientNamespace:
        """The opened namespace. Raises Refused (UNKNOWN_NAMESPACE) if there is none."""
        return self._session.namespace

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
        self._link.end_session(self._session.abandon)

    def transfer_async(self, job_id: int, spec: TransferSpec, wait_for: int = 0) -> None:
        """Submit a transfer and return at once; get_finished returns its result.

        spec: (source, destination). wait_for: the value that the engine's timeline must reach
        before the copy begins; 0 for none. Raises Refused for errors that the client detects
        (BAD_SPEC, BAD_KEY, DUPLICATE_JOB, BUSY, STALE, MESSAGE_TOO_LARGE), and Gone if not
        connected. If the daemon refuses the job, its result has the error.
        """
        if self._session.wire.gone is not None:
            self._link.advance(time.monotonic())
        parts = self._session.jobs.submit(job_id, spec, wait_for)
        for data in parts:
            self._link.send(data)
        self._session.jobs.submitted(job_id, spec, len(parts))

    def get_finished(self) -> list[TransferResult]:
        """Results that have arrived: each is returned once, in order per direction.

        Never waits, also while the daemon is disconnected or stopped.
        """
        self._link.poll_often(time.monotonic())
        return self._session.jobs.take_results()

    def cancel(self, job_ids: Collection[int]) -> None:
        """Cancel jobs. Each still has one result: cancelled, or done if it was too late."""
        self._link.send(self._session.jobs.cancel(job_ids))

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
        """Find keys below the host pool, without waiting, and promote those of tiers to it.

        keys: in prefix order. compute_seconds: the time in which the engine computes the tokens of
        one key; keys are promoted only if that is slower. 0: all that tiers have is promoted.
        Until the daemon has answered, lookups of these keys return RETRY instead of MISS. Nothing
        is found while the client is not connected, or if `opened.tiers` is empty. Raises Refused
        (BAD_KEY, UNKNOWN_NAMESPACE).
        """
        session, namespace = self._session, self._session.namespace
        search = TierSearch(namespace.checked_keys(keys), compute_seconds=compute_seconds)
        if session.wire.gone is not None or not namespace.opened.tiers or not search.keys:
            search.found = 0
            return search
        self._link.send(session.opened.find_in_tiers(search, time.monotonic()))
        return search

    def pin(self, keys: Iterable[OffloadKey]) -> None:
        """Keep resident keys from eviction until they are unpinned as often, or until `close`.

        Reconnecting restores the pins of keys that the daemon has. Raises Refused (BAD_KEY,
        UNKNOWN_NAMESPACE), as do unpin and touch. None of the three needs a connection.
        """
        namespace = self._session.namespace
        keys = namespace.checked_keys(keys)
        self._send_if_connected(map(Pin, key_batches(keys)))
        namespace.pin(keys)

    def unpin(self, keys: Iterable[OffloadKey]) -> None:
        """Unpin keys. Raises Refused (NOT_PINNED) if one is not pinned, and unpins none."""
        namespace = self._session.namespace
        keys = namespace.checked_keys(keys)
        namespace.check_pinned(keys)
        self._send_if_connected(map(Unpin, key_batches(keys)))
        namespace.unpin(keys)

    def touch(
        self,
        keys: Iterable[OffloadKey],
        hits: int = 0,
        misses: int = 0,
        new: int = 0,
        saved: Saved = NOTHING_SAVED,
        *,
        by_prompt: bool = True,
    ) -> None:
        """Mark keys as recently used: the first becomes the most recent.

        For the daemon's statistics, since the last call: hits, misses: of lookups. new: keys that
        no lookup was for. saved: what loads saved the engine. by_prompt: whether a prompt has used
        these keys.
        """
        *tail, head = reversed(key_batches(self._session.namespace.checked_keys(keys)))
        others = [Touch(batch, by_prompt=by_prompt) for batch in tail]
        self._send_if_connected((*others, Touch(head, hits, misses, new, *saved, by_prompt)))

    def spare(self, keys: Iterable[OffloadKey]) -> None:
        """Let the blocks of these keys be evicted first, the last one before the others, until they
        are touched: the engine's GPU has them. If nobody will use them, call `release`.

        Ignored while another engine has the namespace open, and forgotten when one opens it.
        """
        batches = key_batches(self._session.namespace.checked_keys(keys))
        self._send_if_connected(map(Spare, reversed(batches)))

    def retain(self, keys: Iterable[OffloadKey], seconds: float, label: str = "") -> Retention:
        """Keep the blocks of loadable keys from eviction for a time, within a share of all blocks.

        keys: in prefix order; the last ones exceed a share first. seconds: above 0, at most 3600;
        it may end a second late. Retained again, keys stay until the later end. label: for whom, at
        most 256 characters; one that is not empty has a share that is smaller than the engine's.
        It also ends with `release`, a reset, and the session: reconnecting does not retain again.
        The result is filled while the client is polled; all keys are missing if it is not
        connected. Raises Refused (BAD_KEY, BAD_SPEC, BAD_MESSAGE, UNKNOWN_NAMESPACE).
        """
        session, retention = self._session, Retention()
        distinct = tuple(dict.fromkeys(session.namespace.checked_keys(keys)))
        seconds = checked_seconds("seconds", seconds)
        check_fields(Retain, seconds=seconds, label=label)
        if session.wire.gone is not None or not distinct:
            retention.missing = len(distinct)
            return retention
        for batch in key_batches(distinct):
            self._link.request(session.opened.retain(retention, batch, seconds, label))
        return retention

    def release(self, keys: Iterable[OffloadKey], label: str = "") -> None:
        """Nobody will use these keys: end what this client retains of them with this label, and let
        their blocks be evicted first until they are touched, as `spare` does.

        Has no effect while the client is not connected. Raises Refused (BAD_KEY, BAD_MESSAGE,
        UNKNOWN_NAMESPACE).
        """
        batches = key_batches(self._session.namespace.checked_keys(keys))
        check_fields(Release, label=label)
        self._send_if_connected(Release(batch, label) for batch in reversed(batches))

    def reset_async(self, label: str = "") -> None:
        """As `reset`, without waiting: every key is a MISS here at once.

        If the client is not connected, reconnecting does the reset. If the daemon refuses it, every
        key stays a MISS here, and the next call that polls raises the error. Raises Gone if the
        client does not reconnect.
        """
        request = self._session.opened.reset(label)
        if not self.connecting:
            self._link.request(request)

    def _send_if_connected(self, messages: Iterable[ClientMessage]) -> None:
        """Send messages that have no reply, if connected."""
        if self._session.wire.gone is None:
            for message in messages:
                self._link.request(message)

    def _refresh_mirror(self, now: float) -> None:
        self._mirror_expires = now + self._link.connection.mirror_max_age
        if not self._session.wire.closed:
            self._link.poll_often(now)

    def _begin_call(self, timeout: float | None) -> Call:
        seconds = self.timeout if timeout is None else timeout
        return Call(self._link, checked_seconds("timeout", seconds))
