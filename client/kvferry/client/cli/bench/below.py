"""What every message pays whoever writes it: ZeroMQ's own send, and the waking of a process."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable

import zmq

from kvferry.client.cli.bench.results import Latency

NBYTES = 2 * 2048 * 8
APART = 1e-3
"""Seconds between two, in which whoever is to be woken falls asleep."""
ECHO = "import socket, sys; s = socket.socket(fileno=int(sys.argv[1])); " + (
    "[s.send(b) for b in iter(lambda: s.recv(1), b'')]"
)


def below(times: int) -> list[Latency]:
    return [_sends(times), _wakes(times)]


def _sends(times: int) -> Latency:
    context, data = zmq.Context(), bytes(NBYTES)
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as directory:
        reader, writer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
        reader.bind(f"ipc://{directory}/socket")
        writer.connect(f"ipc://{directory}/socket")
        eater = threading.Thread(target=_eat, args=(reader, times))
        eater.start()
        seconds = _spaced(times, lambda: writer.send(data, zmq.NOBLOCK))
        eater.join()
        context.destroy(0)
    return Latency.of(f"ZeroMQ's send of {NBYTES >> 10} KiB", seconds)


def _eat(reader: zmq.Socket[bytes], times: int) -> None:
    for _ in range(times):
        reader.recv_multipart(copy=False)


def _wakes(times: int) -> Latency:
    here, there = socket.socketpair()
    echo = subprocess.Popen(
        [sys.executable, "-c", ECHO, str(there.fileno())], pass_fds=[there.fileno()]
    )
    there.close()
    here.send(b"?")
    here.recv(1)
    here.setblocking(False)

    def there_and_back() -> None:
        here.send(b"?")
        while True:
            try:
                here.recv(1)
                return
            except BlockingIOError:
                pass

    seconds = _spaced(times, there_and_back)
    here.close()
    echo.wait()
    return Latency.of("a process woken, until it answers", seconds)


def _spaced(times: int, call: Callable[[], object]) -> list[float]:
    seconds = []
    for _ in range(times):
        until = time.perf_counter() + APART
        while time.perf_counter() < until:
            pass
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return seconds
