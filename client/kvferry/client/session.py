"""What a client knows, without a socket and without a clock: the same for all clients.

`ClientSession` makes the messages to send and is fed those that arrive. It keeps the jobs in
flight, their results until they are fetched, pending requests, and the namespace that it opened.
Called only in the client's thread.

A session outlives the daemon that it began with:

    CONNECTING  --restored-->  CONNECTED  --lose-->  DISCONNECTED  --connect-->  CONNECTING ...
         \\__________________________lose__________________/

    CLOSED: after close, or after lose without `reconnects`

While CONNECTING it sends Hello and asks again for everything in its SessionState
(operations.connect). `gone` says why no request can be sent; it is None if CONNECTED, and during
the first CONNECTING. When the daemon is lost, pending requests fail at once and jobs in flight end
as lost, once.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from enum import Enum
from itertools import count

from kvferry.client.jobs import Jobs, checked_id, checked_ids, direction_of
from kvferry.client.lost_stores import LostStores
from kvferry.client.namespace import Namespace
from kvferry.client.pending_requests import PendingRequests, Reply, RequestMessage
from kvferry.client.session_state import Registration, SessionState
from kvferry.proto.codec import decode_daemon_message, encode
from kvferry.proto.errors import Code, Gone, KVFerryError, Refused, error_of
from kvferry.proto.memory import HostRegion
from kvferry.proto.messages import (
    PROTOCOL,
    Cancel,
    ClientMessage,
    Done,
    Error,
    Finished,
    Goodbye,
    Hello,
    KeyEvents,
    Opened,
    OpenNamespace,
    Outcome,
    Reset,
    Snapshot,
    Submit,
    Subscribe,
    Wait,
    Welcome,
)
from kvferry.proto.specs import (
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    KeyLoadStoreSpec,
    TransferSpec,
)
from kvferry.proto.status import Fingerprint

# Seconds, 11 days, that anything is waited for at most: a timer takes no math.inf, which a caller
# may give to wait for as long as it takes.
LONGEST = 1e6

_SIDES = frozenset({GPULoadStoreSpec, CPULoadStoreSpec, KeyLoadStoreSpec})


class ConnectionState(Enum):
    CONNECTING = "connecting"
    CONNECTED = "connected"
    DISCONNECTED = "disconnected"
    CLOSED = "closed"


class ClientSession:
    """reconnects: go on with the next daemon, or the same one, when the connection is lost.
    restore: what to have of the daemon as soon as it is connected; the session begins
    DISCONNECTED then, and nobody waits for it."""

    def __init__(
        self,
        engine: str,
        client: str,
        *,
        reconnects: bool = False,
        restore: SessionState | None = None,
    ) -> None:
        self.engine = engine
        self.client = client
        self.reconnects = reconnects
        self.state = ConnectionState.CONNECTING
        self.welcome: Welcome | None = None
        self.gone: Gone | None = None
        # Why the daemon does not restore the session.
        self.refused: KVFerryError | None = None
        # How many times the session was connected and restored.
        self.incarnation = 0
        self.restore = SessionState() if restore is None else restore
        self.jobs = Jobs()
        self.pending = PendingRequests()
        self._lost_stores = LostStores()
        self._greeting: Welcome | KVFerryError | None = None
        self._request_ids = count(1)
        self._namespace: Namespace | None = None
        self._snapshot_needed = False
        if restore is not None:
            if restore.opening is not None:
                self._namespace = Namespace(restore.opening, mirror=restore.mirror)
            self.lose(Gone(Code.DAEMON_GONE, "no daemon has answered yet"))

    # Messages to send

    def hello(self) -> Hello:
        return Hello(PROTOCOL, PROTOCOL, self.client, self.engine)

    def request(self, message: ClientMessage) -> bytes:
        """The bytes of a message; Gone where there is nobody to hear it."""
        if self.gone is not None:
            raise self.gone.with_traceback(None)  # raised often: else it grows
        return encode(message)

    def requesting(self, message: RequestMessage) -> AbstractContextManager[None]:
        """Keep the reply to a request while this lasts."""
        return self.pending.requesting(message)

    def next_request_id(self) -> int:
        return next(self._request_ids)

    def submit(self, job_id: int, spec: TransferSpec, wait_for: int) -> bytes:
        """The message that starts a job; `submitted` says that it went out.

        Raises Refused (DUPLICATE_JOB, BUSY, STALE, MESSAGE_TOO_LARGE) or Gone, and nothing changed.
        """
        job_id, wait_for = checked_id("a job id", job_id), checked_id("wait_for", wait_for)
        src, dst = self._checked_sides(spec)
        if job_id in self.jobs:
            raise Refused(Code.DUPLICATE_JOB, "a job with this id is under way", job_id)
        direction = direction_of(spec)
        of_it = self.jobs.count(direction)
        if self.welcome is not None and of_it >= self.welcome.limits.most(direction):
            raise Refused(Code.BUSY, f"too many {direction}s are under way: poll first", of_it)
        self._lost_stores.check(spec)
        return self.request(Submit(job_id, src, dst, wait_for))

    def submitted(self, job_id: int, spec: TransferSpec) -> None:
        self.jobs.add(job_id, direction_of(spec))
        self._lost_stores.submitted(job_id, spec)

    def cancel(self, job_ids: Iterable[int]) -> bytes:
        return self.request(Cancel(checked_ids(job_ids)))

    def wait(self, job_ids: Iterable[int]) -> Wait:
        """The request to be told when these jobs have ended; Refused where none can read it."""
        return Wait(self.next_request_id(), checked_ids(job_ids))

    def reset(self) -> Reset:
        """The request to forget all keys; everything is absent here until it is done.

        Raises Refused (UNKNOWN_NAMESPACE).
        """
        message = Reset(self.next_request_id())
        self.namespace.reset(message.request_id)
        return message

    def snapshot_request(self) -> bytes | None:
        """The message to send, once, if the mirror has missed an event."""
        needed, self._snapshot_needed = self._snapshot_needed, False
        return encode(Subscribe()) if needed and self.linked else None

    # The namespace

    @property
    def namespace(self) -> Namespace:
        """Raises Refused (UNKNOWN_NAMESPACE) where none was opened."""
        if self._namespace is None:
            message = "this client is in no namespace: open_namespace first"
            raise Refused(Code.UNKNOWN_NAMESPACE, message, self.client)
        return self._namespace

    def opened_before(self, fingerprint: Fingerprint) -> Opened | None:
        """What this client opened; Refused (NAMESPACE_MISMATCH) if it was another namespace."""
        if self._namespace is None:
            return None
        self._namespace.check_is(fingerprint)
        return self._namespace.opened

    def namespace_opened(self, opening: OpenNamespace, opened: Opened) -> None:
        """A namespace was opened, or opened again after reconnecting."""
        if self._namespace is None:
            self._namespace = Namespace(opening)
            self._namespace.opened = opened
            self.restore.opening = opening
        else:
            self._namespace.opened_again(opened)

    def mirrored(self) -> bool:
        """Whether the mirror is whole; raises why the daemon is gone, if it is."""
        if self.gone is not None:
            raise self.gone.with_traceback(None)
        return self.namespace.mirror.whole

    def check_region(self, host_bytes: int | None) -> None:
        """Raise Refused (BAD_LAYOUT) where a namespace was opened, and a region is wanted too."""
        if self._namespace is not None and host_bytes is not None:
            message = (
                "an engine in a namespace has no host region of its own: leave host_bytes out, "
                "and give open_namespace cpu_bytes_to_use"
            )
            raise Refused(Code.BAD_LAYOUT, message, host_bytes)

    # Connecting and disconnecting

    @property
    def session_id(self) -> str:
        """The daemon's name of this session."""
        return "" if self.welcome is None else self.welcome.session_id

    @property
    def linked(self) -> bool:
        """Whether a socket is in use."""
        return self.state in (ConnectionState.CONNECTING, ConnectionState.CONNECTED)

    @property
    def closed(self) -> bool:
        """Whether it never connects again."""
        return self.state is ConnectionState.CLOSED

    def present(self) -> bool | None:
        """True if connected; None while a daemon may still come. Raises `gone` if none will do."""
        if self.gone is None:
            return True
        if self.closed or self.refused is not None:
            raise self.gone.with_traceback(None)
        return None

    def connect(self) -> None:
        """A new socket was opened."""
        self.state, self._greeting, self._snapshot_needed = ConnectionState.CONNECTING, None, False

    def restored(self) -> None:
        """The daemon has greeted us, and everything of the SessionState is restored."""
        assert self.welcome is not None
        self.state, self.gone, self.refused = ConnectionState.CONNECTED, None, None
        self.incarnation += 1
        if self._namespace is not None:
            self._namespace.show()

    def registered(self, registration: Registration, region: HostRegion) -> None:
        self.restore.registration, self.restore.region = registration, region

    def lose(self, error: Gone) -> None:
        """The daemon is gone: all jobs in flight end as lost, and waiting requests fail."""
        if not self.linked:
            return
        self.state = ConnectionState.DISCONNECTED if self.reconnects else ConnectionState.CLOSED
        self.gone = self.gone or self._reason(error)
        self.jobs.lose(error)
        self._lost_stores.lose()
        self.pending.lose(error)
        if self._namespace is not None:
            self._namespace.lose()

    def abandon(self) -> None:
        """Revoke the timeline, then lose the daemon: see OffloadClient.abandon."""
        registration = self.restore.registration
        if registration is not None and registration.timeline is not None:
            registration.timeline.revoke()
        self.lose(Gone(Code.DAEMON_GONE, "the engine abandoned the session"))

    def not_admitted(self, error: Refused) -> None:
        """The daemon does not let this user connect: an attempt to connect fails."""
        if self._greeting is None:
            self._greeting = error

    def attempt_failed(self, error: KVFerryError) -> None:
        """The session could not be restored; `refused` tells if the daemon refused it."""
        self.lose(Gone(Code.DAEMON_GONE, "the session could not be restored"))
        if not isinstance(error, Gone) and error.code != Code.NO_SESSION:
            message = f"the daemon refuses to restore this session: {error}"
            self.refused, self.gone = error, Gone(Code.DAEMON_GONE, message)
            self.gone.__cause__ = error

    def stop_reconnecting(self) -> None:
        """The client is about to close; the tensors need not be kept alive any longer."""
        self.reconnects, self.restore.registration = False, None
        if self.gone is not None:
            self.state = ConnectionState.CLOSED

    def close(self, error: Gone) -> None:
        """The client was closed; `gone` is this error from now on."""
        self.lose(error)
        self.state, self.gone = ConnectionState.CLOSED, error

    def _reason(self, error: Gone) -> Gone:
        if not self.reconnects:
            return error
        return Gone(error.code, f"{error.message}; connecting again", error.value)

    # What arrived

    def feed(self, data: bytes) -> None:
        """Take a message of the daemon's in."""
        match decode_daemon_message(data):
            case Finished(results):
                for result in results:
                    self.jobs.take(result)
                    done = result.outcome is Outcome.DONE
                    self._lost_stores.ended(result.job_id, done=done)
            case Snapshot() | KeyEvents() as told:
                if self._namespace is not None and self._namespace.feed(told):
                    self._snapshot_needed = True
            case Welcome() as welcome:
                self.welcome = self._greeting = welcome
            case Error(request_id, info, _):
                self._take_error(request_id, error_of(info))
            case Goodbye(reason):
                why = f": {reason}" if reason else ""
                self.lose(Gone(Code.DAEMON_GONE, f"the daemon said goodbye{why}"))
            case Done(request_id) as done:
                if self._resetting(request_id):
                    self.namespace.done(request_id)
                self.pending.resolve(request_id, done)
            case reply:
                self.pending.resolve(reply.request_id, reply)

    def greeted(self) -> Welcome | None:
        """The daemon's Welcome, once it is here; raises what it said instead."""
        if isinstance(self._greeting, KVFerryError):
            raise self._greeting
        return self._greeting

    def reply(self, request_id: int) -> Reply | None:
        """The reply to a request, once; None while there is none. Raises what it says."""
        reply = self.pending.take(request_id)
        if reply is None and self.gone is not None and not self.pending.is_pending(request_id):
            raise self.gone.with_traceback(None)
        return reply

    def under_way(self, job_ids: Iterable[int]) -> list[int]:
        return [job_id for job_id in job_ids if job_id in self.jobs]

    def _checked_sides(self, spec: TransferSpec) -> TransferSpec:
        """A pair of specs that a daemon can read; whether they fit together it says itself."""
        if len(spec) != 2 or type(spec[0]) not in _SIDES or type(spec[1]) not in _SIDES:
            message = "a transfer is a pair of a GPULoadStoreSpec and one of the host side"
            raise Refused(Code.BAD_SPEC, message, spec)
        for side in spec:
            if isinstance(side, KeyLoadStoreSpec) and self._namespace is not None:
                self._namespace.checked(side.keys)
            else:
                side.check()
        return spec

    def _resetting(self, request_id: int) -> bool:
        return self._namespace is not None and self._namespace.resetting(request_id)

    def _take_error(self, request_id: int | None, error: KVFerryError) -> None:
        if request_id is not None:
            if not self.pending.resolve(request_id, error) and self._resetting(request_id):
                raise error
        elif self._greeting is None:
            self._greeting = error
        elif error.code == Code.NO_SESSION:
            self.lose(Gone(Code.DAEMON_GONE, "the daemon was restarted, or has let us go"))
        else:
            raise error


def timed_out(what: str, value: object) -> Gone:
    return Gone(Code.TIMEOUT, f"{what} in time", value)
