"""The service manager's protocol (sd_notify): state, keep-alives and the descriptor store.

Messages are datagrams of NAME=value lines to $NOTIFY_SOCKET; stored descriptors are passed to the
next daemon at its start, after the standard three. So their memory outlives the daemon, whatever
ended it. The store accepts a second descriptor of a name and then returns both, the newer first
(the older first if the manager itself was restarted).

Sending never blocks. If the manager's socket is full, messages are queued in order, and sent with
the next message or by `send_queued`. Main thread.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import structlog

# Number of the first passed descriptor (SD_LISTEN_FDS_START).
FIRST = 3
MAX_NAME = 255
# Seconds that `send_queued` waits for a full socket, at start and at the end.
SEND_SECONDS = 2.0
# Maximum of queued messages; further ones about descriptors are dropped.
MAX_UNSENT = 8192
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


@dataclass(frozen=True, slots=True)
class _Message:
    lines: tuple[str, ...]
    # A duplicate, closed after it was sent.
    descriptor: int | None

    @property
    def supersedes(self) -> bool:
        """Whether it replaces a queued message of its kind."""
        return len(self.lines) == 1 and self.lines[0].startswith(("WATCHDOG=", "STATUS="))


class Supervisor:
    """The connection to the service manager; without one, its methods do nothing.

    No method raises if a message cannot be sent. Only `send_queued` waits.

    environ: contains the manager's variables; they are removed, so that children do not use them.
    watchdog_seconds: `keep_alive` must be called more often than this; None: there is no watchdog.
    stored_fds: the descriptors of an earlier daemon, by name. The caller closes them.
    """

    def __init__(self, environ: MutableMapping[str, str] = os.environ) -> None:
        values = {name: environ.pop(name, "") for name in VARIABLES}
        self._address = values["NOTIFY_SOCKET"]
        self._stores = values["FDSTORE"] != "0"  # unset before systemd 254: may have one
        self._warned = False
        self._unsent: deque[_Message] = deque()
        watchdog_usec = (
            _number(values["WATCHDOG_USEC"]) if _ours(values["WATCHDOG_PID"] or None) else 0
        )
        self.watchdog_seconds = watchdog_usec / 1e6 if watchdog_usec else None
        self.stored_fds: dict[str, int] = {}
        if _ours(values["LISTEN_PID"]):
            names = values["LISTEN_FDNAMES"].split(":")
            self.stored_fds = _adopt(range(FIRST, FIRST + _number(values["LISTEN_FDS"])), names)

    @property
    def has_fd_store(self) -> bool:
        """Whether there is a descriptor store, as far as the manager's variables show."""
        return bool(self._address) and self._stores

    def ready(self, status: str) -> None:
        """The daemon serves; or a reload has ended."""
        self._notify("READY=1", f"STATUS={_line(status)}")

    def status(self, text: str) -> None:
        self._notify(f"STATUS={_line(text)}")

    def reloading(self) -> None:
        """The configuration is being reloaded; `ready` ends this."""
        self._notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        """The daemon is about to exit."""
        self._notify("STOPPING=1")

    def keep_alive(self) -> None:
        self._notify("WATCHDOG=1")

    def store_fd(self, name: str, descriptor: int) -> None:
        """Store a descriptor beyond the end of this process. Raises ValueError for a bad name."""
        self._notify("FDSTORE=1", f"FDNAME={_checked(name)}", "FDPOLL=0", descriptor=descriptor)

    def remove_fd(self, name: str) -> None:
        """Remove stored descriptors of this name. Raises ValueError for a bad name."""
        named = f"FDNAME={_checked(name)}"
        self._discard(lambda message: message.descriptor is not None and named in message.lines)
        self._notify("FDSTOREREMOVE=1", named)

    def send_queued(self, seconds: float = SEND_SECONDS) -> bool:
        """Wait until all queued messages are sent. Return False on timeout."""
        deadline = time.monotonic() + seconds
        while self._unsent and (left := deadline - time.monotonic()) > 0:
            self._send(left)
        return not self._unsent

    def _notify(self, *lines: str, descriptor: int | None = None) -> None:
        """Queue a message, and send what the manager's socket accepts."""
        if not self._address:
            return
        try:
            message = _Message(lines, None if descriptor is None else os.dup(descriptor))
        except OSError as error:
            self._warn(lines[0], error)
            return
        if message.supersedes:
            kind = lines[0].partition("=")[0]
            self._discard(lambda old: old.supersedes and old.lines[0].startswith(f"{kind}="))
        elif lines[0].startswith("FDSTORE") and len(self._unsent) >= MAX_UNSENT:
            self._warn(lines[0], OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)))
            _close(message)
            return
        self._unsent.append(message)
        while self._unsent and self._send(0.0):
            pass

    def _send(self, seconds: float) -> bool:
        """Send or drop the first queued message. Return False if it stays queued."""
        if self._sent(self._unsent[0], seconds) is None:
            return False
        _close(self._unsent.popleft())
        return True

    def _sent(self, message: _Message, seconds: float) -> bool | None:
        """Whether the message was sent; None if the manager's queue stays full."""
        passing = [] if message.descriptor is None else [message.descriptor]
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection:
                connection.settimeout(max(0.0, seconds))
                connection.connect(_path(self._address))
                socket.send_fds(
                    connection,
                    ["\n".join(message.lines).encode(errors="backslashreplace")],
                    passing,
                )
        except (BlockingIOError, TimeoutError):
            return None
        except OSError as error:
            self._warn(message.lines[0], error)
            return False
        return True

    def _discard(self, obsolete: Callable[[_Message], bool]) -> None:
        for message in [message for message in self._unsent if obsolete(message)]:
            self._unsent.remove(message)
            _close(message)

    def _warn(self, message: str, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "cannot notify the service manager; further failures are not logged",
                message=message,
                socket=self._address,
                error=str(error),
            )


def _close(message: _Message) -> None:
    if message.descriptor is not None:
        os.close(message.descriptor)


def _path(address: str) -> str:
    """The address to connect to; "@name" names an abstract socket."""
    return "\0" + address[1:] if address.startswith("@") else address


def _line(text: str) -> str:
    return " ".join(text.split())


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() else 0


def _ours(pid: str | None) -> bool:
    """Whether the manager's variables are for this process; None: they are for any process."""
    return pid is None or pid == str(os.getpid())


def _checked(name: str) -> str:
    """The name if a descriptor store accepts it. Raises ValueError."""
    if not name or len(name) > MAX_NAME or ":" in name or not name.isprintable():
        raise ValueError(
            f"descriptor name {name!r} is empty, longer than {MAX_NAME} characters, or contains "
            "':' or unprintable characters"
        )
    if not name.isascii():
        raise ValueError(f"descriptor name {name!r} contains characters other than ASCII")
    return name


def _adopt(descriptors: Sequence[int], names: Sequence[str]) -> dict[str, int]:
    """Descriptors by name. If two have one name, the first is used: it is the newer one."""
    kept: dict[str, int] = {}
    for descriptor, name in _named(descriptors, names):
        if name in kept:
            os.close(descriptor)
        else:
            kept[name] = descriptor
    return kept


def _named(descriptors: Sequence[int], names: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Open descriptors, made not inheritable; without a name it is "stored", as in systemd."""
    for number, descriptor in enumerate(descriptors):
        with suppress(OSError):
            os.set_inheritable(descriptor, False)
            yield descriptor, (names[number : number + 1] or [""])[0] or "stored"
