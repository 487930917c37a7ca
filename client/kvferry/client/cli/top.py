"""`kvferry top`: all daemons of this machine, updated until q or ctrl-c."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console, RenderableType
from rich.live import Live

from kvferry.client.cli.panels import render_screen
from kvferry.client.cli.watcher import DaemonWatcher
from kvferry.client.endpoint import find_daemons, runtime_directories

# Seconds that --once waits for all daemons, besides an interval.
FIRST_REPLY = 5.0


class Top:
    """The daemons in `directory` (a runtime directory, or its parent), or all of this machine."""

    def __init__(self, directory: Path | None, interval: float) -> None:
        self._directories = None if directory is None else [directory]
        self._interval = interval
        self._watchers: dict[Path, DaemonWatcher] = {}

    def print_once(self, console: Console) -> bool:
        """Print all panels once. Returns whether any daemon replied."""
        self._find_daemons()
        deadline = time.monotonic() + self._interval + FIRST_REPLY
        while not all(watcher.settled for watcher in self._watchers.values()):
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        console.print(self._render(console))
        histories = [watcher.history for watcher in self._watchers.values()]
        return any(history.sample and not history.error for history in histories)

    def run_live(self, console: Console) -> None:
        with (
            read_keys() as read_key,
            Live(console=console, screen=True, auto_refresh=False) as live,
        ):
            while True:
                self._find_daemons()
                live.update(self._render(console), refresh=True)
                if read_key(self._interval if self._settled else 0.1) in ("q", "Q", "\x03"):
                    return

    def close(self) -> None:
        for watcher in self._watchers.values():
            watcher.stop()
        for watcher in self._watchers.values():
            watcher.close()

    @property
    def _settled(self) -> bool:
        return all(watcher.settled for watcher in self._watchers.values())

    def _find_daemons(self) -> None:
        """Add new daemons; disconnected ones stay on the screen.

        An inaccessible directory may hold a daemon, and is shown with its error.
        """
        found, inaccessible = find_daemons(self._directories or runtime_directories())
        for directory in (*found, *filter(os.path.exists, inaccessible)):
            if directory not in self._watchers:
                self._watchers[directory] = DaemonWatcher(directory, self._interval)

    def _render(self, console: Console) -> RenderableType:
        searched = ", ".join(map(str, self._directories or runtime_directories()))
        histories = [self._watchers[path].history for path in sorted(self._watchers)]
        return render_screen(histories, time.monotonic(), console.width, searched)


def run_top(directory: Path | None, interval: float, *, once: bool) -> bool:
    """Returns False if it was printed once and no daemon replied."""
    console = Console(highlight=False)
    with ExitStack() as stack, contextlib.suppress(KeyboardInterrupt):
        top = Top(directory, interval)
        stack.callback(top.close)
        if once or not console.is_terminal:
            return top.print_once(console)
        top.run_live(console)
    return True


def _sleep(seconds: float) -> str:
    """read_key if standard input is not a terminal."""
    time.sleep(seconds)
    return ""


@contextlib.contextmanager
def read_keys() -> Iterator[Callable[[float], str]]:
    """Yields read_key(seconds) -> a key that is pressed within so many seconds, else ""."""
    descriptor = sys.stdin.fileno()
    if not os.isatty(descriptor):
        yield _sleep
        return
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    with interrupt_pipe() as interrupted:

        def read_key(seconds: float) -> str:
            ready, _, _ = select.select([interrupted, descriptor], [], [], seconds)
            return os.read(ready[0], 1).decode(errors="replace") if ready else ""

        try:
            yield read_key
        finally:
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


@contextlib.contextmanager
def interrupt_pipe() -> Iterator[int]:
    """A descriptor from which the first ctrl-c is read as a key; the second interrupts.

    A KeyboardInterrupt is lost if it is raised in a callback from which Python propagates nothing.
    """
    reader, writer = os.pipe()

    def write_key(number: int, _: object) -> None:
        signal.signal(number, signal.default_int_handler)
        os.write(writer, b"\x03")

    before = signal.signal(signal.SIGINT, write_key)
    try:
        yield reader
    finally:
        signal.signal(signal.SIGINT, before)
        os.close(reader)
        os.close(writer)
