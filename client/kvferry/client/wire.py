"""The state of a client's connection, without socket or clock; the same for all clients.

It encodes messages, and keeps pending requests. It can outlive its daemon:

    state          event               next state
    CONNECTING     mark_connected      CONNECTED
    CONNECTING     connection_lost     DISCONNECTED; CLOSED without `reconnects`
    CONNECTED      connection_lost     DISCONNECTED; CLOSED without `reconnects`
    DISCONNECTED   socket_opened       CONNECTING
    any            close               CLOSED

While CONNECTING, Hello is sent and the session is restored (restoring.py). `gone` says why no
request can be sent; it is None if CONNECTED, and during the first CONNECTING. Called in the
client's thread only.
"""

from __future__ import annotations

from enum import Enum
from itertools import count

from kvferry.client.pending_requests import PendingRequests
from kvferry.proto.codec import encode
from kvferry.proto.errors import Code, Gone, KVFerryError
from kvferry.proto.messages import ClientMessage, Hello, Welcome
from kvferry.proto.protocol import make_hello

# Seconds (11 days) that stand for math.inf, which timers do not accept.
MAX_TIMEOUT = 1e6


class ConnectionState(Enum):
    CONNECTING = "connecting"
    CONNECTED = "connected"
    DISCONNECTED = "disconnected"
    CLOSED = "closed"


class Wire:
    """The state of one client's connections, one after the other.

    reconnects: whether the session continues when a connection is lost.
    """

    def __init__(self, engine: str, client: str, *, reconnects: bool) -> None:
        self.engine, self.client, self.reconnects = engine, client, reconnects
        self.state = ConnectionState.CONNECTING
        self.welcome: Welcome | None = None
        self.gone: Gone | None = None
        # Why the daemon refuses to restore the session.
        self.refused: KVFerryError | None = None
        # How often the session was connected and restored.
        self.incarnation = 0
        self.pending = PendingRequests()
        self._hello_reply: Welcome | KVFerryError | None = None
        self._request_ids = count(1)

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
        self.state, self._hello_reply = ConnectionState.CONNECTING, None

    def read_welcome(self) -> Welcome | None:
        """The daemon's Welcome; None if there is no reply to Hello yet. Raises an error reply."""
        if isinstance(self._hello_reply, KVFerryError):
            raise self._hello_reply
        return self._hello_reply

    def hello_answered(self, reply: Welcome | KVFerryError) -> bool:
        """The daemon has answered Hello, or does not let this user connect. False if it had."""
        if isinstance(reply, Welcome):
            self.welcome = self._hello_reply = reply
        elif self._hello_reply is None:
            self._hello_reply = reply
        else:
            return False
        return True

    def mark_connected(self) -> None:
        """The daemon has sent Welcome, and everything in the SessionState is restored."""
        assert self.welcome is not None
        self.state, self.gone, self.refused = ConnectionState.CONNECTED, None, None
        self.incarnation += 1

    def connection_lost(self, error: Gone) -> bool:
        """Pending requests fail. False if there was no connection."""
        if not self.has_socket:
            return False
        self.state = ConnectionState.DISCONNECTED if self.reconnects else ConnectionState.CLOSED
        self.gone = self.gone or self._gone_error(error)
        self.pending.fail_all(error)
        return True

    def restoring_refused(self, error: KVFerryError) -> None:
        """The daemon refuses to restore the session."""
        message = f"the session is not restored: {error}"
        self.refused, self.gone = error, Gone(Code.DAEMON_GONE, message)
        self.gone.__cause__ = error

    def stop_reconnecting(self) -> None:
        self.reconnects = False
        if self.gone is not None:
            self.state = ConnectionState.CLOSED

    def close(self, error: Gone) -> None:
        """The client was closed; `gone` is this error from now on."""
        self.state, self.gone = ConnectionState.CLOSED, error

    def _gone_error(self, error: Gone) -> Gone:
        if not self.reconnects:
            return error
        return Gone(error.code, f"{error.message}; reconnecting", error.value)


def timed_out(what: str, value: object) -> Gone:
    """The error for something that did not happen within its timeout."""
    return Gone(Code.TIMEOUT, f"{what} in time", value)
