"""Direct or staged: measured on the device itself, once, at start.

Direct copies cost an engine nothing but the link, and lose speed as fragments get smaller; staged
ones are at link speed at any size, and cost the engine some turns of the GPU. So a group is copied
directly from the fragment size on at which direct copies reach `GOOD` of one contiguous copy, each
way by itself, and staged below. What is far takes `FAR` more than the sample shows. An operator can
force either.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvferry.cuda.driver import Driver
from kvferry.daemon.core.layout import BlockLayout, Extent
from kvferry.daemon.engine.base import Mapping
from kvferry.daemon.engine.cuda.direct import DirectCopy
from kvferry.daemon.engine.cuda.dma import Dma
from kvferry.daemon.memory.shared_memory import MappedFiles
from kvferry.proto.layout import LayoutArrays
from kvferry.proto.specs import Direction, KVLayout, TensorLayout, TensorRef
from kvferry.proto.status import CalibrationPoint, CopyStatus, GroupCopying

GOOD = 0.94
SIZES = tuple(1 << power for power in range(12, 22))
"""4 KiB to 2 MiB."""
HOST_BYTES = 64 << 20
BATCH_BYTES = 32 << 20
MAX_FRAGMENTS = 2048
"""Bytes of a batch, or fewer where so many fragments have less."""
BATCHES = 4
ROUNDS = 3
FAR = 0.2e-6
"""Seconds that a fragment takes besides in some GiB of memory (tests/bench/fragments.py: 0.14 to
0.17 us), where a sample at start has some MiB; and a little, for as many come the other way."""


@dataclass(frozen=True, slots=True)
class Choice:
    """From which fragment size on each direction copies directly; and blocks that no chunk of the
    staging buffer can hold always are."""

    direct_from: dict[Direction, int]
    largest_block: int

    def direct(self, direction: Direction, layout: BlockLayout, group: int) -> bool:
        return (
            layout.refs[group].smallest_page >= self.direct_from[direction]
            or layout.group_bytes[group] > self.largest_block
        )

    def of_group(self, layout: BlockLayout, group: int) -> GroupCopying:
        ways = {
            direction: "direct" if self.direct(direction, layout, group) else "staged"
            for direction in Direction
        }
        return GroupCopying(ways[Direction.STORE], ways[Direction.LOAD])


def calibrate(driver: Driver, device: int, device_bytes: int) -> CopyStatus:
    """Measure direct copies between `device` and some memory as the pool's: both are random places
    in real life, and where those are many a copy engine has more to look up."""
    host = MappedFiles("kvferry-sample", HOST_BYTES, HOST_BYTES)
    try:
        host.populate(0, HOST_BYTES)
        driver.register_host(host.address, HOST_BYTES)
        try:
            direct = DirectCopy(driver, Dma(driver, host.address, HOST_BYTES))
            whole, *points = (
                _measure(driver, direct, device, device_bytes // size, size)
                for size in (BATCH_BYTES, *SIZES)
            )
        finally:
            driver.call("cuMemHostUnregister", host.address)
    finally:
        host.close()
    return CopyStatus(
        "auto",
        whole,
        tuple(points),
        _threshold([(point.fragment_bytes, point.store, whole.store) for point in points]),
        _threshold([(point.fragment_bytes, point.load, whole.load) for point in points]),
    )


def _measure(
    driver: Driver, direct: DirectCopy, device: int, blocks: int, size: int
) -> CalibrationPoint:
    """The speed each way with fragments of one size, of batches in a row behind the first one:
    that waits for the CPU, the others only where the CPU is slower than the link."""
    layout = KVLayout((TensorLayout(blocks, size, size),), ((TensorRef(0, size),),))
    mapping = Mapping(
        BlockLayout(LayoutArrays.from_layout(layout), 0, HOST_BYTES // size),
        np.array([device], dtype=np.int64),
    )
    random, count = np.random.default_rng(size), min(BATCH_BYTES // size, MAX_FRAGMENTS)

    def batch() -> Extent:
        gpu, places = (random.permutation(n)[:count] for n in (blocks, HOST_BYTES // size))
        return Extent(0, gpu, places * size)

    def speed(direction: Direction) -> float:
        seconds = []
        for _ in range(ROUNDS):
            extents = [batch() for _ in range(BATCHES)]
            ends = [direct.enqueue(direction, mapping, extent)[1] for extent in extents]
            driver.call("cuCtxSynchronize")
            seconds.append(driver.elapsed_seconds(ends[0], ends[-1]))
        return (BATCHES - 1) * count * size / min(seconds)

    return CalibrationPoint(size, speed(Direction.STORE), speed(Direction.LOAD))


def forced(mode: str, measured: CopyStatus) -> CopyStatus:
    """The status where an operator has chosen: everything "direct", or everything "staged"."""
    size = 0 if mode == "direct" else 1 << 62
    return CopyStatus(mode, measured.contiguous, measured.direct, size, size)


def choice_of(status: CopyStatus, largest_block: int) -> Choice:
    return Choice(
        {Direction.STORE: status.direct_from_store, Direction.LOAD: status.direct_from_load},
        largest_block,
    )


def _threshold(speeds: list[tuple[int, float, float]]) -> int:
    """The smallest size from which on every speed is good, beside that of one contiguous copy."""
    from_size = 2 * speeds[-1][0]
    for size, speed, whole in reversed(speeds):
        if size / (size / speed + FAR) < GOOD * whole:
            break
        from_size = size
    return from_size
