"""The protocol state of a client, without socket or clock; the same for all clients.

`ClientSession` encodes the messages to send and handles those that arrive. It keeps the jobs in
flight, their results until they are fetched, pending requests, and the namespace that it opened.
Called in the client's thread only.

A session can outlive its daemon:

    state          event               next state
    CONNECTING     mark_connected      CONNECTED
    CONNECTING     connection_lost     DISCONNECTED; CLOSED without `reconnects`
    CONNECTED      connection_lost     DISCONNECTED; CLOSED without `reconnects`
    DISCONNECTED   socket_opened       CONNECTING
    any            close               CLOSED

While CONNECTING it sends Hello, and requests everything in its SessionState (restoring.connect).
`gone` says why no request can be sent; it is None if CONNECTED, and during the first CONNECTING.
When the connection is lost, pending requests fail, and jobs in flight end as LOST, once.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from itertools import count

from kvferry.client.jobs import JobTable, checked_id, checked_ids, checked_spec
from kvferry.client.lost_stores import LostStores
from kvferry.client.namespace import ClientNamespace
from kvferry.client.pending_requests import PendingRequests
from kvferry.client.session_state import RegistrationState, SessionState
from kvferry.client.splitting import split_transfer
from kvferry.client.tier_searches import SEARCH_TIMEOUT, TierSearch
from kvferry.client.timeline import Timeline
from kvferry.client.validation import check_fields
from kvferry.proto.codec import decode_daemon_message, encode
from kvferry.proto.errors import Code, Gone, KVFerryError, Refused, error_of
from kvferry.proto.fingerprint import Fingerprint
from kvferry.proto.memory import HostRegion
from kvferry.proto.messages import (
    Cancel,
    ClientMessage,
    Done,
    Error,
    FindInTiers,
    Finished,
    Goodbye,
    Hello,
    KeyEvents,
    Opened,
    OpenNamespace,
    Reset,
    Snapshot,
    Submit,
    Subscribe,
    TiersFound,
    Wait,
    Welcome,
)
from kvferry.proto.protocol import make_hello
from kvferry.proto.results import Outcome
from kvferry.proto.specs import TransferSpec

# Seconds (11 days) that stand for math.inf, which timers do not accept.
MAX_TIMEOUT = 1e6


class ConnectionState(Enum):
    CONNECTING = "connecting"
    CONNECTED = "connected"
    DISCONNECTED = "disconnected"
    CLOSED = "closed"


class ClientSession:
    """The protocol state of one client.

    reconnects: whether the session continues when the connection is lost. restore: the state to
    restore when connected; the session then begins DISCONNECTED.
    """

    def __init__(
        self,
        engine: str,
        client: str,
        *,
        reconnects: bool = False,
        restore: SessionState | None = None,
    ) -> None:
        self.engine, self.client, self.reconnects = engine, client, reconnects
        self.state = ConnectionState.CONNECTING
        self.welcome: Welcome | None = None
        self.gone: Gone | None = None
        # Why the daemon refuses to restore the session.
        self.refused: KVFerryError | None = None
        # How often the session was connected and restored.
        self.incarnation = 0
        # Whether an earlier session ended during its registration. A daemon that has not noticed
        # that end yet refuses the next registration.
        self.registration_left = False
        # Whether tensors that the daemon keeps may be of that registration, which no engine wrote.
        self.unwritten_left = False
        self.restore = SessionState() if restore is None else restore
        self.jobs = JobTable()
        self.pending = PendingRequests()
        self._lost_stores = LostStores()
        self._hello_reply: Welcome | KVFerryError | None = None
        self._request_ids = count(1)
        self._namespace: ClientNamespace | None = None
        self._snapshot_needed = False
        if restore is not None:
            if restore.opening is not None:
                self._namespace = ClientNamespace(restore.opening, mirror=restore.mirror)
            self.connection_lost(Gone(Code.DAEMON_GONE, "not connected yet"))

    # Messages to send

    def hello(self) -> Hello:
        return make_hello(self.client, self.engine)

    def request(self, message: ClientMessage) -> bytes:
        """Encode a message. Raises Gone if not connected."""
        if self.gone is not None:
            raise self.gone.with_traceback(None)  # it is raised often, and its traceback would grow
        return encode(message)

    def next_request_id(self) -> int:
        return next(self._request_ids)

    def submit(self, job_id: int, spec: TransferSpec, wait_for: int) -> list[bytes]:
        """Encode the messages that start a job, one per part. Call `submitted` once all are sent.

        Raises Refused (DUPLICATE_JOB, BUSY, STALE, SIZE_MISMATCH...) or Gone; nothing changes.
        """
        job_id, wait_for = checked_id("job_id", job_id), checked_id("wait_for", wait_for)
        src, dst = checked_spec(spec, self._namespace)
        if job_id in self.jobs:
            raise Refused(
                Code.DUPLICATE_JOB, "a job with this id is in flight; use a new job id", job_id
            )
        factor = self.restore.block_size_factor
        parts = split_transfer((src, dst), factor)
        if self.welcome is not None:
            self.jobs.check_room(self.welcome.limits, spec, len(parts))
        self._lost_stores.check(spec, factor)
        submits = (Submit(job_id, *part, wait_for, number) for number, part in enumerate(parts))
        return [self.request(submit) for submit in submits]

    def submitted(self, job_id: int, spec: TransferSpec, parts: int) -> None:
        """The messages of `submit` were sent: the job is in flight."""
        self.jobs.add(job_id, spec, parts)
        self._lost_stores.job_submitted(job_id, spec, self.restore.block_size_factor)

    def cancel(self, job_ids: Iterable[int]) -> bytes:
        """Encode the message that cancels jobs. Raises Refused (BAD_SPEC) or Gone."""
        return self.request(Cancel(checked_ids(job_ids)))

    def wait(self, job_ids: Iterable[int]) -> Wait:
        """The request whose reply means that these jobs have ended. Raises Refused (BAD_SPEC)."""
        return Wait(self.next_request_id(), checked_ids(job_ids))

    def reset(self, label: str = "") -> Reset:
        """The request to remove all keys. Every key is a MISS until it is done. label: see Reset.

        Raises Refused (UNKNOWN_NAMESPACE, BAD_MESSAGE).
        """
        check_fields(Reset, label=label)
        message = Reset(self.next_request_id(), label)
        self.namespace.reset(message.request_id, label)
        return message

    def find_in_tiers(self, search: TierSearch, now: float) -> bytes:
        """Encode the request for the next part of a search. now: time.monotonic() in seconds."""
        message = FindInTiers(self.next_request_id(), search.part, search.compute_seconds)
        data = self.request(message)
        search.deadline = now + SEARCH_TIMEOUT
        self.namespace.tier_searches.begin(message.request_id, search)
        return data

    def follow_ups(self, now: float) -> list[bytes]:
        """The messages that the received ones require, once.

        These are a Subscribe if the mirror has missed an event, and the next parts of searches.
        now: time.monotonic() in seconds.
        """
        messages = [encode(Subscribe())] if self._snapshot_needed and self.has_socket else []
        self._snapshot_needed = False
        if self._namespace is not None:
            continuing = self._namespace.tier_searches.take_continuing()
            messages += [self.find_in_tiers(search, now) for search in continuing]
        return messages

    # The namespace

    @property
    def namespace(self) -> ClientNamespace:
        """Raises Refused (UNKNOWN_NAMESPACE) if none was opened."""
        if self._namespace is None:
            message = "this client has opened no namespace; call open_namespace first"
            raise Refused(Code.UNKNOWN_NAMESPACE, message)
        return self._namespace

    def opened_namespace(self, fingerprint: Fingerprint) -> Opened | None:
        """The opened namespace, or None. Raises Refused (NAMESPACE_MISMATCH) for another one."""
        if self._namespace is None:
            return None
        self._namespace.check_fingerprint(fingerprint)
        return self._namespace.opened

    def namespace_opened(self, opening: OpenNamespace, opened: Opened) -> None:
        """The daemon has opened a namespace, for the first time or after reconnecting."""
        if self._namespace is None:
            self._namespace = ClientNamespace(opening)
            self.restore.opening = opening
        self._namespace.reopened(opened)

    def mirror_complete(self) -> bool:
        """Whether the mirror is complete. Raises Gone if not connected."""
        if self.gone is not None:
            raise self.gone.with_traceback(None)
        return self.namespace.mirror.complete

    def check_region(self, host_bytes: int | None) -> None:
        """Raise Refused (BAD_LAYOUT) if a region is requested by a client with a namespace."""
        if self._namespace is not None and host_bytes is not None:
            message = (
                "an engine in a namespace has no host region of its own; leave host_bytes out, and "
                "pass cpu_bytes_to_use to open_namespace"
            )
            raise Refused(Code.BAD_LAYOUT, message, host_bytes)

    # Connecting and disconnecting

    @property
    def session_id(self) -> str:
        """The daemon's id of this session."""
        return "" if self.welcome is None else self.welcome.session_id

    @property
    def has_socket(self) -> bool:
        """Whether a socket is in use."""
        return self.state in (ConnectionState.CONNECTING, ConnectionState.CONNECTED)

    @property
    def closed(self) -> bool:
        """Whether the session will not connect again."""
        return self.state is ConnectionState.CLOSED

    def check_connected(self) -> bool | None:
        """True if connected, None while reconnecting. Raises `gone` if it cannot reconnect."""
        if self.gone is None:
            return True
        # ALREADY_REGISTERED may mean this client's last session, until the daemon notices its end.
        waits = self.refused is None or self.refused.code == Code.ALREADY_REGISTERED
        if self.closed or not waits:
            raise self.gone.with_traceback(None)
        return None

    def socket_opened(self) -> None:
        """A new socket was opened."""
        self.state = ConnectionState.CONNECTING
        self._hello_reply, self._snapshot_needed = None, False

    def mark_connected(self) -> None:
        """The daemon has sent Welcome, and everything in the SessionState is restored."""
        assert self.welcome is not None
        self.state, self.gone, self.refused = ConnectionState.CONNECTED, None, None
        self.incarnation += 1
        if self._namespace is not None:
            self._namespace.session_restored()

    def kv_caches_registered(self, registration: RegistrationState, region: HostRegion) -> None:
        """The daemon has registered KV caches; reconnecting registers them again."""
        self.restore.registration, self.restore.region = registration, region
        self.registration_left = self.unwritten_left = False

    def connection_lost(self, error: Gone) -> None:
        """All jobs in flight end as LOST, and pending requests fail."""
        if not self.has_socket:
            return
        self.state = ConnectionState.DISCONNECTED if self.reconnects else ConnectionState.CLOSED
        self.gone = self.gone or self._gone_error(error)
        self.jobs.fail_all(error)
        self._lost_stores.connection_lost()
        self.pending.fail_all(error)
        if self._namespace is not None:
            self._namespace.connection_lost()

    def abandon(self) -> None:
        """Revoke the timeline, then treat the connection as lost; see OffloadClient.abandon."""
        registration = self.restore.registration
        if registration is not None and registration.timeline is not None:
            registration.timeline.revoke()
        self.connection_lost(Gone(Code.DAEMON_GONE, "the engine abandoned the session"))

    def registration_failed(self, timeline: Timeline | None, *, kept: bool = False) -> None:
        """A registration got no reply, or its tensors cannot be used: its session ends.

        A daemon that hangs may register the tensors later. It copies none of their bytes then,
        because their timeline is revoked. kept: whether they are those of an earlier engine.
        """
        if timeline is not None:
            timeline.revoke()
        self.restore.registration, self.restore.region = None, None
        self.registration_left, self.unwritten_left = True, not kept
        why = "KV caches were not registered, so their session was closed; register them again"
        self.connection_lost(Gone(Code.DAEMON_GONE, why, self.engine))

    def access_refused(self, error: Refused) -> None:
        """The daemon does not let this user connect: the operation `connect` fails."""
        if self._hello_reply is None:
            self._hello_reply = error

    def reconnect_failed(self, error: KVFerryError) -> None:
        """The session was not restored; `refused` is set if the daemon refuses to."""
        self.connection_lost(Gone(Code.DAEMON_GONE, "the session could not be restored"))
        if not isinstance(error, Gone) and error.code != Code.NO_SESSION:
            message = f"the session is not restored: {error}"
            self.refused, self.gone = error, Gone(Code.DAEMON_GONE, message)
            self.gone.__cause__ = error

    def stop_reconnecting(self) -> None:
        """The client is closing; its tensors need not be kept alive."""
        self.reconnects, self.restore.registration = False, None
        if self.gone is not None:
            self.state = ConnectionState.CLOSED

    def close(self, error: Gone) -> None:
        """The client was closed; `gone` is this error from now on."""
        self.connection_lost(error)
        self.state, self.gone = ConnectionState.CLOSED, error

    def _gone_error(self, error: Gone) -> Gone:
        if not self.reconnects:
            return error
        return Gone(error.code, f"{error.message}; reconnecting", error.value)

    # Received messages

    def receive_message(self, data: bytes) -> None:
        """Handle a message of the daemon."""
        match decode_daemon_message(data):
            case Finished(results):
                for result in results:
                    if (ended := self.jobs.add_result(result)) is not None:
                        done = ended.outcome is Outcome.DONE
                        self._lost_stores.job_completed(ended.job_id, done=done)
            case Snapshot() | KeyEvents() as message:
                if self._namespace is not None and self._namespace.apply_message(message):
                    self._snapshot_needed = True
            case Welcome() as welcome:
                self.welcome = self._hello_reply = welcome
            case Error(request_id, info):
                self._receive_error(request_id, error_of(info))
            case Goodbye(reason):
                why = f": {reason}" if reason else ""
                self.connection_lost(Gone(Code.DAEMON_GONE, f"the daemon closed the session{why}"))
            case TiersFound(request_id, prefix, promoted):
                self.namespace.tier_searches.answer(request_id, prefix, promoted)
            case Done(request_id) as done:
                if self._resetting(request_id):
                    self.namespace.reset_done(done)
                self.pending.resolve(request_id, done)
            case reply:
                self.pending.resolve(reply.request_id, reply)

    def read_welcome(self) -> Welcome | None:
        """The daemon's Welcome; None if there is no reply to Hello yet. Raises an error reply."""
        if isinstance(self._hello_reply, KVFerryError):
            raise self._hello_reply
        return self._hello_reply

    def in_flight(self, job_ids: Iterable[int]) -> list[int]:
        """Those of these jobs that are in flight."""
        return [job_id for job_id in job_ids if job_id in self.jobs]

    def _resetting(self, request_id: int) -> bool:
        return self._namespace is not None and self._namespace.is_resetting(request_id)

    def _receive_error(self, request_id: int | None, error: KVFerryError) -> None:
        if request_id is not None:
            if self._namespace is not None:
                self._namespace.tier_searches.end(request_id)
            if not self.pending.resolve(request_id, error) and self._resetting(request_id):
                raise error
        elif self._hello_reply is None:
            self._hello_reply = error
        elif error.code == Code.NO_SESSION:
            self.connection_lost(
                Gone(Code.DAEMON_GONE, "the daemon has restarted, or has closed this session")
            )
        else:
            raise error


def timed_out(what: str, value: object) -> Gone:
    """The error for something that did not happen within its timeout."""
    return Gone(Code.TIMEOUT, f"{what} in time", value)
