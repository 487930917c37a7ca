"""Call: one method that waits for the daemon, within its timeout.

The methods that wait (operations.py) are coroutines, written once for all clients. Each waits by
`Call.until` only, and so by the pause of its link:

    OffloadClient        sleeps on the sockets: the coroutine runs to its end without suspending
    AsyncOffloadClient   awaits the event loop
    reconnecting         returns to the poll that advances it (restoring.py)
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from kvferry.client.link import ClientLink
from kvferry.client.pending_requests import RequestMessage
from kvferry.client.transport.fd_client import FDS_PER_PACKET, FdExchange, SocketBusy
from kvferry.client.wire import MAX_TIMEOUT, timed_out
from kvferry.proto.errors import Gone
from kvferry.proto.fd_passing import FdRequest, FetchFd, SendFds
from kvferry.proto.messages import ClientMessage

T = TypeVar("T")

# Seconds between two polls for a reply on the descriptor socket; it usually takes less.
FD_POLL_INTERVAL = 0.001
# Seconds, at most, between two attempts to send on a full descriptor socket.
FD_RETRY_INTERVAL = 0.1


class Call:
    """A method that waits at most `timeout` seconds. `session`: see ClientLink."""

    def __init__(self, link: ClientLink, timeout: float) -> None:
        self.link, self.session = link, link.session
        self._deadline = time.monotonic() + min(MAX_TIMEOUT, timeout)

    async def until(self, ready: Callable[[], T | None], seconds: float = MAX_TIMEOUT) -> T:
        """The first result of `ready` that is not None, called after each message.

        seconds: call it after this time, too. Raises Gone (TIMEOUT) at the deadline, or the error
        of a received message.
        """
        late = False
        while (outcome := ready()) is None:
            if late:
                raise self._timed_out()
            late = self._seconds_left() <= 0
            await self._pause(seconds)
        return outcome

    async def connected(self) -> None:
        """Wait until the session is restored. Raises Gone, with the reason, if that takes too long,
        or if the daemon refuses to restore it."""
        session = self.session
        try:
            self.link.poll()
            await self.until(session.wire.check_connected)
        except Gone as error:
            if session.wire.gone is None or error is session.wire.gone:
                raise
            raise session.wire.gone.with_traceback(None) from session.wire.gone.__cause__

    async def ask(self, request: RequestMessage) -> Any:
        """Send a request and return its reply. Raises an error reply."""
        with self.session.wire.pending.expect_reply(request):
            self._send(request)
            return await self.until(lambda: self.session.wire.pending.reply(request.request_id))

    async def send_until(self, message: ClientMessage, ready: Callable[[], T | None]) -> T:
        """Send a message and return the first result of `ready` that is not None."""
        self._send(message)
        return await self.until(ready)

    async def pass_fds(self, descriptors: Sequence[int]) -> tuple[int, ...]:
        """Pass file descriptors to the daemon; returns their handles."""
        handles: tuple[int, ...] = ()
        for start in range(0, len(descriptors), FDS_PER_PACKET):
            batch = descriptors[start : start + FDS_PER_PACKET]
            handles += (await self._exchange_fds(SendFds(self.session.wire.session_id), batch))[0]
        return handles

    async def receive_fd(self, handle: int) -> int:
        """Receive a file descriptor from the daemon."""
        return (await self._exchange_fds(FetchFd(self.session.wire.session_id, handle)))[1][0]

    async def _exchange_fds(
        self, request: FdRequest, descriptors: Sequence[int] = ()
    ) -> tuple[tuple[int, ...], list[int]]:
        """One request on the descriptor socket; repeated while the socket is full."""
        while True:
            try:
                with FdExchange(self.link.directory, request, descriptors) as exchange:
                    return await self.until(exchange.read_reply, FD_POLL_INTERVAL)
            except SocketBusy as busy:  # nothing was passed
                try:
                    await self.sleep(random.uniform(FD_RETRY_INTERVAL / 2, FD_RETRY_INTERVAL))
                except Gone as timeout:
                    raise busy from timeout

    async def sleep(self, seconds: float) -> None:
        """Wait for the next message, for at most `seconds`.

        Raises Gone (TIMEOUT) at the deadline.
        """
        if self._seconds_left() <= 0:
            raise self._timed_out()
        await self._pause(seconds)

    def _seconds_left(self) -> float:
        return self._deadline - time.monotonic()

    async def _pause(self, seconds: float) -> None:
        """Wait for the next message, for at most `seconds`. Then handle all that have arrived."""
        await self.link.pause(min(seconds, max(0.0, self._seconds_left())))

    def _send(self, message: ClientMessage) -> None:
        self.link.request(message)

    def _timed_out(self) -> Gone:
        return timed_out("no reply", str(self.link.directory))
