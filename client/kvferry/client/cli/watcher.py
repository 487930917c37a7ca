"""Watches daemons for `kvferry top`: each in its own thread, so that a hung one delays no other.

Totals become rates between two samples, by the daemon's own clock. After a restart of the daemon,
rates begin again.
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

# Rates that are kept for the sparkline.
HISTORY = 120
# Seconds to wait for a daemon's reply.
TIMEOUT = 2.0


@dataclass(frozen=True)
class StatusSample:
    """A daemon's reply, at one moment of its own clock."""

    status: DaemonStatus
    namespaces: tuple[NamespaceStatus, ...]

    @property
    def uptime(self) -> float:
        return self.status.uptime_seconds


@dataclass(frozen=True)
class Rates:
    """Per second, between two samples of the same daemon."""

    store: float = 0.0
    load: float = 0.0
    jobs: float = 0.0
    failed: float = 0.0


@dataclass
class DaemonHistory:
    """The state of a daemon. error: why it does not reply. since: when that began."""

    directory: Path
    sample: StatusSample | None = None
    previous: StatusSample | None = None
    error: str = ""
    since: float = 0.0
    # When it was connected again, if the connection was lost.
    reconnected_at: float | None = None
    history: deque[Rates] = field(default_factory=lambda: deque(maxlen=HISTORY))

    @property
    def rates(self) -> Rates:
        return self.history[-1] if self.history else Rates()

    def add_sample(self, sample: StatusSample, now: float) -> None:
        same = self.sample is not None and self.sample.status.boot_id == sample.status.boot_id
        if self.error or (self.sample is not None and not same):
            self.reconnected_at, self.error = now, ""
        self.previous = self.sample if same else None
        self.sample = sample
        if self.previous is not None:
            self.history.append(_rates_between(self.previous, sample))

    def add_failure(self, error: str, now: float) -> None:
        if not self.error:
            self.since = now
        self.error = error
        self.history.clear()


def _rates_between(previous: StatusSample, sample: StatusSample) -> Rates:
    seconds = max(1e-6, sample.uptime - previous.uptime)
    old, new = previous.status.totals, sample.status.totals
    return Rates(
        (new.stored_bytes - old.stored_bytes) / seconds,
        (new.loaded_bytes - old.loaded_bytes) / seconds,
        (new.stores + new.loads - old.stores - old.loads) / seconds,
        (new.failed - old.failed) / seconds,
    )


class DaemonWatcher:
    """Requests the status of one daemon every `interval` seconds, until it is closed."""

    def __init__(self, directory: Path, interval: float) -> None:
        self.history = DaemonHistory(directory)
        self._interval = interval
        self._client: OffloadClient | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def settled(self) -> bool:
        """Whether there is something to show: rates, or an error."""
        return bool(self.history.history or self.history.error)

    def stop(self) -> None:
        """Ask the thread to end; `close` waits for it."""
        self._stop.set()

    def close(self) -> None:
        """Disconnect. Waits for a daemon that does not reply, TIMEOUT seconds at most."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                self.history.add_sample(self._fetch_sample(), time.monotonic())
            except KVFerryError as error:
                self.history.add_failure(error.message, time.monotonic())
                self._disconnect()
            if self._stop.wait(self._interval):
                return self._disconnect()

    def _fetch_sample(self) -> StatusSample:
        if self._client is None:
            self._client = OffloadClient(
                self.history.directory,
                engine="kvferry-cli",
                client="kvferry top",
                timeout=TIMEOUT,
            )
        return StatusSample(self._client.status(), self._client.namespaces())

    def _disconnect(self) -> None:
        if self._client is not None:
            self._client.close(timeout=0.2)
            self._client = None
