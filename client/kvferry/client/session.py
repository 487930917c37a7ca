"""A client's session: the wire, the namespace that is open, and the jobs.

It has no socket and no clock. A session can outlive its daemon: the next daemon restores what its
SessionState contains (restoring.py). Called in the client's thread only.
"""

from __future__ import annotations

from kvferry.client.jobs import SessionJobs
from kvferry.client.namespace import ClientNamespace, OpenedNamespace
from kvferry.client.session_state import RegistrationState, SessionState
from kvferry.client.timeline import Timeline
from kvferry.client.wire import Wire
from kvferry.proto.codec import decode_daemon_message
from kvferry.proto.errors import Code, Gone, KVFerryError, error_of
from kvferry.proto.hints import Retained
from kvferry.proto.memory import HostRegion
from kvferry.proto.messages import (
    Done,
    Error,
    Finished,
    Goodbye,
    KeyEvents,
    Snapshot,
    TiersFound,
    Welcome,
)


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
        self.wire = Wire(engine, client, reconnects=reconnects)
        self.restore = SessionState() if restore is None else restore
        self.opened = OpenedNamespace(self.wire, self.restore)
        self.jobs = SessionJobs(self.wire, self.restore, self.opened)
        # Whether an earlier session ended during its registration. A daemon that has not noticed
        # that end yet refuses the next registration.
        self.registration_left = False
        # Whether tensors that the daemon keeps may be of that registration, which no engine wrote.
        self.unwritten_left = False
        if restore is not None:
            self.connection_lost(Gone(Code.DAEMON_GONE, "not connected yet"))

    @property
    def namespace(self) -> ClientNamespace:
        """Raises Refused (UNKNOWN_NAMESPACE) if none was opened."""
        return self.opened.namespace

    # Connecting and disconnecting

    def mark_connected(self) -> None:
        """The daemon has sent Welcome, and everything in the SessionState is restored."""
        self.wire.mark_connected()
        self.opened.session_restored()

    def connection_lost(self, error: Gone) -> None:
        """All jobs in flight end as LOST, once, and pending requests fail."""
        if self.wire.connection_lost(error):
            self.jobs.connection_lost(error)
            self.opened.connection_lost()

    def reconnect_failed(self, error: KVFerryError) -> None:
        """The session was not restored; `wire.refused` is set if the daemon refuses to."""
        self.connection_lost(Gone(Code.DAEMON_GONE, "the session could not be restored"))
        if not isinstance(error, Gone) and error.code != Code.NO_SESSION:
            self.wire.restoring_refused(error)

    def kv_caches_registered(self, registration: RegistrationState, region: HostRegion) -> None:
        """The daemon has registered KV caches; reconnecting registers them again."""
        self.restore.registration, self.restore.region = registration, region
        self.registration_left = self.unwritten_left = False

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
        self.connection_lost(Gone(Code.DAEMON_GONE, why, self.wire.engine))

    def abandon(self) -> None:
        """Revoke the timeline, then treat the connection as lost; see OffloadClient.abandon."""
        registration = self.restore.registration
        if registration is not None and registration.timeline is not None:
            registration.timeline.revoke()
        self.connection_lost(Gone(Code.DAEMON_GONE, "the engine abandoned the session"))

    def stop_reconnecting(self) -> None:
        """The client is closing; its tensors need not be kept alive."""
        self.restore.registration = None
        self.wire.stop_reconnecting()

    def close(self, error: Gone) -> None:
        """The client was closed; `gone` is this error from now on."""
        self.connection_lost(error)
        self.wire.close(error)

    # Received messages

    def receive_message(self, data: bytes) -> None:
        """Handle a message of the daemon. Raises its error, if no call waits for that."""
        match decode_daemon_message(data):
            case Finished() as results:
                self.jobs.receive(results)
            case Snapshot() | KeyEvents() | TiersFound() | Retained() as message:
                self.opened.receive(message)
            case Welcome() as welcome:
                self.wire.hello_answered(welcome)
            case Error(request_id, info):
                self._receive_error(request_id, error_of(info))
            case Goodbye(reason):
                why = f": {reason}" if reason else ""
                self.connection_lost(Gone(Code.DAEMON_GONE, f"the daemon closed the session{why}"))
            case reply:
                if isinstance(reply, Done):
                    self.opened.receive(reply)
                self.wire.pending.resolve(reply.request_id, reply)

    def _receive_error(self, request_id: int | None, error: KVFerryError) -> None:
        if request_id is not None:
            is_reset = self.opened.request_refused(request_id)
            if not self.wire.pending.resolve(request_id, error) and is_reset:
                raise error
        elif self.wire.hello_answered(error):
            return
        elif error.code == Code.NO_SESSION:
            self.connection_lost(
                Gone(Code.DAEMON_GONE, "the daemon has restarted, or has closed this session")
            )
        else:
            raise error
