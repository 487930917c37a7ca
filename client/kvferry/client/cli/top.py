"""`kvferry top`: every daemon of this machine, again and again, until q or ctrl-c."""

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

from kvferry.client.cli.panels import screen
from kvferry.client.cli.watch import Watch
from kvferry.client.endpoint import look_for, runtime_directories

# Seconds that --once waits for the first status of all daemons.
FIRST_LOOK = 5.0


class Top:
    """Daemons in `directory` (one's folder, or one above), or all of this machine."""

    def __init__(self, directory: Path | None, interval: float) -> None:
        self._places = None if directory is None else [directory]
        self._interval = interval
        self._watches: dict[Path, Watch] = {}

    def once(self, console: Console) -> bool:
        """Show it one time; whether any daemon answered."""
        self._find()
        deadline = time.monotonic() + self._interval + FIRST_LOOK
        while not all(watch.looked for watch in self._watches.values()):
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        console.print(self._screen(console))
        return any(watch.seen.look and not watch.seen.why for watch in self._watches.values())

    def live(self, console: Console) -> None:
        with keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as shown:
            while True:
                self._find()
                shown.update(self._screen(console), refresh=True)
                if pressed(self._interval if self._settled else 0.1) in ("q", "Q", "\x03"):
                    return

    def close(self) -> None:
        for watch in self._watches.values():
            watch.stop()
        for watch in self._watches.values():
            watch.close()

    @property
    def _settled(self) -> bool:
        return all(watch.looked for watch in self._watches.values())

    def _find(self) -> None:
        """Daemons come; those that go stay on the screen. A folder that is closed may hold one."""
        found, closed = look_for(self._places or runtime_directories())
        for directory in (*found, *filter(os.path.exists, closed)):
            if directory not in self._watches:
                self._watches[directory] = Watch(directory, self._interval)

    def _screen(self, console: Console) -> RenderableType:
        looked = ", ".join(map(str, self._places or runtime_directories()))
        seen = [self._watches[path].seen for path in sorted(self._watches)]
        return screen(seen, time.monotonic(), console.width, looked)


def run(directory: Path | None, interval: float, *, once: bool) -> bool:
    """Whether a daemon answered, where it was shown one time."""
    console = Console(highlight=False)
    with ExitStack() as leaving, contextlib.suppress(KeyboardInterrupt):
        top = Top(directory, interval)
        leaving.callback(top.close)
        if once or not console.is_terminal:
            return top.once(console)
        top.live(console)
    return True


def nobody(seconds: float) -> str:
    """Nobody presses any key."""
    time.sleep(seconds)
    return ""


@contextlib.contextmanager
def keys() -> Iterator[Callable[[float], str]]:
    """pressed(seconds) -> the key that was pressed in so much time, or ""."""
    descriptor = sys.stdin.fileno()
    if not os.isatty(descriptor):
        yield nobody
        return
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    with interrupts() as interrupted:

        def pressed(seconds: float) -> str:
            ready, _, _ = select.select([interrupted, descriptor], [], [], seconds)
            return os.read(ready[0], 1).decode(errors="replace") if ready else ""

        try:
            yield pressed
        finally:
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


@contextlib.contextmanager
def interrupts() -> Iterator[int]:
    """A descriptor where ctrl-c can be read as a key, the first time; after that it interrupts.

    An exception out of nowhere is lost where Python happens to be in a callback that may not fail.
    """
    here, there = os.pipe()

    def note(number: int, _: object) -> None:
        signal.signal(number, signal.default_int_handler)
        os.write(there, b"\x03")

    before = signal.signal(signal.SIGINT, note)
    try:
        yield here
    finally:
        signal.signal(signal.SIGINT, before)
        os.close(here)
        os.close(there)
