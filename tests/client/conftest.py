"""Daemons without a process: real messages, through real clients, and no socket between them."""

from __future__ import annotations

import socket
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import pytest

from kvferry.client import OffloadClient
from kvferry.proto import messages as wire
from kvferry.proto.codec import decode_client_message, encode
from kvferry.proto.errors import Code, ErrorInfo, Gone
from kvferry.proto.keys import EventKind, OffloadKey
from kvferry.proto.messages import KeyEvent, KeyEvents
from kvferry.proto.status import DeviceInfo, Limits

M = TypeVar("M")
WELCOME = wire.Welcome(1, "boot", "s1", "0.1", 1, DeviceInfo("cpu", "cpu", "host"), Limits(9, 9, 9))


class StandIn:
    """A daemon with one namespace, in the place of a client's Connection.

    It keeps what it was said, and answers at once; `slow` keeps the answers to resets back,
    `deaf` keeps all back, `lossy` drops KeyEvents, and `refusal` is the answer to every request.
    """

    def __init__(self, directory: Path, num_blocks: int) -> None:
        self.directory, self.num_blocks = directory, num_blocks
        self.said: list[wire.ClientMessage] = []
        self.sequence, self.generation = 0, 1
        self.ready: dict[OffloadKey, None] = {}
        self.pending: dict[OffloadKey, None] = {}
        self.slow = self.deaf = self.lossy = self.dead = self.closed = False
        self.refusal: ErrorInfo | None = None
        self.drains = self.opened = 0
        self._to_send: deque[bytes] = deque()
        self._resets: list[int] = []

    # What tests have it do, and ask of it

    def store(self, *keys: OffloadKey) -> None:
        self.happen((EventKind.PENDING, *keys), (EventKind.STORED, *keys))

    def reserve(self, *keys: OffloadKey) -> None:
        self.happen((EventKind.PENDING, *keys))

    def evict(self, *keys: OffloadKey) -> None:
        self.happen((EventKind.REMOVED, *keys))

    def happen(self, *events: tuple[Any, ...]) -> None:
        """(kind, key, key...), all told at once."""
        self.sequence += 1
        for kind, *keys in events:
            self._apply(kind, keys)
            self.generation += kind is EventKind.CLEARED
        if not self.lossy:
            parts = tuple(KeyEvent(kind, tuple(keys)) for kind, *keys in events)
            self.send_back(KeyEvents(self.sequence, parts, self.generation))

    def finish_resets(self) -> None:
        for request_id in self._resets:
            self.happen((EventKind.CLEARED,))
            self.send_back(wire.Done(request_id))
        self._resets.clear()

    def heard(self, kind: type[M]) -> list[M]:
        """What it was said of this kind."""
        return [message for message in self.said if isinstance(message, kind)]

    def send_back(self, message: wire.DaemonMessage) -> None:
        self._to_send.append(encode(message))

    # A client's Connection

    def send(self, data: bytes) -> None:
        message = decode_client_message(data)
        self.said.append(message)
        if not self.deaf:
            self._answer(message)

    def drain(self, feed: Callable[[bytes], None]) -> bool:
        if self.closed:
            raise Gone(Code.DAEMON_GONE, "closed")
        self.drains += 1
        news = bool(self._to_send)
        while self._to_send:
            feed(self._to_send.popleft())
        return news

    def check_alive(self) -> None:
        if self.dead:
            raise Gone(Code.DAEMON_GONE, "killed")

    def reopen(self) -> None:
        """What was on its way is lost with the socket."""
        self._to_send.clear()
        self.opened += 1

    def wait(self, seconds: float) -> None:
        time.sleep(min(seconds, 0.001))

    def close(self, *, heard: bool = True) -> None:
        self.closed = True

    # Its answers

    def _answer(self, message: wire.ClientMessage) -> None:
        match message:
            case wire.OpenNamespace(number) | wire.Reset(number) if self.refusal is not None:
                self.send_back(wire.Error(number, self.refusal))
            case wire.Hello():
                self.send_back(WELCOME)
            case wire.OpenNamespace(number, fingerprint, _, policy, threshold):
                name, nbytes = fingerprint.name, fingerprint.host_block_bytes
                self.send_back(
                    wire.Opened(number, name, self.num_blocks, nbytes, False, policy, threshold)
                )
            case wire.Subscribe():
                for part in self._snapshot():
                    self.send_back(part)
            case wire.Reset(number):
                self._resets.append(number)
                if not self.slow:
                    self.finish_resets()
            case wire.Goodbye():
                self.send_back(wire.Goodbye())

    def _snapshot(self) -> Iterator[wire.Snapshot]:
        """A key a part."""
        keys = [(False, (key,)) for key in self.ready] + [(True, (key,)) for key in self.pending]
        for part, (pending, some) in enumerate([*keys, (False, ())]):
            yield wire.Snapshot(self.sequence, part, pending, some, part == len(keys))

    def _apply(self, kind: EventKind, keys: list[OffloadKey]) -> None:
        if kind is EventKind.CLEARED:
            keys = [*self.ready, *self.pending]
        for key in keys:
            self.ready.pop(key, None)
            self.pending.pop(key, None)
        if kind in (EventKind.STORED, EventKind.PENDING):
            (self.ready if kind is EventKind.STORED else self.pending).update(dict.fromkeys(keys))


@pytest.fixture
def start_stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., StandIn]]:
    """start_stand_in(num_blocks) -> a daemon; who connects to its directory talks to it.

    The directory has a real socket file, because clients wait until a daemon has bound one.

    Clients look at what has arrived at each lookup and each poll.
    """
    running: dict[Path, StandIn] = {}
    held = ExitStack()

    def start(num_blocks: int = 8) -> StandIn:
        directory = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="stand-in-")))
        bound = held.enter_context(socket.socket(socket.AF_UNIX))
        bound.bind(str(directory / "kvferry.sock"))
        running[directory] = StandIn(directory, num_blocks)
        return running[directory]

    monkeypatch.setattr("kvferry.client.nonblocking.Connection", running.__getitem__)
    monkeypatch.setattr("kvferry.client.nonblocking.FRESH", 0.0)
    monkeypatch.setattr("kvferry.client.nonblocking.ALIVE_EVERY", 0.0)
    with held:
        yield start


@pytest.fixture
def stand_in(start_stand_in: Callable[..., StandIn]) -> StandIn:
    return start_stand_in()


@pytest.fixture
def client(stand_in: StandIn) -> OffloadClient:
    """Of `stand_in`, and of no other after it; no namespace is opened."""
    return OffloadClient(stand_in.directory, engine="engine", timeout=0.2, reconnect=False)
