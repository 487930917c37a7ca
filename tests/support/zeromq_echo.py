"""ZeroMQ alone under load: what lies below a daemon's jobs a second.

A ROUTER in a process of its own sends every message back, as small as a job's and its result's;
an Echo offers its part of the rate to it, as a client of a daemon does (load.py).
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import zmq

from support.traffic_statistics import TrafficStatistics

POLLIN = int(zmq.POLLIN)
ASKED, ANSWERED = bytes(60), bytes(40)
MOST = 512
"""Under way, as the credits of a session."""


class ZeroMQEcho:
    """One DEALER, with a context of its own as every process has."""

    def __init__(self, directory: Path, every: float) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(f"ipc://{directory / 'echo.sock'}")
        self._every = every
        self.under_way: dict[int, float] = {}
        self.due = 0.0
        self._sent = self._heard = 0

    def offer(self, now: float, tally: TrafficStatistics) -> None:
        while self.due <= now and len(self.under_way) < MOST:
            self._sent += 1
            self.under_way[self._sent] = self.due
            self._socket.send(ASKED)
            tally.counts["offered"] += 1
            self.due += self._every

    def take(self, tally: TrafficStatistics) -> None:
        while self.under_way and cast(int, self._socket.get(zmq.EVENTS)) & POLLIN:
            self._socket.recv()
            self._heard += 1
            tally.counts["done"] += 1
            tally.took(time.perf_counter() - self.under_way.pop(self._heard))

    def close(self) -> None:
        self._socket.close(0)
        self._context.term()


@contextmanager
def echoing() -> Iterator[Path]:
    """Where the ROUTER is to be found."""
    with tempfile.TemporaryDirectory(prefix="kvferry-echo-") as name:
        process = multiprocessing.get_context("spawn").Process(
            target=_echo, args=(Path(name),), daemon=True
        )
        process.start()
        try:
            yield Path(name)
        finally:
            process.kill()
            process.join()


def _echo(directory: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.bind(f"ipc://{directory / 'echo.sock'}")
        while True:
            who = socket.recv()
            socket.recv()
            socket.send(who, zmq.SNDMORE)
            socket.send(ANSWERED)
