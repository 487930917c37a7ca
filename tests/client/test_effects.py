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
from kvferry.client.transport.fd_passing import SocketBusy
from kvferry.proto.errors import Code, Gone
from kvferry.proto.messages import Subscribe


class Run:
    """An operation under a deadline that is `seconds` pauses away."""

    def __init__(self, operation: Operation[Any], seconds: int, directory: Path = Path()) -> None:
        self.left, self.sent = seconds, list[Any]()
        self.on_take_in: Callable[[], None] = lambda: None
        session = ClientSession("engine", "client")
        running = interpret(operation, session, lambda: directory, self.sent.append)
        self.driver = run_until_deadline(
            running, lambda: self.on_take_in(), lambda: self.left, lambda: timed_out("no", "way")
        )

    def to_the_end(self) -> Any:
        try:
            while True:
                assert next(self.driver) >= 0
                self.left -= 1
        except StopIteration as end:
            return end.value


def test_an_operation_ends_with_what_it_waited_for() -> None:
    seen: list[int] = []

    def operation() -> Operation[object]:
        return (yield WaitFor(lambda: 7 if len(seen) > 2 else None))

    run = Run(operation(), 10)
    run.on_take_in = lambda: seen.append(1)
    assert run.to_the_end() == 7
    assert len(seen) == 3


def test_a_reply_that_arrived_by_the_deadline_counts() -> None:
    arrived: list[int] = []

    def operation() -> Operation[object]:
        return (yield WaitFor(lambda: bool(arrived) or None))

    run = Run(operation(), 0)
    run.on_take_in = lambda: arrived.append(1)
    assert run.to_the_end() is True


def test_a_timeout_is_an_error_of_the_effect_and_may_be_cleaned_up_after() -> None:
    """What is sent on the way out goes out, and is not waited for."""

    def operation() -> Operation[None]:
        try:
            yield WaitFor(lambda: None)
        except Gone:
            with pytest.raises(Gone):
                yield SendOneWay(Subscribe(), lambda: None)
            raise

    run = Run(operation(), 3)
    with pytest.raises(Gone) as gone:
        run.to_the_end()
    assert gone.value.code == Code.TIMEOUT
    assert run.sent == [Subscribe()]


def test_an_error_of_what_arrives_ends_the_operation() -> None:
    def operation() -> Operation[None]:
        yield WaitFor(lambda: None)

    def fail() -> None:
        raise Gone(Code.DAEMON_GONE, "it said so")

    run = Run(operation(), 3)
    run.on_take_in = fail
    with pytest.raises(Gone, match="it said so"):
        run.to_the_end()


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
    """The folder of a descriptor socket that accepts nobody."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(short_path / "fds.sock"))
        listener.listen(0)
        waiting = []
        while True:
            one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            one.setblocking(False)
            waiting.append(one)
            try:
                one.connect(str(short_path / "fds.sock"))
            except BlockingIOError:
                break
        yield short_path
        for one in waiting:
            one.close()


def test_descriptors_are_offered_again_until_the_deadline(full_socket: Path) -> None:
    def operation() -> Operation[object]:
        return (yield PassFds((0,)))

    run = Run(operation(), 3, full_socket)
    with pytest.raises(SocketBusy) as busy:
        run.to_the_end()
    assert run.left <= 0
    assert busy.value.__cause__ is not None
