"""Effects, of which operations consist, and their interpreter.

An operation (operations.py) is a generator that yields effects and is sent their outcomes.
`interpret` performs them without waiting: it is a generator too, and yields a Pause when it has to
wait. The clients differ only in what they do in a pause:

    blocking     sleep on the sockets      (blocking.py)
    asyncio      await the event loop      (aio.py)
    reconnect    return to the caller      (reconnect.py)
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from kvferry.client.pending_requests import RequestMessage
from kvferry.client.session import ClientSession
from kvferry.client.transport.fd_client import FDS_PER_PACKET, FdExchange, SocketBusy
from kvferry.proto.errors import Gone
from kvferry.proto.fd_passing import FdRequest, FetchFd, SendFds
from kvferry.proto.messages import (
    AllocateKVCaches,
    ClientMessage,
    Goodbye,
    Hello,
    Pin,
    RegisterKVCaches,
    Subscribe,
)


@dataclass(frozen=True, slots=True)
class SendRequest:
    """Send a request; the outcome is its reply. An error reply is thrown into the operation."""

    message: RequestMessage


@dataclass(frozen=True, slots=True)
class PassFds:
    """Pass file descriptors to the daemon; the outcome is a tuple of handles."""

    descriptors: Sequence[int]


@dataclass(frozen=True, slots=True)
class ReceiveFd:
    """Receive a file descriptor from the daemon; the outcome is the descriptor."""

    handle: int


@dataclass(frozen=True, slots=True)
class SendOneWay:
    """Send a message; the outcome is the first result of `until` that is not None."""

    message: Hello | Subscribe | Goodbye | Pin | RegisterKVCaches | AllocateKVCaches
    until: Callable[[], object]


@dataclass(frozen=True, slots=True)
class WaitFor:
    """Send nothing; the outcome is the first result of `ready` that is not None."""

    ready: Callable[[], object]


Effect: TypeAlias = SendRequest | PassFds | ReceiveFd | SendOneWay | WaitFor
R = TypeVar("R")
Operation: TypeAlias = Generator[Effect, Any, R]

# Seconds between two polls for a reply on the descriptor socket; it usually takes less.
FD_POLL_INTERVAL = 0.001
# Seconds, at most, between two attempts to send on a full descriptor socket.
FD_RETRY_INTERVAL = 0.1


@dataclass(frozen=True, slots=True)
class Pause:
    """Resume after the next message, or after `seconds`."""

    seconds: float = 1e6


PAUSE = Pause()
Interpreted: TypeAlias = Generator[Pause, None, R]


def interpret(
    operation: Operation[R],
    session: ClientSession,
    directory: Callable[[], Path],
    send: Callable[[ClientMessage], None],
) -> Interpreted[R]:
    """Perform the effects of an operation; returns the operation's result.

    An error that is thrown in at a pause (a timeout, for example) is thrown into the operation at
    its current effect, so that it can clean up. Closing this generator closes the operation.
    """
    try:
        effect = next(operation)
        while True:
            try:
                outcome = yield from _perform(effect, session, directory, send)
            except Exception as error:  # of any type: the operation may have to clean up
                effect = operation.throw(error)
            else:
                effect = operation.send(outcome)
    except StopIteration as end:
        result: R = end.value
        return result
    finally:
        operation.close()


def _perform(
    effect: Effect,
    session: ClientSession,
    directory: Callable[[], Path],
    send: Callable[[ClientMessage], None],
) -> Interpreted[Any]:
    match effect:
        case SendRequest(request):
            with session.expect_reply(request):
                send(request)
                return (yield from _poll_until(lambda: session.reply(request.request_id)))
        case SendOneWay(message, until):
            send(message)
            return (yield from _poll_until(until))
        case WaitFor(ready):
            yield Pause(0)  # the caller receives pending messages first
            return (yield from _poll_until(ready))
        case PassFds(descriptors):
            handles: tuple[int, ...] = ()
            for start in range(0, len(descriptors), FDS_PER_PACKET):
                batch = descriptors[start : start + FDS_PER_PACKET]
                handles += (
                    yield from exchange_fds(directory(), SendFds(session.session_id), batch)
                )[0]
            return handles
        case ReceiveFd(handle):
            return (yield from exchange_fds(directory(), FetchFd(session.session_id, handle)))[1][0]


def _poll_until(ready: Callable[[], object]) -> Interpreted[object]:
    while (outcome := ready()) is None:
        yield PAUSE
    return outcome


def exchange_fds(
    directory: Path, request: FdRequest, descriptors: Sequence[int] = ()
) -> Interpreted[tuple[tuple[int, ...], list[int]]]:
    """One request on the descriptor socket; repeated while the socket is full."""
    while True:
        try:
            with FdExchange(directory, request, descriptors) as exchange:
                while (reply := exchange.read_reply()) is None:
                    yield Pause(FD_POLL_INTERVAL)
                return reply
        except SocketBusy as busy:  # nothing was passed
            try:
                yield Pause(random.uniform(FD_RETRY_INTERVAL / 2, FD_RETRY_INTERVAL))
            except Gone as timeout:
                raise busy from timeout


def run_until_deadline(
    running: Interpreted[R],
    receive: Callable[[], None],
    seconds_left: Callable[[], float],
    timed_out: Callable[[], Gone],
) -> Generator[float, None, R]:
    """Run an interpreted operation; yields the seconds to wait at most, at each pause.

    receive: handles the messages that have arrived; its errors are thrown into the operation, as is
    timed_out() when no time is left.
    """
    error: Exception | None = None
    expired = False
    try:
        while True:
            try:
                pause = next(running) if error is None else running.throw(error)
            except StopIteration as end:
                result: R = end.value
                return result
            error = timed_out() if expired else None
            if expired:
                continue
            left = seconds_left()
            if left > 0:
                yield min(left, pause.seconds)
            expired = left <= 0
            try:
                receive()
            except Exception as raised:
                error = raised
    finally:
        running.close()
