"""What every job pays, whoever writes it: to send a message, to wake a process, to have another
process copy. Each is met asleep, as it is between two steps of an engine."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable

import zmq

from kvferry.client.cli.bench import bare
from kvferry.client.cli.bench.results import Latency

NBYTES = 2 * 2048 * 8
# Seconds between two messages, so that the receiver is asleep.
APART = 1e-3
ECHO = """
import socket, sys
s = socket.socket(fileno=int(sys.argv[1]))
[s.send(b) for b in iter(lambda: s.recv(1), b"")]
"""


def below(times: int, ordinal: int, nbytes: int) -> list[Latency]:
    """ordinal: of the GPU, -1 where there is none; nbytes: to copy."""
    copier = [bare.__file__, "copier", str(ordinal), str(nbytes)]
    return [
        _sends(times),
        _wakes(times, "a process woken, until it answers", ["-c", ECHO]),
        _wakes(times, "a bare process woken, one block copied", copier, "1"),
        _wakes(times, "the same, by its second thread", copier, "2"),
    ]


def _sends(times: int) -> Latency:
    context, data = zmq.Context(), bytes(NBYTES)
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as directory:
        reader, writer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
        reader.bind(f"ipc://{directory}/socket")
        writer.connect(f"ipc://{directory}/socket")
        eater = threading.Thread(target=_eat, args=(reader,))
        eater.start()
        try:
            seconds = _spaced(times, lambda: writer.send(data, zmq.NOBLOCK))
        finally:
            writer.send(b"")
            eater.join()
            context.destroy(0)
    return Latency.of(f"ZeroMQ's send of {NBYTES >> 10} KiB", seconds)


def _eat(reader: zmq.Socket[bytes]) -> None:
    """Until an empty message."""
    while len(reader.recv_multipart(copy=False)[-1]):
        pass


def _wakes(times: int, what: str, script: list[str], *more: str) -> Latency:
    """The script gets the number of its end of a socket, and answers each byte with one."""
    here, there = socket.socketpair()
    command = [sys.executable, *script, str(there.fileno()), *more]
    # Ctrl-c is for the bench alone: whoever is still beginning would show where he was.
    echo = subprocess.Popen(command, pass_fds=[there.fileno()], process_group=0)
    try:
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

        return Latency.of(what, _spaced(times, there_and_back))
    finally:
        echo.kill()
        echo.wait()
        here.close()


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
