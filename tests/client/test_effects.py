"""The interpreter of operations and its deadline, without a client."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.client.effects import (
    Operation,
    PassFds,
    SendOneWay,
    WaitFor,
    interpret,
    run_until_deadline,
)
from kvferry.client.session import ClientSession, timed_out
from kvferry.client.transport.fd_client import SocketBusy
from kvferry.proto.errors import Code, Gone
from kvferry.proto.messages import Subscribe


class Run:
    """An operation whose deadline passes after `seconds` pauses."""

    def __init__(self, operation: Operation[Any], seconds: int, directory: Path = Path()) -> None:
        self.left, self.sent = seconds, list[Any]()
        self.on_receive: Callable[[], None] = lambda: None
        session = ClientSession("engine", "client")
        running = interpret(operation, session, lambda: directory, self.sent.append)
        self.driver = run_until_deadline(
            running, lambda: self.on_receive(), lambda: self.left, lambda: timed_out("no", "way")
        )

    def run_to_end(self) -> Any:
        try:
            while True:
                assert next(self.driver) >= 0
                self.left -= 1
        except StopIteration as end:
            return end.value


def test_an_operation_returns_the_value_that_it_waited_for() -> None:
    received: list[int] = []

    def operation() -> Operation[object]:
        return (yield WaitFor(lambda: 7 if len(received) > 2 else None))

    run = Run(operation(), 10)
    run.on_receive = lambda: received.append(1)
    assert run.run_to_end() == 7
    assert len(received) == 3


def test_a_reply_that_arrives_at_the_deadline_counts() -> None:
    arrived: list[int] = []

    def operation() -> Operation[object]:
        return (yield WaitFor(lambda: bool(arrived) or None))

    run = Run(operation(), 0)
    run.on_receive = lambda: arrived.append(1)
    assert run.run_to_end() is True


def test_an_operation_can_clean_up_after_a_timeout() -> None:
    """A message that it sends during the cleanup is sent, without waiting."""

    def operation() -> Operation[None]:
        try:
            yield WaitFor(lambda: None)
        except Gone:
            with pytest.raises(Gone):
                yield SendOneWay(Subscribe(), lambda: None)
            raise

    run = Run(operation(), 3)
    with pytest.raises(Gone) as gone:
        run.run_to_end()
    assert gone.value.code == Code.TIMEOUT
    assert run.sent == [Subscribe()]


def test_an_error_while_receiving_ends_the_operation() -> None:
    def operation() -> Operation[None]:
        yield WaitFor(lambda: None)

    def fail() -> None:
        raise Gone(Code.DAEMON_GONE, "goodbye received")

    run = Run(operation(), 3)
    run.on_receive = fail
    with pytest.raises(Gone, match="goodbye received"):
        run.run_to_end()


def test_an_abandoned_operation_is_closed() -> None:
    closed: list[bool] = []

    def operation() -> Operation[None]:
        try:
            yield WaitFor(lambda: None)
        finally:
            closed.append(True)

    run = Run(operation(), 3)
    next(run.driver)
    run.driver.close()
    assert closed == [True]


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
    def operation() -> Operation[object]:
        return (yield PassFds((0,)))

    run = Run(operation(), 3, full_socket)
    with pytest.raises(SocketBusy) as busy:
        run.run_to_end()
    assert run.left <= 0
    assert busy.value.__cause__ is not None
