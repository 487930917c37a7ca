"""A service manager for tests, where there is no systemd: its protocol, over real sockets.

It starts a program, takes what it says at $NOTIFY_SOCKET, keeps the descriptors it sends, and
passes them on when it starts it again. What systemd does and this does not: it starts nothing anew
by itself, and it takes a descriptor that it has already (systemd ignores that).

    with ServiceManager(kvferryd_command(tmp_path), tmp_path / "notify") as manager:
        manager.start()                 # returns once it said READY=1
        manager.kill()
        manager.start()                 # with everything that it had kept
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

SO_PASSCRED, SCM_CREDENTIALS = 16, 2
TICK = 0.02

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
"""Becomes the program: what it is passed lies at 3 and up, and is meant for its pid."""


def kvferryd_command(
    runtime_dir: Path, device: str = "cpu", pool_bytes: int = 16 << 20, **options: object
) -> list[str]:
    """The command line of a daemon; options are more of its flags, as for LocalDaemon."""
    arguments = {"device": device, "pool_size": pool_bytes, "runtime_dir": runtime_dir, **options}
    command = [sys.executable, "-m", "kvferry.daemon"]
    for name, value in arguments.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    return command


class StoredFds(NamedTuple):
    name: str
    descriptor: int
    polled: bool
    """Whether it goes when its other end does."""


class ServiceManager:
    """Runs one program at a time.

    notify: path of its socket, or "@name" for one in no file system. watchdog: seconds after which
    a program that does not say WATCHDOG=1 is killed. environ: more variables for the program.
    log: where the program's output goes; the test's own where it is None.
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
        self.said: list[dict[str, str]] = []
        self.ignored: list[int] = []
        """Processes whose messages were not heard, since they are not the program."""
        self.starved = 0
        """How often the watchdog had to kill."""
        self.process: subprocess.Popen[bytes]
        self._store: list[StoredFds] = []
        self._heard = threading.Condition()
        self._fed = time.monotonic()
        self._running = self._closing = False
        self._ear = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._ear.setsockopt(socket.SOL_SOCKET, SO_PASSCRED, 1)
        self._ear.settimeout(TICK)
        self._ear.bind(self.notify.replace("@", "\0", 1) if notify is self.notify else self.notify)
        self._thread = threading.Thread(target=self._listen, name="service manager")
        self._thread.start()

    # What tests have it do

    def start(self, timeout: float = 60.0, *, ready: bool = True) -> None:
        """Start the program with what is kept, and wait until it is ready where it will be."""
        with self._heard:
            self.said.clear()
            self._drop(lambda kept: kept.polled and _hung_up(kept.descriptor))
            self.process = self._launch()
            self._fed, self._running = time.monotonic(), True
        if ready:
            self.wait_for("READY", timeout=timeout)

    def kill(self) -> None:
        """SIGKILL, as a machine in trouble would."""
        self.process.kill()
        self.wait_dead()

    def stop(self, timeout: float = 30.0) -> int:
        """SIGTERM, and its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait_dead(timeout)

    def wait_dead(self, timeout: float = 30.0) -> int:
        status = self.process.wait(timeout)
        self._running = False
        return status

    def wait_for(self, name: str, value: str | None = None, timeout: float = 30.0) -> str:
        """Until the program has said `name`, with this value where one is given; what it said."""
        deadline = time.monotonic() + timeout
        with self._heard:
            while True:
                for message in self.said:
                    if name in message and value in (None, message[name]):
                        return message[name]
                left = deadline - time.monotonic()
                if left <= 0 or self.process.poll() is not None:
                    said = [*self.said, self.log()[-2000:]]
                    raise AssertionError(f"it did not say {name}={value or ''}: {said}")
                self._heard.wait(min(left, 10 * TICK))

    def lose_fds(self) -> None:
        """Close all that is kept, as a reboot would. The program does not run."""
        with self._heard:
            self._drop(lambda kept: True)

    def log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path else ""

    def values(self, name: str) -> list[str]:
        """All that was said of `name` since the program was started."""
        with self._heard:
            return [message[name] for message in self.said if name in message]

    @property
    def names(self) -> list[str]:
        """Of what is kept, the newest first."""
        with self._heard:
            return [kept.name for kept in self._store]

    def kept(self, name: str) -> int:
        """The newest descriptor of a name; it stays the store's. Raises StopIteration."""
        with self._heard:
            return next(kept.descriptor for kept in self._store if kept.name == name)

    def close(self) -> None:
        """Kill the program where it still runs, and let everything go."""
        if self._running:
            self.kill()
        self._closing = True
        self._thread.join()
        self._ear.close()
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

    # Its thread

    def _listen(self) -> None:
        while not self._closing:
            try:
                text, descriptors, pid = _receive(self._ear)
            except TimeoutError:
                self._watch()
                continue
            with self._heard:
                if pid == self.process.pid:
                    self._take(_parsed(text), descriptors)
                else:
                    self.ignored.append(pid)
                self._heard.notify_all()
            for descriptor in descriptors:
                os.close(descriptor)

    def _take(self, message: dict[str, str], descriptors: list[int]) -> None:
        """Do what one message asks for; takes the descriptors that it keeps out of the list.

        A BARRIER asks for nothing: it is seen in its descriptor, closed in turn as any other.
        """
        self.said.append(message)
        name = message.get("FDNAME", "stored")
        if message.get("FDSTORE") == "1":
            polled = message.get("FDPOLL") != "0"
            self._store[:0] = [StoredFds(name, d, polled) for d in descriptors]
            descriptors.clear()
        if message.get("FDSTOREREMOVE") == "1":
            self._drop(lambda kept: kept.name == name)
        if message.get("WATCHDOG") == "1" or "READY" in message:
            self._fed = time.monotonic()

    def _watch(self) -> None:
        hungry = self.watchdog is not None and time.monotonic() - self._fed > self.watchdog
        if hungry and self._running and self.values("READY"):
            self.starved += 1
            self._fed = time.monotonic()
            self.process.kill()

    def _drop(self, goes: Callable[[StoredFds], bool]) -> None:
        for kept in [kept for kept in self._store if goes(kept)]:
            self._store.remove(kept)
            os.close(kept.descriptor)


def _receive(ear: socket.socket) -> tuple[str, list[int], int]:
    """(text, descriptors, pid of the sender) of one message. Raises TimeoutError."""
    room = socket.CMSG_SPACE(4 * 253) + socket.CMSG_SPACE(12)
    data, ancillary, _, _ = ear.recvmsg(8192, room, socket.MSG_CMSG_CLOEXEC)
    descriptors: list[int] = []
    pid = 0
    for _, kind, content in ancillary:
        if kind == SCM_CREDENTIALS:
            pid = struct.unpack("3i", content)[0]
        else:
            descriptors += memoryview(content).cast("i")
    return data.decode(), descriptors, pid


def _parsed(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.splitlines())


def _hung_up(descriptor: int) -> bool:
    ear = select.poll()
    try:
        ear.register(descriptor, 0)
        return bool(ear.poll(0))
    except OSError:  # a regular file cannot be polled, and has no other end
        return False
