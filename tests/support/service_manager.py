"""A service manager for tests without systemd: systemd's protocol, over real sockets.

It starts a program, receives its messages at $NOTIFY_SOCKET, keeps the descriptors in them, and
passes these to the program at its next start. Unlike systemd, it restarts nothing by itself, and it
accepts a descriptor that it has already (systemd ignores that one).

    with ServiceManager(kvferryd_command(tmp_path), tmp_path / "notify") as manager:
        manager.start()                 # returns after READY=1
        manager.kill()
        manager.start()                 # with all kept descriptors
"""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from support.time_limits import TIMEOUT

SO_PASSCRED, SCM_CREDENTIALS = 16, 2
TICK = 0.02

# Becomes the program. Its descriptors are at 3 and above, and the variables name its pid.
LAUNCH = """
import fcntl, os, sys
descriptors, argv = [int(d) for d in sys.argv[1].split(",") if d], sys.argv[2:]
copies = [fcntl.fcntl(d, fcntl.F_DUPFD_CLOEXEC, 3 + len(descriptors)) for d in descriptors]
for place, copy in enumerate(copies, 3):
    os.dup2(copy, place)
os.closerange(3 + len(descriptors), max([*descriptors, *copies, 2]) + 1)
for name in ("LISTEN_PID", "WATCHDOG_PID"):
    if name in os.environ:
        os.environ[name] = str(os.getpid())
os.execvp(argv[0], argv)
"""


def kvferryd_command(
    runtime_dir: Path, device: str = "cpu", pool_bytes: int = 16 << 20, **options: object
) -> list[str]:
    """The command line of a daemon. options: more of its flags, as for LocalDaemon."""
    arguments = {
        "device": device,
        "pool_size": pool_bytes,
        "runtime_dir": runtime_dir,
        "siblings_enabled": "false",
        **options,
    }
    command = [sys.executable, "-m", "kvferry.daemon"]
    for name, value in arguments.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    return command


class StoredFds(NamedTuple):
    name: str
    descriptor: int
    # Whether it is dropped when its other end is closed.
    polled: bool


class ServiceManager:
    """Runs one program at a time.

    notify: path of its socket, or "@name" for an abstract socket. watchdog: seconds after which a
    program that does not send WATCHDOG=1 is killed. environ: more variables for the program. log:
    file for the program's output; None for the output of the test.
    """

    def __init__(
        self,
        command: Sequence[str],
        notify: Path | str,
        *,
        watchdog: float | None = None,
        environ: Mapping[str, str] | None = None,
        log: Path | None = None,
    ) -> None:
        self.command, self.watchdog, self.log_path = list(command), watchdog, log
        self.environ = dict(environ or {})
        self.notify = str(notify)
        # Messages that the program has sent.
        self.messages: list[dict[str, str]] = []
        # Processes whose messages were ignored, because they are not the program.
        self.ignored: list[int] = []
        # How often the watchdog has killed the program.
        self.watchdog_kills = 0
        self.process: subprocess.Popen[bytes]
        self._store: list[StoredFds] = []
        self._changed = threading.Condition()
        self._last_watchdog = time.monotonic()
        self._running = self._closing = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, SO_PASSCRED, 1)
        self._socket.settimeout(TICK)
        self._socket.bind(
            self.notify.replace("@", "\0", 1) if notify is self.notify else self.notify
        )
        self._thread = threading.Thread(target=self._listen, name="service manager")
        self._thread.start()

    # Called by tests

    def start(self, timeout: float = TIMEOUT, *, ready: bool = True) -> None:
        """Start the program with the kept descriptors, and wait for READY if `ready`."""
        with self._changed:
            self.messages.clear()
            self._drop(lambda kept: kept.polled and _hung_up(kept.descriptor))
            self.process = self._launch()
            self._last_watchdog, self._running = time.monotonic(), True
        if ready:
            self.wait_for("READY", timeout=timeout)

    def kill(self) -> None:
        """Send SIGKILL, and wait until the program has ended."""
        self.process.kill()
        self.wait_dead()

    def stop(self, timeout: float = TIMEOUT) -> int:
        """Send SIGTERM. Returns the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait_dead(timeout)

    def wait_dead(self, timeout: float = TIMEOUT) -> int:
        status = self.process.wait(timeout)
        self._running = False
        return status

    def wait_for(self, name: str, value: str | None = None, timeout: float = TIMEOUT) -> str:
        """Wait until the program has sent `name`, with this value if given. Returns the value."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while True:
                for message in self.messages:
                    if name in message and value in (None, message[name]):
                        return message[name]
                left = deadline - time.monotonic()
                if left <= 0 or self.process.poll() is not None:
                    messages = [*self.messages, self.log()[-2000:]]
                    raise AssertionError(f"{name}={value or ''} was not sent: {messages}")
                self._changed.wait(min(left, 10 * TICK))

    def lose_fds(self) -> None:
        """Close all kept descriptors, as a reboot does. The program must not run."""
        with self._changed:
            self._drop(lambda kept: True)

    def log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path else ""

    def values(self, name: str) -> list[str]:
        """All values of `name` that the program has sent since its start."""
        with self._changed:
            return [message[name] for message in self.messages if name in message]

    @property
    def names(self) -> list[str]:
        """Names of the kept descriptors, the newest first."""
        with self._changed:
            return [kept.name for kept in self._store]

    def kept(self, name: str) -> int:
        """The newest descriptor of a name. The caller must not close it. Raises StopIteration."""
        with self._changed:
            return next(kept.descriptor for kept in self._store if kept.name == name)

    def close(self) -> None:
        """Kill the program if it runs, and close all descriptors."""
        if self._running:
            self.kill()
        self._closing = True
        self._thread.join()
        self._socket.close()
        if not self.notify.startswith("@"):
            Path(self.notify).unlink()
        self._drop(lambda kept: True)

    def __enter__(self) -> ServiceManager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _launch(self) -> subprocess.Popen[bytes]:
        descriptors = [kept.descriptor for kept in self._store]
        variables = {"NOTIFY_SOCKET": self.notify, "FDSTORE": "4096"}
        if self.watchdog is not None:
            variables |= {"WATCHDOG_USEC": str(int(self.watchdog * 1e6)), "WATCHDOG_PID": ""}
        if descriptors:
            names = ":".join(kept.name for kept in self._store)
            count = str(len(descriptors))
            variables |= {"LISTEN_FDS": count, "LISTEN_FDNAMES": names, "LISTEN_PID": ""}
        launch = [sys.executable, "-ISc", LAUNCH, ",".join(map(str, descriptors)), *self.command]
        output = self.log_path.open("ab") if self.log_path else None
        try:
            return subprocess.Popen(
                launch,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=descriptors,
                env={**os.environ, **variables, **self.environ},
            )
        finally:
            if output is not None:
                output.close()

    # On the manager's thread

    def _listen(self) -> None:
        while not self._closing:
            try:
                text, descriptors, pid = _receive(self._socket)
            except TimeoutError:
                self._check_watchdog()
                continue
            with self._changed:
                if pid == self.process.pid:
                    self._handle(_parse(text), descriptors)
                else:
                    self.ignored.append(pid)
                self._changed.notify_all()
            for descriptor in descriptors:
                os.close(descriptor)

    def _handle(self, message: dict[str, str], descriptors: list[int]) -> None:
        """Handle a message. Removes the descriptors that are kept from the list.

        A BARRIER needs no action: the caller closes its descriptor like any other.
        """
        self.messages.append(message)
        name = message.get("FDNAME", "stored")
        if message.get("FDSTORE") == "1":
            polled = message.get("FDPOLL") != "0"
            self._store[:0] = [StoredFds(name, d, polled) for d in descriptors]
            descriptors.clear()
        if message.get("FDSTOREREMOVE") == "1":
            self._drop(lambda kept: kept.name == name)
        if message.get("WATCHDOG") == "1" or "READY" in message:
            self._last_watchdog = time.monotonic()

    def _check_watchdog(self) -> None:
        is_late = (
            self.watchdog is not None and time.monotonic() - self._last_watchdog > self.watchdog
        )
        if is_late and self._running and self.values("READY"):
            self.watchdog_kills += 1
            self._last_watchdog = time.monotonic()
            self.process.kill()

    def _drop(self, condition: Callable[[StoredFds], bool]) -> None:
        for kept in [kept for kept in self._store if condition(kept)]:
            self._store.remove(kept)
            os.close(kept.descriptor)


def _receive(connection: socket.socket) -> tuple[str, list[int], int]:
    """(text, descriptors, pid of the sender) of one message. Raises TimeoutError."""
    space = socket.CMSG_SPACE(4 * 253) + socket.CMSG_SPACE(12)
    data, ancillary, _, _ = connection.recvmsg(8192, space, socket.MSG_CMSG_CLOEXEC)
    descriptors: list[int] = []
    pid = 0
    for _, kind, content in ancillary:
        if kind == SCM_CREDENTIALS:
            pid = struct.unpack("3i", content)[0]
        else:
            descriptors += memoryview(content).cast("i")
    return data.decode(), descriptors, pid


def _parse(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.splitlines())


def _hung_up(descriptor: int) -> bool:
    poll = select.poll()
    try:
        poll.register(descriptor, 0)
        return bool(poll.poll(0))
    except OSError:  # a regular file cannot be polled, and has no other end
        return False
