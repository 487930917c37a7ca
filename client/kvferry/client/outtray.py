"""The client's end of a tray: its page, and the bell that tells the daemon to look at it."""

from __future__ import annotations

import contextlib
import os
import socket

from kvferry.proto.tray import Tray, new_tray

_RING = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL


class OutTray:
    """`descriptors`: of the page and of the daemon's end of the bell, until they are `handed`."""

    def __init__(self) -> None:
        page = new_tray()
        try:
            self._bell, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError:
            os.close(page)
            raise
        self.descriptors: tuple[int, ...] = page, theirs.detach()
        self._tray = Tray(page)
        self._by_socket = 1  # the message that says where the tray is

    def handed(self) -> None:
        """The daemon has them, or never will."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = ()

    def lay(self, data: bytes) -> bool:
        """Whether a message found room: else it goes by the socket, and is `passed_by`."""
        if not self._tray.lay(data, self._by_socket):
            return False
        with contextlib.suppress(OSError):  # it rings already; or nobody hears, which shows
            self._bell.send(b"\0", _RING)
        return True

    def passed_by(self) -> None:
        """A message went by the socket."""
        self._by_socket += 1

    def close(self) -> None:
        self.handed()
        self._tray.close()
        self._bell.close()

    def __enter__(self) -> OutTray:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
