"""Daemons, watched: each by a thread of its own, so that one that does not answer delays nobody.

Totals become rates between two looks, as measured by the daemon's own clock where it is the same
daemon; a daemon that went and came back begins anew.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from kvferry.client.blocking import OffloadClient
from kvferry.proto.errors import KVFerryError
from kvferry.proto.status import DaemonStatus, NamespaceStatus

HISTORY = 120
# Seconds to wait for a daemon's reply.
PATIENCE = 2.0


@dataclass(frozen=True)
class Look:
    """What a daemon said, at one moment of its own clock."""

    status: DaemonStatus
    namespaces: tuple[NamespaceStatus, ...]

    @property
    def at(self) -> float:
        return self.status.uptime_seconds


@dataclass(frozen=True)
class Rates:
    """Per second, between two looks at the same daemon."""

    store: float = 0.0
    load: float = 0.0
    jobs: float = 0.0
    failed: float = 0.0


@dataclass
class Seen:
    """What is known of a daemon. `why`: it does not answer; `since`: from when on that holds."""

    directory: Path
    look: Look | None = None
    before: Look | None = None
    why: str = ""
    since: float = 0.0
    # When it was connected again, if the connection was lost.
    returned: float | None = None
    history: deque[Rates] = field(default_factory=lambda: deque(maxlen=HISTORY))

    @property
    def rates(self) -> Rates:
        return self.history[-1] if self.history else Rates()

    def take(self, look: Look, now: float) -> None:
        """It answered."""
        if self.why or (self.look and self.look.status.boot_id != look.status.boot_id):
            self.returned, self.why = now, ""
        same = self.look is not None and self.look.status.boot_id == look.status.boot_id
        self.before = self.look if same else None
        self.look = look
        if self.before is not None:
            self.history.append(_between(self.before, look))

    def miss(self, why: str, now: float) -> None:
        """It did not."""
        if not self.why:
            self.since = now
        self.why = why
        self.history.clear()


def _between(one: Look, two: Look) -> Rates:
    seconds = max(1e-6, two.at - one.at)
    old, new = one.status.totals, two.status.totals
    return Rates(
        (new.stored_bytes - old.stored_bytes) / seconds,
        (new.loaded_bytes - old.loaded_bytes) / seconds,
        (new.stores + new.loads - old.stores - old.loads) / seconds,
        (new.failed - old.failed) / seconds,
    )


class Watch:
    """Looks at one daemon every `interval` seconds until it is closed."""

    def __init__(self, directory: Path, interval: float) -> None:
        self.seen = Seen(directory)
        self._interval = interval
        self._client: OffloadClient | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def looked(self) -> bool:
        """Whether there is anything to show: rates, or why there are none."""
        return bool(self.seen.history or self.seen.why)

    def stop(self) -> None:
        """Look no more; `close` waits for it."""
        self._stop.set()

    def close(self) -> None:
        """Hang up: at once, or when a daemon that does not answer has had its time."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                self.seen.take(self._look(), time.monotonic())
            except KVFerryError as error:
                self.seen.miss(error.message, time.monotonic())
                self._hang_up()
            if self._stop.wait(self._interval):
                return self._hang_up()

    def _look(self) -> Look:
        if self._client is None:
            self._client = OffloadClient(
                self.seen.directory, engine="kvferry-cli", client="kvferry top", timeout=PATIENCE
            )
        return Look(self._client.status(), self._client.namespaces())

    def _hang_up(self) -> None:
        if self._client is not None:
            self._client.close(timeout=0.2)
            self._client = None
