"""The trays of sessions: what clients say in shared memory (proto/tray.py), heard in its order.

A bell is a Unix socket; what is written to it means nothing. When it rings, some messages are
heard, and the rest after what else is to be done. A message that came by the socket is heard
between those that were laid before it and those behind: so `catch_up` is called before it, and
`heard` after.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from array import array
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.daemon.server.closing import MAX_AT_ONCE, close, close_aside
from kvferry.proto.errors import Code, KVFerryError, Refused
from kvferry.proto.tray import SLOTS, Tray

AT_ONCE = 16
"""Messages heard of one session before the others have their turn."""
_BELL_BYTES = 4096
_ROOM_ALONG = socket.CMSG_SPACE(4 * MAX_AT_ONCE)


@dataclass(slots=True, eq=False)
class _Kept:
    session: str
    tray: Tray
    bell: socket.socket
    heard: int = 0
    """Messages by the socket, since the tray is there."""
    going_on: bool = False


class Trays:
    """hear: a session says this. senseless: a session's tray is no use any more."""

    def __init__(
        self, hear: Callable[[str, bytes], None], senseless: Callable[[str, KVFerryError], None]
    ) -> None:
        self._hear, self._senseless = hear, senseless
        self._loop = asyncio.get_running_loop()
        self._kept: dict[str, _Kept] = {}
        self._looking = threading.Lock()
        """Held by another thread while it looks at trays, and where one goes."""

    def open(self, session: str, page: int, bell: int) -> None:
        """Takes the descriptors over. Raises Refused (NOT_SHAREABLE, BAD_MESSAGE)."""
        try:
            if session in self._kept:
                raise Refused(Code.BAD_MESSAGE, "a session has one tray", session)
            tray = Tray(page)
            try:
                rung = _bell(bell)
            except KVFerryError:
                tray.close()
                raise
        except KVFerryError:
            close_aside(bell)
            raise
        finally:
            close(page)
        kept = self._kept[session] = _Kept(session, tray, rung)
        self._loop.add_reader(rung, self._rung, kept)

    def close(self, session: str) -> None:
        kept = self._kept.pop(session, None)
        if kept is not None:
            self._loop.remove_reader(kept.bell)
            close_aside(kept.bell.detach())
            with self._looking:
                kept.tray.close()

    def said(self) -> int:
        """From any thread: 0 where all that lies on trays was heard, or else a number that is
        another one when more does."""
        with self._looking:
            trays = [kept.tray for kept in tuple(self._kept.values())]
            return sum([tray.laid for tray in trays if tray.unheard])

    def close_all(self) -> None:
        for session in tuple(self._kept):
            self.close(session)

    def catch_up(self, session: str) -> int:
        """Hear what was laid before the message that came by the socket now; returns how many."""
        kept = self._kept.get(session)
        return self._take(kept, SLOTS) if kept is not None else 0

    def heard(self, session: str) -> None:
        """That one was heard; what was laid behind it is next."""
        kept = self._kept.get(session)
        if kept is not None:
            kept.heard += 1
            self._look(kept)

    def _rung(self, kept: _Kept) -> None:
        try:
            gone = not _listen(kept.bell)
        except BlockingIOError:
            return
        except OSError:
            gone = True
        if gone:  # who cannot ring is heard when something comes by the socket
            self._loop.remove_reader(kept.bell)
        self._look(kept)

    def _look(self, kept: _Kept) -> None:
        if not kept.going_on:
            self._go_on(kept)

    def _go_on(self, kept: _Kept) -> None:
        kept.going_on = False
        if self._take(kept, AT_ONCE) == AT_ONCE:
            kept.going_on = True
            self._loop.call_soon(self._go_on, kept)

    def _take(self, kept: _Kept, most: int) -> int:
        """Hear so many messages, if there are; returns how many there were."""
        for number in range(most):
            if self._kept.get(kept.session) is not kept:  # it left with the last one
                return number
            try:
                data = kept.tray.take(kept.heard)
            except KVFerryError as error:
                self._senseless(kept.session, error)
                return number
            if data is None:
                return number
            self._hear(kept.session, data)
        return most


def _listen(bell: socket.socket) -> bytes:
    """What was written to it. What came along the kernel would close here, in the loop."""
    said, along, _, _ = bell.recvmsg(_BELL_BYTES, _ROOM_ALONG, socket.MSG_DONTWAIT)
    for level, kind, data in along:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            for descriptor in array("i", data):
                close_aside(descriptor)
    return said


def _bell(descriptor: int) -> socket.socket:
    """Raises Refused (NOT_SHAREABLE), and the descriptor is the caller's."""
    message = "a bell is a connected Unix stream socket"
    try:
        bell = socket.socket(fileno=descriptor)
    except OSError as error:
        raise Refused(Code.NOT_SHAREABLE, message, str(error)) from error
    try:
        if bell.family != socket.AF_UNIX or bell.type != socket.SOCK_STREAM:
            raise OSError(f"it is {bell.family.name}, {bell.type.name}")
        bell.getpeername()
    except OSError as error:
        bell.detach()
        raise Refused(Code.NOT_SHAREABLE, message, str(error)) from error
    return bell
