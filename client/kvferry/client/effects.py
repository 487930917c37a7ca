"""What an operation asks for on its way, and the one interpreter of it.

An operation (operations.py) is a generator that yields effects and is sent their outcomes.
`interpret` performs them without waiting: it is a generator too, which yields a Pause whenever it
cannot go on. What differs between the clients is only what happens in a pause:

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

from kvferry.client.fd_passing import FDS_PER_PACKET, FdExchange, SocketBusy
from kvferry.client.pending_requests import RequestMessage
from kvferry.client.session import ClientSession
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
class Request:
    """Send a request; the outcome is its reply, or its error is thrown in."""

    message: RequestMessage


@dataclass(frozen=True, slots=True)
class PassFds:
    """Pass file descriptors to the daemon; the outcome is a tuple of handles."""

    descriptors: Sequence[int]


@dataclass(frozen=True, slots=True)
class ReceiveFd:
    """Get a file descriptor from the daemon; the outcome is the descriptor."""

    handle: int


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message that is no request; the outcome is what `until` returns, if not None."""

    message: Hello | Subscribe | Goodbye | Pin | RegisterKVCaches | AllocateKVCaches
    until: Callable[[], object]


@dataclass(frozen=True, slots=True)
class WaitFor:
    """Send nothing; the outcome is what `ready` returns, if not None."""

    ready: Callable[[], object]


Effect: TypeAlias = Request | PassFds | ReceiveFd | Send | WaitFor
R = TypeVar("R")
Operation: TypeAlias = Generator[Effect, Any, R]

# Seconds between two looks for a reply on the descriptor socket, which takes less than that.
FD_POLL = 0.001
# Seconds, at most, between two attempts at a descriptor socket without room.
FD_RETRY = 0.1


@dataclass(frozen=True, slots=True)
class Pause:
    """Resume after the next message, or after so many seconds at most."""

    seconds: float = 1e6


PAUSE = Pause()
Interpreted: TypeAlias = Generator[Pause, None, R]


def interpret(
    operation: Operation[R],
    session: ClientSession,
    directory: Callable[[], Path],
    send: Callable[[ClientMessage], None],
) -> Interpreted[R]:
    """Perform the effects of an operation; returns what the operation returns.

    An error that is thrown in at a pause (a timeout, for example) is an error of the effect that
    is performed: the operation may clean up after it. Closing this closes the operation.
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
        case Request(request):
            with session.requesting(request):
                send(request)
                return (yield from _until(lambda: session.reply(request.request_id)))
        case Send(message, until):
            send(message)
            return (yield from _until(until))
        case WaitFor(ready):
            yield Pause(0)  # what has arrived is taken in first
            return (yield from _until(ready))
        case PassFds(descriptors):
            handles: tuple[int, ...] = ()
            for start in range(0, len(descriptors), FDS_PER_PACKET):
                some = descriptors[start : start + FDS_PER_PACKET]
                handles += (
                    yield from exchange_fds(directory(), SendFds(session.session_id), some)
                )[0]
            return handles
        case ReceiveFd(handle):
            return (yield from exchange_fds(directory(), FetchFd(session.session_id, handle)))[1][0]


def _until(ready: Callable[[], object]) -> Interpreted[object]:
    while (outcome := ready()) is None:
        yield PAUSE
    return outcome


def exchange_fds(
    directory: Path, request: FdRequest, descriptors: Sequence[int] = ()
) -> Interpreted[tuple[tuple[int, ...], list[int]]]:
    """One request on the descriptor socket; tried again while the socket has no room."""
    while True:
        try:
            with FdExchange(directory, request, descriptors) as exchange:
                while (reply := exchange.reply()) is None:
                    yield Pause(FD_POLL)
                return reply
        except SocketBusy as busy:  # nothing was handed over
            try:
                yield Pause(random.uniform(FD_RETRY / 2, FD_RETRY))
            except Gone as timeout:
                raise busy from timeout


def drive(
    running: Interpreted[R],
    take_in: Callable[[], None],
    seconds_left: Callable[[], float],
    timed_out: Callable[[], Gone],
) -> Generator[float, None, R]:
    """Run to the end within a deadline; yields for how many seconds to wait at most, each time.

    take_in: takes in what has arrived; what it raises is an error of the current effect.
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
                take_in()
            except Exception as raised:
                error = raised
    finally:
        running.close()
