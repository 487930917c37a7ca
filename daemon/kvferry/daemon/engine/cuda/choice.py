"""Direct or staged: measured on the device itself, once, at start.

Direct copies cost an engine nothing but the link, and lose speed as fragments get smaller; staged
ones are at link speed at any size, and cost the engine some turns of the GPU. So a group is copied
directly from the fragment size on at which direct copies reach `GOOD` of one contiguous copy, each
way by itself, and staged below. An operator can force either.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvferry.daemon.core.geometry import Fragments, Geometry
from kvferry.daemon.engine.cuda.direct import BatchCopy
from kvferry.proto.libcuda import Driver
from kvferry.proto.messages import CalibrationPoint, CopyStatus, GroupCopying
from kvferry.proto.specs import Direction

GOOD = 0.965
SIZES = tuple(1 << power for power in range(12, 22))
"""4 KiB to 2 MiB."""
SAMPLE_BYTES = 32 << 20
MAX_FRAGMENTS = 2048
ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Choice:
    """From which fragment size on each direction copies directly."""

    direct_from: dict[Direction, int]

    def direct(self, direction: Direction, geometry: Geometry, group: int) -> bool:
        return int(geometry.refs[group].pages.min()) >= self.direct_from[direction]

    def of_group(self, geometry: Geometry, group: int) -> GroupCopying:
        ways = {
            direction: "direct" if self.direct(direction, geometry, group) else "staged"
            for direction in Direction
        }
        return GroupCopying(ways[Direction.STORE], ways[Direction.LOAD])


def calibrate(driver: Driver, device: int, streams: dict[Direction, int]) -> CopyStatus:
    """Measure direct copies between `device` (SAMPLE_BYTES there) and pinned memory of our own."""
    host = driver.allocate_host(SAMPLE_BYTES)
    batch = BatchCopy(driver, host, SAMPLE_BYTES)
    try:

        def speed(direction: Direction, size: int) -> float:
            count = min(SAMPLE_BYTES // size, MAX_FRAGMENTS)
            order = np.random.default_rng(size).permutation(SAMPLE_BYTES // size)[:count]
            offsets = np.arange(count, dtype=np.int64) * size
            sizes = np.full(count, size, dtype=np.int64)
            pages = Fragments(order.astype(np.int64) * size + device, offsets + host, sizes)
            return (
                count
                * size
                / min(
                    _seconds(driver, batch, direction, pages, streams[direction])
                    for _ in range(ROUNDS)
                )
            )

        def point(size: int) -> CalibrationPoint:
            return CalibrationPoint(size, speed(Direction.STORE, size), speed(Direction.LOAD, size))

        contiguous = point(SAMPLE_BYTES)
        points = tuple(point(size) for size in SIZES)
    finally:
        driver.call("cuMemFreeHost", host)
    return CopyStatus(
        "auto",
        contiguous,
        points,
        _threshold([(p.fragment_bytes, p.store / contiguous.store) for p in points]),
        _threshold([(p.fragment_bytes, p.load / contiguous.load) for p in points]),
    )


def forced(mode: str, measured: CopyStatus) -> CopyStatus:
    """The status where an operator has chosen: everything "direct", or everything "staged"."""
    size = 0 if mode == "direct" else 1 << 62
    return CopyStatus(mode, measured.contiguous, measured.direct, size, size)


def choice_of(status: CopyStatus) -> Choice:
    return Choice(
        {Direction.STORE: status.direct_from_store, Direction.LOAD: status.direct_from_load}
    )


def _threshold(ratios: list[tuple[int, float]]) -> int:
    """The smallest size from which on every ratio is good."""
    from_size = 2 * ratios[-1][0]
    for size, ratio in reversed(ratios):
        if ratio < GOOD:
            break
        from_size = size
    return from_size


def _seconds(
    driver: Driver, batch: BatchCopy, direction: Direction, pages: Fragments, stream: int
) -> float:
    begun = driver.record(stream)
    batch.enqueue(direction, pages, stream)
    done = driver.record(stream)
    driver.call("cuStreamSynchronize", stream)
    return driver.elapsed_seconds(begun, done)
