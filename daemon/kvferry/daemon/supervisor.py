"""systemd, or whoever speaks its protocol: what the daemon tells it, and what it keeps for it.

The protocol is datagrams of lines NAME=value to the socket that $NOTIFY_SOCKET names, and
descriptors behind the standard three at start. Its store is how memory outlives the daemon: what
was kept comes back at the next start, under its name, whatever ended the process before. The
store takes a second descriptor of a name beside the first and gives back both, the newest first
(turned round when the manager itself was started anew). So who replaces what it kept keeps the new
one under a new name, settles, and forgets the old name: at every moment one of them is there.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import suppress

import structlog

FIRST = 3
"""The first descriptor that the manager passes on."""
MAX_NAME = 255
SEND_SECONDS = 2.0
"""How long the manager may leave its queue full before a message is given up."""
VARIABLES = (
    "NOTIFY_SOCKET",
    "FDSTORE",
    "WATCHDOG_USEC",
    "WATCHDOG_PID",
    "LISTEN_FDS",
    "LISTEN_FDNAMES",
    "LISTEN_PID",
    "LISTEN_PIDFDID",
)

log = structlog.get_logger()


class Supervisor:
    """Says nothing where nobody listens. No method raises for a message that did not arrive.

    environ: where the variables are; they are taken out, so that no child takes them for its own.
    watchdog_seconds: `alive` must be called more often than this; None where nobody watches.
    kept: the descriptors that were kept before, by name; they are the caller's to close.
    """

    def __init__(self, environ: MutableMapping[str, str] = os.environ) -> None:
        said = {name: environ.pop(name, "") for name in VARIABLES}
        self._address = said["NOTIFY_SOCKET"]
        self._stores = said["FDSTORE"] != "0"  # not set before systemd 254: nobody knows
        self._warned = False
        watched = _number(said["WATCHDOG_USEC"]) if _ours(said["WATCHDOG_PID"] or None) else 0
        self.watchdog_seconds = watched / 1e6 if watched else None
        self.kept: dict[str, int] = {}
        if _ours(said["LISTEN_PID"]):
            names = said["LISTEN_FDNAMES"].split(":")
            self.kept = _adopt(range(FIRST, FIRST + _number(said["LISTEN_FDS"])), names)

    @property
    def keeps(self) -> bool:
        """Whether there is a descriptor store, as far as the manager says."""
        return bool(self._address) and self._stores

    def ready(self, status: str) -> None:
        self._say("READY=1", f"STATUS={_line(status)}")

    def status(self, text: str) -> None:
        self._say(f"STATUS={_line(text)}")

    def reloading(self) -> None:
        """The configuration is read again; `ready` ends it."""
        self._say("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        self._say("STOPPING=1")

    def alive(self) -> None:
        self._say("WATCHDOG=1")

    def keep(self, name: str, descriptor: int) -> None:
        """Have a descriptor kept beyond this process's end. Raises ValueError for a bad name."""
        self._say("FDSTORE=1", f"FDNAME={_checked(name)}", "FDPOLL=0", descriptor=descriptor)

    def forget(self, name: str) -> None:
        """No longer keep what is kept under a name. Raises ValueError for a bad name."""
        self._say("FDSTOREREMOVE=1", f"FDNAME={_checked(name)}")

    def settle(self, seconds: float) -> bool:
        """Wait until the manager has taken in all that was said; False where it does not."""
        ours, theirs = os.pipe2(os.O_CLOEXEC)
        try:
            said = self._say("BARRIER=1", descriptor=theirs)
        finally:
            os.close(theirs)
        try:
            ear = select.poll()
            ear.register(ours, 0)  # POLLHUP comes unasked: the manager closed its end
            return said and bool(ear.poll(seconds * 1000))
        finally:
            os.close(ours)

    def _say(self, *lines: str, descriptor: int | None = None) -> bool:
        """Send one message; whether it went off."""
        if not self._address:
            return False
        passing = [] if descriptor is None else [descriptor]
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as wire:
                wire.settimeout(SEND_SECONDS)
                wire.connect(_path(self._address))
                socket.send_fds(wire, ["\n".join(lines).encode()], passing)
        except OSError as error:
            self._warn(lines[0], error)
            return False
        return True

    def _warn(self, message: str, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "the service manager cannot be told; further messages fail in silence",
                said=message,
                socket=self._address,
                error=str(error),
            )


def _path(address: str) -> str:
    """What to connect to: "@name" is a name in no file system."""
    return "\0" + address[1:] if address.startswith("@") else address


def _line(text: str) -> str:
    return " ".join(text.split())


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() else 0


def _ours(pid: str | None) -> bool:
    """Whether what the manager said is meant for this process; None is for anybody."""
    return pid is None or pid == str(os.getpid())


def _checked(name: str) -> str:
    """The name, where a store would take it."""
    if not name or len(name) > MAX_NAME or ":" in name or not name.isprintable():
        raise ValueError(f"a name of a descriptor is 1 to {MAX_NAME} characters, no ':': {name!r}")
    if not name.isascii():
        raise ValueError(f"a name of a descriptor is ASCII: {name!r}")
    return name


def _adopt(descriptors: Sequence[int], names: Sequence[str]) -> dict[str, int]:
    """Descriptors by name. Of two of one name the first stays: it is the newer."""
    kept: dict[str, int] = {}
    for descriptor, name in _named(descriptors, names):
        if name in kept:
            os.close(descriptor)
        else:
            kept[name] = descriptor
    return kept


def _named(descriptors: Sequence[int], names: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Those that are open, not for children; without a name they are "stored", as for systemd."""
    for number, descriptor in enumerate(descriptors):
        with suppress(OSError):
            os.set_inheritable(descriptor, False)
            yield descriptor, (names[number : number + 1] or [""])[0] or "stored"
