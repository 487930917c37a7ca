"""One block loaded while stores go on, without a daemon: what lies below `kvferry bench --what
queued`.

    python tests/bench/queued_floor.py [--rounds 20] [--trips 100]

A bare process in Python is woken by a byte, loads 2 MiB from pinned memory, polls until that is
done, and answers. Meanwhile pieces of 32 MiB are stored, three under way: one contiguous copy each,
or sixteen fragments of 2 MiB in one driver call, put together beforehand. Those who store look
every 0.2 ms whether there is something to do. They are the thread that loads, a second thread, or a
second process, which has a CUDA context of its own.

A daemon has more to do for each piece than to enqueue it. So at last a second thread computes for
some microseconds in Python besides, and shows what that alone costs a load.

    us   of a load: median and 99th percentile, with nothing else to do, and while stores go on,
         in turns; x: the 99th percentile by that with nothing else
"""

from __future__ import annotations

import argparse
import itertools
import select
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np

from kvferry.daemon.core.geometry import Fragments
from kvferry.daemon.engine.cuda.link import Link
from kvferry.proto.libcuda import Driver, Event, driver
from kvferry.proto.specs import Direction

BLOCK, PIECE, ROOM, GIB = 2 << 20, 32 << 20, 64 << 20, 1 << 30
UNDER_WAY = 3
LOOKS, APART, WARM_UPS = 2e-4, 3e-5, 10
"""Seconds between two looks at the stores, and between two loads; loads that do not count."""
LOAD, STORE, REST, ANSWER = b"l", b"s", b"r", b"!"
SAME, SECOND, PROCESS = "the same thread", "a second thread", "a second process"
WHAT = ("contiguous", "batches of 16")
CASES = [(what, who, 0) for what in WHAT for who in (SAME, SECOND, PROCESS)]
CASES += [(WHAT[1], SECOND, microseconds) for microseconds in (25, 50, 100, 200)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20, help="turns of each kind (default: 20)")
    parser.add_argument("--trips", type=int, default=100, help="loads in a turn (default: 100)")
    options = parser.parse_args()
    print(f"{'us':15}{'by':24}{'idle p50':>9}{'p99':>7}{'stores p50':>12}{'p99':>7}{'x':>6}")
    for what, who, computes in CASES:
        loader = Process(what, who, computes)
        storer = Process(what, SAME, computes) if who == PROCESS else loader
        idle, beside = list[float](), list[float]()
        for _ in range(options.rounds):
            idle += loader.trips(options.trips)
            storer.ask(STORE)
            beside += loader.trips(options.trips)
            storer.ask(REST)
        numbers = [1e6 * float(np.quantile(s, q)) for s in (idle, beside) for q in (0.5, 0.99)]
        columns = "{:9.0f}{:7.0f}{:12.0f}{:7.0f}".format(*numbers)
        by = f"{who}, {computes} us" if computes else who
        print(f"{what:15}{by:24}{columns}{numbers[3] / numbers[1]:6.2f}", flush=True)
        for process in {loader, storer}:
            process.close()


class Process:
    """One that loads, and stores as well where it is told to."""

    def __init__(self, what: str, who: str, computes: int) -> None:
        self._socket, there = socket.socketpair()
        command = [sys.executable, __file__, str(there.fileno()), what, who, str(computes)]
        self._process = subprocess.Popen(command, pass_fds=[there.fileno()])
        there.close()
        self.ask(LOAD)
        self._socket.setblocking(False)

    def ask(self, byte: bytes) -> None:
        self._socket.send(byte)
        while True:
            try:
                self._socket.recv(1)
                return
            except BlockingIOError:
                pass

    def trips(self, times: int) -> list[float]:
        seconds = list[float]()
        for _ in range(times + WARM_UPS):
            begin = time.perf_counter()
            self.ask(LOAD)
            end = time.perf_counter()
            seconds.append(end - begin)
            while time.perf_counter() < end + APART:
                pass
        return seconds[WARM_UPS:]

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


def serve(descriptor: int, what: str, who: str, computes: int) -> None:
    there, cuda = socket.socket(fileno=descriptor), driver()
    context = cuda.retain_context(0)
    load, stores = loads(cuda), Stores(cuda, computes / 1e6, batched=what == WHAT[1])
    if second := who == SECOND:
        threading.Thread(target=stores.keep_going, args=(context,), daemon=True).start()
    while True:
        if stores.going and not second:
            stores.go_on()
            if not select.select([there], [], [], LOOKS)[0]:
                continue
        match there.recv(1):
            case b"":
                stores.going = False
                return cuda.call("cuCtxSynchronize")
            case byte if byte == LOAD:
                load()
            case byte:
                stores.going = byte == STORE
        there.send(ANSWER)


def loads(cuda: Driver) -> Callable[[], None]:
    host, device = cuda.allocate_host(ROOM), cuda.allocate(ROOM)
    stream = cuda.create_stream(urgent=True)
    places = itertools.cycle(range(0, ROOM, BLOCK))

    def load() -> None:
        place = next(places)
        cuda.call("cuMemcpyAsync", device + place, host + place, BLOCK, stream)
        end = cuda.record(stream)
        while not cuda.reached(end):
            pass

    return load


class Stores:
    """Pieces from one GiB of the device to one of pinned memory, round and round.

    computes: seconds in Python for each of them, besides.
    """

    def __init__(self, cuda: Driver, computes: float, *, batched: bool) -> None:
        self.going = False
        self._computes = computes
        self._cuda = cuda
        self._stream = cuda.create_stream()
        self._ends: deque[Event] = deque()
        host, device = cuda.allocate_host(GIB), cuda.allocate(GIB)
        link, random = Link(cuda, host, 1 << 40), np.random.default_rng(0)
        size, pieces = BLOCK if batched else PIECE, GIB // PIECE
        places = [random.permutation(GIB // size).reshape(pieces, -1) * size for _ in range(2)]
        sizes = np.full(PIECE // size, size)
        self._pieces = deque(
            link.listed(Direction.STORE, Fragments.of(device + gpu, host + place, sizes))
            for gpu, place in zip(*places, strict=True)
        )
        self._link = link

    def go_on(self) -> None:
        while self._ends and self._cuda.reached(self._ends[0]):
            self._ends.popleft()
        while len(self._ends) < UNDER_WAY:
            self._link.enqueue_listed(self._pieces[0], self._stream)
            self._pieces.rotate()
            self._ends.append(self._cuda.record(self._stream))
            until = time.perf_counter() + self._computes
            while time.perf_counter() < until:
                pass

    def keep_going(self, context: int) -> None:
        self._cuda.call("cuCtxSetCurrent", context)
        while True:
            if self.going:
                self.go_on()
            time.sleep(LOOKS)


if __name__ == "__main__":
    if len(sys.argv) == 5 and sys.argv[1].isdecimal():
        descriptor, what, who, computes = sys.argv[1:]
        serve(int(descriptor), what, who, int(computes))
    else:
        main()
