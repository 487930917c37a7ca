"""ZeroMQ alone under load: the upper limit of a daemon's jobs per second.

A ROUTER in a process of its own answers every message. Messages are as small as a job and its
result. A ZeroMQEcho sends its part of the rate, as a client of a daemon does (load.py).
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
REQUEST, REPLY = bytes(60), bytes(40)
# Equal to the credits of a session.
MAX_IN_FLIGHT = 512


class ZeroMQEcho:
    """One DEALER, with a context of its own."""

    def __init__(self, directory: Path, every: float) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(f"ipc://{directory / 'echo.sock'}")
        self._every = every
        self.in_flight: dict[int, float] = {}
        self.due = 0.0
        self._sent = self._received = 0

    def submit_due(self, now: float, statistics: TrafficStatistics) -> None:
        while self.due <= now and len(self.in_flight) < MAX_IN_FLIGHT:
            self._sent += 1
            self.in_flight[self._sent] = self.due
            self._socket.send(REQUEST)
            statistics.counts["offered"] += 1
            self.due += self._every

    def receive_results(self, statistics: TrafficStatistics) -> None:
        while self.in_flight and cast(int, self._socket.get(zmq.EVENTS)) & POLLIN:
            self._socket.recv()
            self._received += 1
            statistics.counts["done"] += 1
            statistics.add_latency(time.perf_counter() - self.in_flight.pop(self._received))

    def close(self) -> None:
        self._socket.close(0)
        self._context.term()


@contextmanager
def echo_process() -> Iterator[Path]:
    """Yields the directory of the ROUTER's socket."""
    with tempfile.TemporaryDirectory(prefix="kvferry-echo-") as name:
        process = multiprocessing.get_context("spawn").Process(
            target=_answer, args=(Path(name),), daemon=True
        )
        process.start()
        try:
            yield Path(name)
        finally:
            process.kill()
            process.join()


def _answer(directory: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.bind(f"ipc://{directory / 'echo.sock'}")
        while True:
            sender = socket.recv()
            socket.recv()
            socket.send(sender, zmq.SNDMORE)
            socket.send(REPLY)
