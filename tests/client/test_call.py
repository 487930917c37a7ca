"""Call: waiting within a deadline, with a link whose pauses take no time."""

from __future__ import annotations

import socket
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.client.call import Call
from kvferry.client.link import ClientLink
from kvferry.client.restoring import restore_session
from kvferry.client.session import ClientSession
from kvferry.client.transport.connection import NoConnection
from kvferry.client.transport.fd_client import SocketBusy
from kvferry.proto.codec import decode_client_message
from kvferry.proto.errors import Code, Gone
from kvferry.proto.messages import ClientMessage, Subscribe


class RecordingConnection(NoConnection):
    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory, self.sent = directory, list[ClientMessage]()

    def send(self, data: bytes) -> None:
        self.sent.append(decode_client_message(data))


class PausingLink(ClientLink):
    """Each pause takes one of the `left` seconds, then calls `on_receive`."""

    def __init__(self, left: int, directory: Path) -> None:
        super().__init__(ClientSession("engine", "client"), lambda: directory, restore_session)
        self.left, self.sent = left, list[ClientMessage]()
        recording = RecordingConnection(directory)
        self.connection, self.sent = recording, recording.sent
        self.on_receive: Callable[[], None] = lambda: None

    async def pause(self, seconds: float) -> None:
        assert seconds >= 0
        self.left -= 1
        self.on_receive()


class PausingCall(Call):
    """A call whose deadline passes after `left` pauses."""

    link: PausingLink

    def __init__(self, left: int, directory: Path = Path()) -> None:
        super().__init__(PausingLink(left, directory), 0.0)

    def _seconds_left(self) -> float:
        return self.link.left


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    with pytest.raises(StopIteration) as end:
        coroutine.send(None)
    return end.value.value


def test_it_returns_the_value_that_it_waited_for() -> None:
    """Also if it arrives at the deadline."""
    call, received = PausingCall(2), list[int]()
    call.link.on_receive = lambda: received.append(1)
    assert run(call.until(lambda: 7 if len(received) > 2 else None)) == 7
    assert len(received) == 3


def test_after_a_timeout_a_message_can_be_sent_without_waiting() -> None:
    call = PausingCall(3)
    never: Callable[[], bool | None] = lambda: None  # noqa: E731
    for waiting in (call.until(never), call.send_until(Subscribe(), never)):
        with pytest.raises(Gone) as gone:
            waiting.send(None)
        assert gone.value.code == Code.TIMEOUT
    assert call.link.left == -2
    assert call.link.sent == [Subscribe()]


@pytest.fixture
def full_socket(short_path: Path) -> Iterator[Path]:
    """The directory of a descriptor socket whose connection queue is full."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(short_path / "fds.sock"))
        listener.listen(0)
        waiting = []
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connection.setblocking(False)
            waiting.append(connection)
            try:
                connection.connect(str(short_path / "fds.sock"))
            except BlockingIOError:
                break
        yield short_path
        for connection in waiting:
            connection.close()


def test_descriptors_are_offered_again_until_the_deadline(full_socket: Path) -> None:
    call = PausingCall(3, full_socket)
    with pytest.raises(SocketBusy) as busy:
        call.pass_fds((0,)).send(None)
    assert call.link.left <= 0
    assert isinstance(busy.value.__cause__, Gone)
