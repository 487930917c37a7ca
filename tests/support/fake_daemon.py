"""FakeDaemon: real messages and real clients, without a process or a socket."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kvferry.proto import messages as wire
from kvferry.proto.codec import decode_client_message, encode
from kvferry.proto.errors import Code, ErrorInfo, Gone
from kvferry.proto.hints import Retain, Retained
from kvferry.proto.keys import EventKind, OffloadKey
from kvferry.proto.messages import KeyEvent, KeyEvents
from kvferry.proto.status import DeviceInfo, Limits

M = TypeVar("M")
DEVICE, LIMITS = DeviceInfo("cpu", "cpu", "host"), Limits(9, 1 << 18, 99)
WELCOME = wire.Welcome(1, "boot", "s1", "0.1", 1, DEVICE, LIMITS)


class FakeDaemon:
    """A daemon with one namespace, used in place of a client's Connection.

    It records received messages and replies at once. slow: it does not reply to resets until
    `finish_resets`. silent: it does not reply. lossy: it drops KeyEvents. refusal: the error that
    it replies to each request. unpublished: what its Done names. stores_once: whether it has
    siblings, whose keys it does not store.
    Clients receive messages at each lookup, and check the connection at each poll.
    """

    def __init__(self, directory: Path, num_blocks: int) -> None:
        self.directory, self.num_blocks = directory, num_blocks
        self.received: list[wire.ClientMessage] = []
        self.sequence = self.epoch = 0
        self.ready: dict[OffloadKey, None] = {}
        self.pending: dict[OffloadKey, None] = {}
        self.slow = self.silent = self.lossy = self.disconnected = self.closed = False
        self.stores_once = False
        self.unpublished: tuple[str, ...] = ()
        self.refusal: ErrorInfo | None = None
        self.drains = self.opened = 0
        self.alive_check_interval = self.mirror_max_age = 0.0
        self._to_send: deque[bytes] = deque()
        self._resets: list[int] = []

    # For tests

    def store(self, *keys: OffloadKey) -> None:
        self.send_events((EventKind.PENDING, *keys), (EventKind.STORED, *keys))

    def reserve(self, *keys: OffloadKey) -> None:
        self.send_events((EventKind.PENDING, *keys))

    def evict(self, *keys: OffloadKey) -> None:
        self.send_events((EventKind.REMOVED, *keys))

    def send_events(self, *events: tuple[Any, ...]) -> None:
        """Apply events, each (kind, key, key...), and send them in one message."""
        self.sequence += 1
        for kind, *keys in events:
            self._apply(kind, keys)
            self.epoch += kind is EventKind.CLEARED
        if not self.lossy:
            parts = tuple(KeyEvent(kind, tuple(keys)) for kind, *keys in events)
            self.send_to_client(KeyEvents(self.sequence, parts, self.epoch))

    def finish_resets(self) -> None:
        for request_id in self._resets:
            self.send_events((EventKind.CLEARED,))
            self.send_to_client(wire.Done(request_id, self.epoch, self.unpublished))
        self._resets.clear()

    def received_of(self, kind: type[M]) -> list[M]:
        """The received messages of a type."""
        return [message for message in self.received if isinstance(message, kind)]

    def send_to_client(self, message: wire.DaemonMessage) -> None:
        self._to_send.append(encode(message))

    # The methods of Connection

    def send(self, data: bytes) -> None:
        message = decode_client_message(data)
        self.received.append(message)
        if not self.silent:
            self._reply(message)

    def receive_messages(self, handle: Callable[[bytes], None]) -> bool:
        if self.closed:
            raise Gone(Code.DAEMON_GONE, "closed")
        self.drains += 1
        received = bool(self._to_send)
        while self._to_send:
            handle(self._to_send.popleft())
        return received

    def check_alive(self) -> None:
        if self.disconnected:
            raise Gone(Code.DAEMON_GONE, "killed")

    def reopen(self) -> None:
        """Connect again. Messages in flight are lost."""
        self._to_send.clear()
        self.opened += 1

    def wait_readable(self, seconds: float) -> None:
        time.sleep(min(seconds, 0.001))

    def close(self, *, linger: bool = True) -> None:
        self.closed = True

    # Replies

    def _reply(self, message: wire.ClientMessage) -> None:
        match message:
            case (
                wire.OpenNamespace(number)
                | wire.Reset(number)
                | Retain(number)
                | wire.Pin(_, int(number))
            ) if self.refusal is not None:
                self.send_to_client(wire.Error(number, self.refusal))
            case wire.Hello():
                self.send_to_client(WELCOME)
            case wire.Pin(keys, int(number)):
                held = len(list(takewhile(self.ready.__contains__, keys)))
                self.send_to_client(wire.Pinned(number, held))
            case wire.OpenNamespace(number, fingerprint, _, policy, threshold):
                name, nbytes = fingerprint.name, fingerprint.host_block_bytes
                opened = wire.Opened(
                    number,
                    name,
                    self.num_blocks,
                    nbytes,
                    False,
                    policy,
                    threshold,
                    epoch=self.epoch,
                )
                if self.stores_once:
                    tiers = ("siblings",)
                    opened = msgspec.structs.replace(opened, tiers=tiers, stores_once=True)
                self.send_to_client(opened)
            case Retain(number, keys):
                kept = len(self.ready.keys() & {*keys})
                clipped = max(0, kept - self.num_blocks // 4)
                answer = Retained(number, kept - clipped, len(keys) - kept, clipped)
                self.send_to_client(answer)
            case wire.Subscribe():
                for part in self._snapshot():
                    self.send_to_client(part)
            case wire.Reset(number):
                self._resets.append(number)
                if not self.slow:
                    self.finish_resets()
            case wire.Goodbye():
                self.send_to_client(wire.Goodbye())

    def _snapshot(self) -> Iterator[wire.Snapshot]:
        """One key per part."""
        keys = [(False, (key,)) for key in self.ready] + [(True, (key,)) for key in self.pending]
        for part, (pending, part_keys) in enumerate([*keys, (False, ())]):
            last = part == len(keys)
            yield wire.Snapshot(self.sequence, part, pending, part_keys, last, self.epoch)

    def _apply(self, kind: EventKind, keys: list[OffloadKey]) -> None:
        if kind is EventKind.CLEARED:
            keys = [*self.ready, *self.pending]
        for key in keys:
            self.ready.pop(key, None)
            self.pending.pop(key, None)
        if kind in (EventKind.STORED, EventKind.PENDING):
            (self.ready if kind is EventKind.STORED else self.pending).update(dict.fromkeys(keys))
