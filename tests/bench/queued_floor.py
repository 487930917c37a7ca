"""Latency of loading one block beside stores without a daemon: the bound of queued_alternating.py.

    python tests/bench/queued_floor.py [--rounds 20] [--trips 100]

A bare Python process receives a byte, loads 2 MiB from pinned memory, polls until that is done, and
replies. Meanwhile chunks are stored:

    contiguous      32 MiB each, one copy; three in flight
    batches of 16   32 MiB each, fragments of 2 MiB in one driver call, prepared before
    batches of 62   124 MiB each, two in flight
    staged          the same in pages of 32 KiB, which a kernel gathers before the copy. The loaded
                    block also has such pages: a kernel scatters it after its copy.
    staged by 264   the kernel has 264 thread blocks, two per multiprocessor of an H200; or 132

The thread that stores checks every 0.2 ms whether it can enqueue a chunk. It is the thread that
loads, a second thread, or a thread of a second process, which has a CUDA context of its own.

A daemon does more for each chunk than to enqueue it. So in the last cases a second thread also
computes for some microseconds in Python, which shows the effect of that alone on a load.

    us   of a load: median and 99th percentile, idle and beside stores, alternating;
         x: the 99th percentile over that of the idle loads
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

import numpy as np

from kvferry.cuda.driver import Driver, Event, driver
from kvferry.daemon.core.layout import BlockLayout, CopyBatch, Int64s
from kvferry.daemon.engine.cuda import staged
from kvferry.daemon.engine.cuda.dma import Dma
from kvferry.daemon.engine.cuda.staged import Kernels, StagedCopy
from kvferry.proto.layout import LayoutArrays
from kvferry.proto.specs import Direction, KVLayout, TensorLayout, TensorRef

BLOCK, PIECE, ROOM, GIB = 2 << 20, 32 << 20, 64 << 20, 1 << 30
PAGE, PAGES, BLOCKS = 32 << 10, 64, 512
# Bytes of the staging buffer; blocks of a large chunk.
STAGING, LARGE = 256 << 20, 62
ONE_BLOCK = np.array([BLOCKS - 1])
# Seconds between two checks of the stores, and between two loads; loads that do not count.
STORE_INTERVAL, LOAD_INTERVAL, WARM_UPS = 2e-4, 3e-5, 10
LOAD, STORE, REST, ANSWER = b"l", b"s", b"r", b"!"
SAME, SECOND, PROCESS = "the same thread", "a second thread", "a second process"
# Most thread blocks of a kernel.
STAGED = {"staged": staged.MAX_GRID, "staged by 264": 264, "staged by 132": 132}
# Fragments of a chunk, and how many chunks are in flight.
WHAT = {"contiguous": (1, 3), "batches of 16": (16, 3), f"batches of {LARGE}": (LARGE, 2)}
CASES = [
    (what, storing_thread, 0)
    for what in (*WHAT, *STAGED)
    for storing_thread in (SAME, SECOND, PROCESS)
]
CASES += [("batches of 16", SECOND, microseconds) for microseconds in (25, 50, 100, 200)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20, help="rounds of each kind (default: 20)")
    parser.add_argument("--trips", type=int, default=100, help="loads in a round (default: 100)")
    options = parser.parse_args()
    print(f"{'us':15}{'by':24}{'idle p50':>9}{'p99':>7}{'stores p50':>12}{'p99':>7}{'x':>6}")
    for what, storing_thread, computes in CASES:
        loader = Process(what, storing_thread, computes)
        storer = Process(what, SAME, computes) if storing_thread == PROCESS else loader
        idle, beside = list[float](), list[float]()
        for _ in range(options.rounds):
            idle += loader.trips(options.trips)
            storer.ask(STORE)
            beside += loader.trips(options.trips)
            storer.ask(REST)
        numbers = [1e6 * float(np.quantile(s, q)) for s in (idle, beside) for q in (0.5, 0.99)]
        columns = "{:9.0f}{:7.0f}{:12.0f}{:7.0f}".format(*numbers)
        by = f"{storing_thread}, {computes} us" if computes else storing_thread
        print(f"{what:15}{by:24}{columns}{numbers[3] / numbers[1]:6.2f}", flush=True)
        for process in {loader, storer}:
            process.close()


class Process:
    """A process that loads, and stores between STORE and REST."""

    def __init__(self, what: str, storing_thread: str, computes: int) -> None:
        self._socket, child_end = socket.socketpair()
        command = [
            sys.executable,
            __file__,
            str(child_end.fileno()),
            what,
            storing_thread,
            str(computes),
        ]
        self._process = subprocess.Popen(command, pass_fds=[child_end.fileno()])
        child_end.close()
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
            while time.perf_counter() < end + LOAD_INTERVAL:
                pass
        return seconds[WARM_UPS:]

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


def serve(descriptor: int, what: str, storing_thread: str, computes: int) -> None:
    connection, cuda = socket.socket(fileno=descriptor), driver()
    context = cuda.retain_context(0)
    if what in STAGED:
        staged.MAX_GRID = STAGED[what]
        loop: DirectLoop = StagedLoop(cuda)
    else:
        loop = DirectLoop(cuda, *WHAT[what])
    stores = QueuedStores(cuda, loop, computes / 1e6)
    if second := storing_thread == SECOND:
        threading.Thread(target=stores.run, args=(context,), daemon=True).start()
    while True:
        if stores.is_running and not second:
            stores.enqueue_stores()
            if not select.select([connection], [], [], STORE_INTERVAL)[0]:
                continue
        match connection.recv(1):
            case b"":
                stores.is_running = False
                return cuda.call("cuCtxSynchronize")
            case byte if byte == LOAD:
                end = loop.load()
                while not cuda.reached(end):
                    pass
            case byte:
                stores.is_running = byte == STORE
        connection.send(ANSWER)


class QueuedStores:
    """Stores the chunks of a loop, again and again. computes: seconds of Python for each chunk."""

    def __init__(self, cuda: Driver, loop: DirectLoop, computes: float) -> None:
        self.is_running = False
        self._cuda, self._loop, self._computes = cuda, loop, computes
        self._ends: deque[Event] = deque()

    def enqueue_stores(self) -> None:
        while self._ends and self._cuda.reached(self._ends[0]):
            self._ends.popleft()
        while len(self._ends) < self._loop.in_flight:
            self._ends.append(self._loop.store())
            until = time.perf_counter() + self._computes
            while time.perf_counter() < until:
                pass

    def run(self, context: int) -> None:
        self._cuda.call("cuCtxSetCurrent", context)
        while True:
            if self.is_running:
                self.enqueue_stores()
            time.sleep(STORE_INTERVAL)


class DirectLoop:
    """One GiB of device memory and one GiB of pinned memory: chunks to store, and blocks to load.

    All batches are prepared in the constructor.
    """

    def __init__(self, cuda: Driver, fragments: int, in_flight: int) -> None:
        self.in_flight = in_flight
        self._cuda = cuda
        self._host, self._device = cuda.allocate_host(GIB), cuda.allocate(GIB)
        self._dma = Dma(cuda, self._host, 1 << 40)
        self._load, self._store = cuda.create_stream(urgent=True), cuda.create_stream()
        size = PIECE if fragments == 1 else BLOCK
        random, pieces = np.random.default_rng(0), GIB // size // fragments
        gpu, host = (random.permutation(GIB // size)[: pieces * fragments] for _ in range(2))
        self._gpu_blocks, self._host_blocks = (n.reshape(pieces, -1) for n in (gpu, host))
        self._size = size
        self._batches = deque(self._make_batches())
        self._places = itertools.cycle(range(0, ROOM, BLOCK))
        self._from, self._to = cuda.allocate_host(ROOM), cuda.allocate(ROOM)

    def store(self) -> Event:
        """Enqueue the next chunk. Returns the event of its end."""
        self._dma.enqueue(Direction.STORE, self._batches[0], self._store)
        self._batches.rotate(-1)
        return self._cuda.record(self._store)

    def load(self) -> Event:
        place = next(self._places)
        self._cuda.call("cuMemcpyAsync", self._to + place, self._from + place, BLOCK, self._load)
        return self._cuda.record(self._load)

    def _make_batches(self) -> list[CopyBatch]:
        pairs = zip(self._gpu_blocks, self._host_blocks, strict=True)
        return [self._piece(self._device + gpu * self._size, host) for gpu, host in pairs]

    def _piece(self, sources: Int64s, host: Int64s) -> CopyBatch:
        sizes = np.full(host.size, self._size)
        return CopyBatch.from_rows(sources, self._host + host * self._size, sizes)


class StagedLoop(DirectLoop):
    """A DirectLoop with a staging buffer for two large chunks and a block that is loaded."""

    def __init__(self, cuda: Driver) -> None:
        self._buffer = cuda.allocate(STAGING)
        super().__init__(cuda, LARGE, 2)
        layout = KVLayout(
            (TensorLayout(BLOCKS, PAGE, PAGE),) * PAGES,
            (tuple(TensorRef(tensor, PAGE) for tensor in range(PAGES)),),
        )
        bases = self._device + np.arange(PAGES) * BLOCKS * PAGE
        copy = StagedCopy(cuda, self._dma)
        self._table = copy.table(BlockLayout(LayoutArrays.from_layout(layout), 0, BLOCKS), 0, bases)
        self._gathers, self._scatters = Kernels(cuda), Kernels(cuda)  # for a thread each
        self._gather, self._scatter = cuda.create_stream(), cuda.create_stream(urgent=True)
        self._pieces = deque(enumerate(self._gpu_blocks))
        # Ends of the last two chunks. A kernel may gather into the buffer of a chunk after its end.
        self._ends: deque[Event] = deque(maxlen=2)

    def store(self) -> Event:
        cuda, (number, blocks) = self._cuda, self._pieces[0]
        self._pieces.rotate(-1)
        if len(self._ends) == 2:
            cuda.call("cuStreamWaitEvent", self._gather, self._ends[0].handle, 0)
        place = self._buffer + number % 2 * LARGE * BLOCK
        self._gathers.launch(Direction.STORE, self._table, place, blocks, self._gather)
        gathered = cuda.record(self._gather)
        cuda.call("cuStreamWaitEvent", self._store, gathered.handle, 0)
        self._ends.append(super().store())
        return self._ends[-1]

    def load(self) -> Event:
        cuda, place = self._cuda, self._buffer + 2 * LARGE * BLOCK
        cuda.call("cuMemcpyAsync", place, self._from + next(self._places), BLOCK, self._load)
        moved = cuda.record(self._load)
        cuda.call("cuStreamWaitEvent", self._scatter, moved.handle, 0)
        self._scatters.launch(Direction.LOAD, self._table, place, ONE_BLOCK, self._scatter)
        return cuda.record(self._scatter)

    def _make_batches(self) -> list[CopyBatch]:
        """Copies from the staging buffer. Successive chunks alternate between its two halves."""
        sources = self._buffer + np.arange(2 * LARGE).reshape(2, -1) * BLOCK
        hosts = enumerate(self._host_blocks)
        return [self._piece(sources[number % 2], host) for number, host in hosts]


if __name__ == "__main__":
    if len(sys.argv) == 5 and sys.argv[1].isdecimal():
        descriptor, what, storing_thread, computes = sys.argv[1:]
        serve(int(descriptor), what, storing_thread, int(computes))
    else:
        main()
