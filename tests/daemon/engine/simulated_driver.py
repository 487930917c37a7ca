"""A simulated GPU: the driver calls of the CUDA engine, performed on host memory in a random order.

Only streams, events and waits order operations, as in CUDA. Each query of an event runs some steps
of random streams that are not blocked. A copy or kernel takes several steps. So code that needs
more order than streams and events give fails in some of the runs. Tests with the marker gpu show
what a simulation cannot show.
"""

from __future__ import annotations

import ctypes
import random
import struct
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import numpy as np

from kvferry.cuda.driver import Event, Parameters
from kvferry.daemon.engine.packing import pack_tiles, unpack_tiles
from kvferry.proto.errors import Code, Failed
from kvferry.proto.packing import PACKED_TILE_BYTES, TILE_BYTES, packed_bytes
from kvferry.proto.specs import Direction
from support.simulated_memory import Refusal, SimulatedMemory

POISON = 0xEE
# Steps of a copy or kernel.
PARTS = 3
_PIECE = struct.Struct("QQQIII4xQQ")
_PAGE = struct.Struct("QQQQ")


@dataclass
class SimulatedStream:
    # Each performs a step and returns True, or returns False if it is blocked.
    ops: deque[Callable[[], bool]] = field(default_factory=deque)


@dataclass(eq=False)
class EventRecord:
    """A record of an event: whether it was reached, and at which step.

    If the event is recorded again, it has a new EventRecord. Earlier waits keep the old one.
    """

    reached: bool = False
    at: int = 0


@dataclass
class SimulatedDriver:
    seed: int = 0
    version: int = 13000
    # Direction and number of blocks of every kernel.
    launches: list[tuple[Direction, int]] = field(default_factory=list)
    # Whether the device refuses a call: "launch", "cuMemcpyAsync", "cuMemcpyBatchAsync".
    refuse: Callable[[str], bool] = lambda name: False

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._virtual = SimulatedMemory()
        self._memory: dict[int, np.ndarray[Any, np.dtype[np.uint8]]] = {}
        self._streams: dict[int, SimulatedStream] = {}
        # The last record of each event.
        self._records: dict[int, EventRecord] = {}
        self._names: dict[int, str] = {}
        self._numbers = count(1)
        self._spare: list[int] = []
        self._steps = 0

    # The device

    def step(self, streams: list[SimulatedStream]) -> bool:
        """Run one step of one of these streams. False if all of them are blocked."""
        self._rng.shuffle(streams)
        self._steps += 1
        for stream in streams:
            if stream.ops and stream.ops[0]():
                stream.ops.popleft()
                return True
        return False

    def settle(self) -> None:
        while any(stream.ops for stream in self._streams.values()):
            assert self.step([*self._streams.values()]), "streams wait for each other"

    def _copy(
        self,
        pairs: list[tuple[int, int, int]],
        stream: int,
        copy: Callable[[int, int, int], object] = ctypes.memmove,
    ) -> None:
        """Copy (to, from, bytes) in a random order, in PARTS steps."""
        self._rng.shuffle(pairs)
        for part in range(PARTS):

            def copy_part(part_pairs: list[tuple[int, int, int]] = pairs[part::PARTS]) -> bool:
                for to, origin, nbytes in part_pairs:
                    copy(to, origin, nbytes)
                return True

            self._streams[stream].ops.append(copy_part)

    # Memory

    def allocate(self, nbytes: int) -> int:
        memory = np.full(nbytes + 256, POISON, dtype=np.uint8)
        address = -(-memory.ctypes.data // 256) * 256
        self._memory[address] = memory
        return address

    def copy_to_device(self, pointer: int, array: np.ndarray[Any, Any]) -> None:
        ctypes.memmove(pointer, array.ctypes.data, array.nbytes)

    def register_host(
        self, address: int, nbytes: int, *, mapped: bool = False, writable: bool = True
    ) -> None: ...

    def host_device_pointer(self, address: int) -> int:
        return address

    # Streams and events

    def create_stream(self, *, urgent: bool = False) -> int:
        number = next(self._numbers)
        self._streams[number] = SimulatedStream()
        return number

    def record(self, stream: int) -> Event:
        handle = self._spare.pop() if self._spare else next(self._numbers)
        self._records[handle] = event_record = EventRecord()

        def reach() -> bool:
            event_record.reached, event_record.at = True, self._steps
            return True

        self._streams[stream].ops.append(reach)
        return Event(handle, self._spare)

    def reached(self, event: Event) -> bool:
        for _ in range(self._rng.randrange(6)):
            self.step([*self._streams.values()])
        return self._records[event.handle].reached

    def elapsed_seconds(self, start: Event, end: Event) -> float:
        first, last = self._records[start.handle], self._records[end.handle]
        assert first.reached, "the first event was not reached"
        assert last.reached, "the second event was not reached"
        return (last.at - first.at) / 1e6

    # Calls

    def call(self, name: str, *arguments: Any) -> None:
        match name, arguments:
            case "cuStreamWaitEvent", (stream, handle, 0):
                event_record = self._records[handle]
                self._streams[stream].ops.append(lambda: event_record.reached)
            case "cuCtxSynchronize", ():
                self.settle()
            case "cuMemFree_v2", (pointer,):
                self._memory.pop(pointer).fill(POISON)
            case "cuMemcpyAsync", (to, origin, nbytes, None):
                ctypes.memmove(to, origin, nbytes)
            case "cuMemcpyAsync", (to, origin, nbytes, stream):
                self._copy_one(to, origin, nbytes, stream)
            case (("cuCtxSetCurrent" | "cuMemHostUnregister"), (_,)):
                pass
            case _:
                self._call_virtual(name, *arguments)

    def _call_virtual(self, name: str, *arguments: Any) -> None:
        try:
            assert self._virtual.call(name, *arguments), f"{name}{arguments} is not simulated"
        except Refusal:
            raise self.error(name, 1) from None

    def error(self, name: str, result: int) -> Failed:
        return Failed(Code.DRIVER, f"{name}: refused by the simulation", result)

    def optional(self, name: str, *, quick: bool = False) -> Any:
        assert name == "cuMemcpyBatchAsync_v2"
        return _Batch(self)

    def batch(self, dst: int, src: int, sizes: int, fragments: int, stream: int) -> int:
        if self.refuse("cuMemcpyBatchAsync"):
            return 1
        columns = [(ctypes.c_int64 * fragments).from_address(at) for at in (dst, src, sizes)]
        self._copy([*zip(*map(list, columns), strict=True)], stream)
        return 0

    def _copy_one(self, to: int, origin: int, nbytes: int, stream: int) -> None:
        if self.refuse("cuMemcpyAsync"):
            raise self.error("cuMemcpyAsync", 1)
        self._copy([(to, origin, nbytes)], stream)

    def load_module(self, image: bytes) -> int:
        return 1

    def module_function(self, module: int, name: str) -> int:
        number = next(self._numbers)
        self._names[number] = name
        return number

    def launch(
        self,
        function: int,
        grid: int,
        threads: int,
        stream: int,
        parameters: Parameters,
    ) -> None:
        piece, ids = parameters.arrays
        if self.refuse("launch"):
            raise self.error("cuLaunchKernel", 1)
        assert grid > 0
        name = self._names[function]
        store = name.startswith(("gather", "pack"))
        pairs = [*_pairs(piece, ids)]
        if store:
            pairs = [(packed, paged, nbytes) for paged, packed, nbytes in pairs]
        self.launches.append(
            (Direction.STORE if store else Direction.LOAD, _PIECE.unpack(piece.tobytes())[3])
        )
        if name.startswith("pack"):
            self._copy(pairs, stream, partial(_pack, piece.copy()))
        else:
            self._copy(pairs, stream, _unpack if name.startswith("unpack") else ctypes.memmove)

    # The host

    def device_count(self) -> int:
        return 1

    def device_uuid(self, ordinal: int) -> str:
        return "GPU-simulated"

    def pci_address(self, ordinal: int) -> str:
        return "0000:00:00.0"

    def device_name(self, ordinal: int) -> str:
        return "simulated"

    def device_attribute(self, attribute: int, ordinal: int) -> int:
        return 0

    def retain_context(self, ordinal: int) -> int:
        return 1


@dataclass
class _Batch:
    driver: SimulatedDriver
    argtypes: Any = None

    def __call__(self, dst: int, src: int, sizes: int, fragments: int, *rest: Any) -> int:
        return self.driver.batch(dst, src, sizes, fragments, rest[-1])


def _pack(piece: np.ndarray[Any, Any], to: int, origin: int, nbytes: int) -> None:
    """Pack a page; mark its block as in kernels.cu if it cannot be packed."""
    pages = np.frombuffer(ctypes.string_at(origin, nbytes), np.uint8)
    packed, fits = pack_tiles(pages.reshape(-1, TILE_BYTES))
    ctypes.memmove(to, packed.tobytes(), packed.size)
    stage, _, block_bytes, *_, marks, at = _PIECE.unpack(piece.tobytes())
    if not fits.all():
        block = (to - stage) // block_bytes
        ctypes.memset(marks + (at + block * block_bytes) // 1024, 1, 1)


def _unpack(to: int, origin: int, nbytes: int) -> None:
    packed = np.frombuffer(ctypes.string_at(origin, packed_bytes(nbytes)), np.uint8)
    ctypes.memmove(to, unpack_tiles(packed.reshape(-1, PACKED_TILE_BYTES)).tobytes(), nbytes)


def _pairs(
    piece: np.ndarray[Any, Any], ids: np.ndarray[Any, Any]
) -> Iterator[tuple[int, int, int]]:
    """(address in the tensors, address in the buffer, bytes) of every page, as in kernels.cu."""
    stage, table, block_bytes, blocks, pages, *_ = _PIECE.unpack(piece.tobytes())
    rows = [_PAGE.unpack(ctypes.string_at(table + 32 * page, 32)) for page in range(pages)]
    for position, block in enumerate(ids[:blocks].tolist()):
        for base, stride, nbytes, offset in rows:
            yield base + block * stride, stage + position * block_bytes + offset, nbytes
