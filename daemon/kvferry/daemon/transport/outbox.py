"""Outboxes: messages for clients that do not receive them fast enough.

A message that the socket does not accept is queued in the client's outbox, in order. While an
outbox is long, key events are left out; the client sees the gap and requests a snapshot. The next
message of a long reply is created when the outbox is empty. A client with a full outbox is
disconnected; the last message that it receives is a Goodbye with the reason. Event loop only.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import zmq

from kvferry.daemon.core.actions import Action, SendMessage
from kvferry.daemon.transport.peers import Peer, Peers
from kvferry.proto.codec import MAX_REPLY_BYTES, encode
from kvferry.proto.errors import ErrorInfo, Refused
from kvferry.proto.messages import DaemonMessage, Error, Finished, Goodbye, KeyEvents
from kvferry.proto.results import JobResult

# Seconds until the next attempt to send.
RETRY = 0.002


@dataclass(frozen=True, slots=True)
class OutboxLimits:
    """Limits of one outbox; a client that exceeds `messages` or `nbytes` is disconnected.

    events, event_bytes: numbers of queued messages and of their bytes from which on key events are
    left out. The rest is for results.
    """

    messages: int = 100_000
    nbytes: int = 16 << 20
    events: int = 1000
    event_bytes: int = 4 << 20


class Outboxes:
    """The outboxes of all peers of one ROUTER.

    on_send: called before the socket is written to. on_overflow: called with a client that must be
        disconnected because its outbox is full, and the reason.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        peers: Peers,
        on_send: Callable[[], None],
        on_overflow: Callable[[Peer, str], None],
        limits: OutboxLimits = OutboxLimits(),
    ) -> None:
        self._socket = socket
        self._limits = limits
        self._peers = peers
        self._on_send = on_send
        self._on_overflow = on_overflow
        self._loop = asyncio.get_running_loop()

    def send_message(self, peer: Peer, message: DaemonMessage) -> None:
        """Send or queue a message."""
        try:
            data = encode(message)
        except Refused as error:  # without a reply the client would wait until its deadline
            text = f"the reply has {error.value} bytes, more than {MAX_REPLY_BYTES}; request less"
            info = ErrorInfo(error.code, text, error.value)
            data = encode(Error(getattr(message, "request_id", None), info))
        self._queue_message(peer, data)

    def send_without_session(self, identity: bytes, message: DaemonMessage) -> None:
        """Send to a connection without a session; drop the message if that is not possible now."""
        self._on_send()
        try:
            self._socket.send_multipart([identity, encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError:
            return

    def broadcast_events(self, sessions: Sequence[str], key_events: KeyEvents) -> None:
        """Send key events to these sessions, except those with long outboxes."""
        data = encode(key_events)
        for session in sessions:
            peer = self._peers.by_session.get(session)
            if peer is None:
                continue
            limits = self._limits
            if len(peer.outbox) < limits.events and peer.outbox_bytes < limits.event_bytes:
                self._queue_message(peer, data)
            else:
                peer.missed_events = key_events

    def start_stream(self, session: str, messages: Iterator[DaemonMessage]) -> None:
        """Send a long reply, message by message. It replaces an unfinished one."""
        peer = self._peers.by_session[session]
        is_streaming, peer.stream = peer.stream is not None, messages
        if not is_streaming:
            self._continue_stream(session)

    def _continue_stream(self, session: str) -> None:
        """Send the next message of a long reply, and schedule the rest."""
        peer = self._peers.by_session.get(session)
        if peer is None or peer.stream is None:
            return
        if peer.outbox:
            self._loop.call_later(RETRY, self._continue_stream, session)
        elif (message := next(peer.stream, None)) is None:
            peer.stream = None
        else:
            self.send_message(peer, message)
            self._loop.call_soon(self._continue_stream, session)

    def _queue_message(self, peer: Peer, data: bytes) -> None:
        if peer.overflowed:
            return
        limits = self._limits
        peer.outbox.append(data)
        peer.outbox_bytes += len(data)
        if len(peer.outbox) == 1:
            self._flush(peer)
        elif len(peer.outbox) > limits.messages or peer.outbox_bytes > limits.nbytes:
            self._close_overflowed(peer)

    def _close_overflowed(self, peer: Peer) -> None:
        """Replace an outbox by a Goodbye with the reason, which the pending flush sends."""
        queued = len(peer.outbox)
        reason = f"{queued} messages were queued and none was received; poll more often"
        peer.overflowed = True
        peer.outbox.clear()
        peer.missed_events = None
        peer.outbox.append(encode(Goodbye(reason)))
        peer.outbox_bytes = len(peer.outbox[0])
        # Later: a message of this client may be in progress.
        self._loop.call_soon(self._on_overflow, peer, f"received none of {queued} messages")

    def _flush(self, peer: Peer) -> None:
        """Send the content of a client's outbox; retry soon if the socket is full.

        A failed send, too, consumes the edge of the socket's descriptor.
        """
        self._on_send()
        while peer.outbox:
            try:
                self._socket.send_multipart([peer.identity, peer.outbox[0]], zmq.NOBLOCK)
            except zmq.Again:
                self._loop.call_later(RETRY, self._flush, peer)
                return
            except zmq.ZMQError:  # disconnected; its pidfd or the monitor reports it
                peer.outbox.clear()
                peer.outbox_bytes = 0
                return
            peer.outbox_bytes -= len(peer.outbox.popleft())
            if peer.missed_events is not None and not peer.outbox:
                missed, peer.missed_events = peer.missed_events, None
                peer.outbox.append(encode(KeyEvents(missed.sequence, (), missed.epoch)))
                peer.outbox_bytes += len(peer.outbox[0])


def merge_results(actions: list[Action]) -> list[Action]:
    """Put all results of a session into one message, at the position of the first one.

    A message costs the client and the daemon more than a result. A result may overtake other
    messages of its session, but no other result. So Waited stays after the results of its jobs.
    """
    results: defaultdict[str, list[JobResult]] = defaultdict(list)
    for action in actions:
        if isinstance(action, SendMessage) and isinstance(action.message, Finished):
            results[action.session] += action.message.results
    merged = list[Action]()
    for action in actions:
        if isinstance(action, SendMessage) and isinstance(action.message, Finished):
            if (all_results := results.pop(action.session, None)) is not None:
                merged.append(SendMessage(action.session, Finished(tuple(all_results))))
        else:
            merged.append(action)
    return merged
