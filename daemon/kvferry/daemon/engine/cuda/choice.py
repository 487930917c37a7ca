"""Direct or staged: measured on the device itself, once, at start.

Direct copies cost an engine nothing but the link, and lose speed as fragments get smaller; staged
ones are at link speed at any size, and cost the engine some turns of the GPU. So a group is copied
directly from the fragment size on at which direct copies reach `GOOD` of one contiguous copy, each
way by itself, and staged below. An operator can force either.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvferry.daemon.core.geometry import Geometry, Run
from kvferry.daemon.engine.base import Mapping
from kvferry.daemon.engine.cuda.direct import DirectCopy
from kvferry.daemon.engine.cuda.link import Link
from kvferry.proto.libcuda import Driver
from kvferry.proto.specs import Direction, KVLayout, TensorLayout, TensorRef
from kvferry.proto.status import CalibrationPoint, CopyStatus, GroupCopying

GOOD = 0.94
SIZES = tuple(1 << power for power in range(12, 22))
"""4 KiB to 2 MiB."""
SAMPLE_BYTES = 32 << 20
MAX_FRAGMENTS = 2048
ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Choice:
    """From which fragment size on each direction copies directly; and blocks that no piece of the
    staging buffer can hold always are."""

    direct_from: dict[Direction, int]
    largest_block: int

    def direct(self, direction: Direction, geometry: Geometry, group: int) -> bool:
        return (
            geometry.refs[group].smallest_page >= self.direct_from[direction]
            or geometry.group_bytes[group] > self.largest_block
        )

    def of_group(self, geometry: Geometry, group: int) -> GroupCopying:
        ways = {
            direction: "direct" if self.direct(direction, geometry, group) else "staged"
            for direction in Direction
        }
        return GroupCopying(ways[Direction.STORE], ways[Direction.LOAD])


def calibrate(driver: Driver, device: int) -> CopyStatus:
    """Measure direct copies between `device` (SAMPLE_BYTES there) and pinned memory of our own."""
    host = driver.allocate_host(SAMPLE_BYTES)
    try:
        direct = DirectCopy(driver, Link(driver, host, SAMPLE_BYTES))
        whole = _measure(driver, direct, device, host, SAMPLE_BYTES)
        points = tuple(_measure(driver, direct, device, host, size) for size in SIZES)
    finally:
        driver.call("cuMemFreeHost", host)
    return CopyStatus(
        "auto",
        whole,
        points,
        _threshold([(point.fragment_bytes, point.store / whole.store) for point in points]),
        _threshold([(point.fragment_bytes, point.load / whole.load) for point in points]),
    )


def _measure(
    driver: Driver, direct: DirectCopy, device: int, host: int, size: int
) -> CalibrationPoint:
    """The speed each way with fragments of one size, at random places on the device, of the second
    of two batches in a row: the first waits for the CPU, which others need not do."""
    blocks = SAMPLE_BYTES // size
    layout = KVLayout((TensorLayout(blocks, size, size),), ((TensorRef(0, size),),))
    mapping = Mapping(Geometry(layout, 0, blocks), np.array([device], dtype=np.int64))
    order = np.random.default_rng(size).permutation(blocks)[:MAX_FRAGMENTS]
    run = Run(0, order, np.arange(order.size) * size)

    def speed(direction: Direction) -> float:
        seconds = []
        for _ in range(ROUNDS):
            (_, begun), (_, done) = (
                direct.enqueue(direction, mapping, run, host) for _ in range(2)
            )
            driver.call("cuCtxSynchronize")
            seconds.append(driver.elapsed_seconds(begun, done))
        return order.size * size / min(seconds)

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


def _threshold(ratios: list[tuple[int, float]]) -> int:
    """The smallest size from which on every ratio is good."""
    from_size = 2 * ratios[-1][0]
    for size, ratio in reversed(ratios):
        if ratio < GOOD:
            break
        from_size = size
    return from_size
