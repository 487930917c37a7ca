"""Sessions of clients: from their Hello to their end, and the messages in both directions.

The ingress (ingress.py) passes received messages here. They are decoded, and passed to the owner of
the sessions, which is the server. Event loop only.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Protocol

import zmq

from kvferry.daemon.access.connections import Connections
from kvferry.daemon.core.actions import CloseSession
from kvferry.daemon.core.registration import OWN_SESSION
from kvferry.daemon.observability.event_log import EventLog
from kvferry.daemon.transport.accept_gate import AcceptGate
from kvferry.daemon.transport.ingress import Frames, Ingress
from kvferry.daemon.transport.outbox import Outboxes
from kvferry.daemon.transport.peers import Peer, Peers
from kvferry.proto.codec import decode_client_message
from kvferry.proto.errors import Code, ErrorInfo, KVFerryError, Refused
from kvferry.proto.messages import (
    ClientMessage,
    DaemonMessage,
    Goodbye,
    Hello,
    NamespacesRequest,
    StatusRequest,
)

# Largest message of a connection without a session. Decoding a large one takes up to 0.3 s, and the
# ingress cannot charge that time to a new connection (ingress.py).
MAX_HELLO_BYTES = 8192
# A client that sends nothing else is not logged.
STATUS_MESSAGES = StatusRequest, NamespacesRequest, Goodbye


class SessionOwner(Protocol):
    """Decides about sessions and handles their messages."""

    def handle_message(self, session: str, message: ClientMessage) -> None: ...

    def open_session(self, session: str, hello: Hello, uid: int) -> bool:
        """Reply to a Hello of a process of user `uid`. Return whether the session is open."""

    def close_session(self, session: str) -> None: ...

    def refusal_reply(self, error: KVFerryError) -> DaemonMessage:
        """The reply to a message that could not be handled."""


class Sessions:
    """All sessions of one ROUTER."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        accept_gate: AcceptGate,
        connections: Connections,
        client_log: EventLog,
        owner: SessionOwner,
    ) -> None:
        self._log, self._owner = client_log, owner
        self._peers = Peers(self.disconnect_client)
        self.ingress = Ingress(socket, self._peers, accept_gate, connections, self)
        self.outboxes = Outboxes(
            socket, self._peers, self.ingress.drain_soon, self.disconnect_client
        )

    def peer_of(self, session: str) -> Peer | None:
        """The client of a session; None for the daemon's own session, and after its end."""
        return self._peers.by_session.get(session)

    def send_message(self, session: str, message: DaemonMessage) -> None:
        """Send a message, unless the session has ended."""
        peer = self._peers.by_session.get(session)
        if peer is not None:
            self._log.replied(peer, message)
            self.outboxes.send_message(peer, message)

    def send_to_all(self, message: DaemonMessage) -> None:
        """Send a message to all clients."""
        for peer in tuple(self._peers.by_session.values()):
            self.outboxes.send_message(peer, message)

    def remove_session(self, action: CloseSession) -> None:
        """Forget a client whose session the owner has closed."""
        if (peer := self._peers.by_session[action.session]).is_logged:
            self._log.client_disconnected(peer, action)
        self._peers.remove_peer(action.session)

    def log_failed_job(self, sessions: Iterable[str], error: ErrorInfo) -> None:
        """Log a job that failed, unless it is the daemon's own. sessions: who gets its result."""
        names = tuple(sessions)
        if OWN_SESSION not in names:
            peers = [peer for name in names if (peer := self._peers.by_session.get(name))]
            self._log.job_failed(peers[0] if peers else None, error)

    def close(self) -> None:
        self.ingress.close()
        self._peers.close()

    # Called by the ingress

    def receive_message(self, identity: bytes, peer: Peer | None, frames: Frames) -> None:
        try:
            message = _decode(frames, in_session=peer is not None)
            if peer is not None:
                if not (peer.is_logged or isinstance(message, STATUS_MESSAGES)):
                    peer.is_logged = True
                    self._log.client_connected(peer)
                self._owner.handle_message(peer.session, message)
            elif isinstance(message, Hello):
                self._open_session(identity, frames[0], message)
            else:
                kind = type(message).__name__
                text = f"{kind} was received before Hello; send Hello first"
                raise Refused(Code.NO_SESSION, text, kind)
        except KVFerryError as error:
            self._log.message_refused(peer, error.info)
            self.outboxes.send_without_session(identity, self._owner.refusal_reply(error))
        except Exception as error:
            self._disconnect_after_error(identity, peer, error)

    def disconnect_client(self, peer: Peer, reason: str) -> None:
        """Close the session of a client that has disconnected or must be disconnected."""
        if peer.session in self._peers.by_session:
            peer.close_reason = reason
            self.ingress.drop_messages(peer)
            self._owner.close_session(peer.session)

    def _open_session(self, identity: bytes, frame: zmq.Frame, hello: Hello) -> None:
        # First: the disconnect of an earlier peer with this number would seem to be this peer's.
        self.ingress.handle_connections()
        session = secrets.token_hex(16)
        peer = self._peers.add_peer(session, identity, frame, hello)
        if not self._owner.open_session(session, hello, peer.uid):
            self._log.client_refused(peer)
            self._peers.remove_peer(session)

    def _disconnect_after_error(self, identity: bytes, peer: Peer | None, error: Exception) -> None:
        """Disconnect a client whose message caused an internal error; the others continue."""
        self._log.internal_error(peer, error)
        goodbye = Goodbye("internal error of the daemon; see its log")
        self.outboxes.send_without_session(identity, goodbye)
        if peer is not None:
            self.disconnect_client(peer, "internal error")


def _decode(frames: Frames, *, in_session: bool) -> ClientMessage:
    """Decode a received message. Raises Refused (BAD_MESSAGE, NO_SESSION, BAD_SPEC, ...)."""
    if len(frames) != 1:
        text = f"a message of {len(frames)} frames was received; send one frame"
        raise Refused(Code.BAD_MESSAGE, text, len(frames))
    frame = frames[0]
    if not in_session and len(frame) > MAX_HELLO_BYTES:
        text = f"a message of {len(frame)} bytes was received before Hello; send Hello first"
        raise Refused(Code.NO_SESSION, text, len(frame))
    return decode_client_message(frame.buffer)
