"""Calibration: which fragment sizes are copied directly, and which are staged. Runs once at start.

    direct    uses only the copy engines; slower for smaller fragments
    staged    runs at the speed of the link for every size; its kernels take GPU time from an engine

For each direction, the threshold is the smallest fragment size from which on direct copies reach
MIN_SPEED_SHARE of the speed of one contiguous copy. FAR_SECONDS is added to the measured time of a
fragment, because the sample is smaller than a real pool. An operator can force either mode. Called
by the device worker, in `attach`.
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
from kvferry.proto.errors import Code, Refused
from kvferry.proto.layout import LayoutArrays
from kvferry.proto.specs import Direction, KVLayout, TensorLayout, TensorRef
from kvferry.proto.status import CalibrationPoint, CopyStatus, GroupCopying

# Share of the speed of a contiguous copy that direct copies must reach.
MIN_SPEED_SHARE = 0.94
# Fragment sizes: 4 KiB to 2 MiB.
SIZES = tuple(1 << power for power in range(12, 22))
HOST_BYTES = 64 << 20
# A batch has BATCH_BYTES, or MAX_FRAGMENTS if these are fewer bytes.
BATCH_BYTES = 32 << 20
MAX_FRAGMENTS = 2048
BATCHES = 4
ROUNDS = 3
# Seconds that are added to the time of a fragment. On an H200, a fragment in a pool of some GiB
# takes 0.14 to 0.17 us longer than in the sample of some MiB, and slightly more while the other
# direction copies, too.
FAR_SECONDS = 0.2e-6


@dataclass(frozen=True, slots=True)
class CopyModes:
    """Decides between direct and staged copies.

    direct_from: per direction the fragment size in bytes from which on copies are direct.
    largest_block: GPU blocks with more bytes do not fit into the staging buffer and are direct.
    """

    direct_from: dict[Direction, int]
    largest_block: int

    def is_direct(self, direction: Direction, layout: BlockLayout, group: int) -> bool:
        return not layout.packed and (
            layout.refs[group].smallest_page >= self.direct_from[direction]
            or layout.group_bytes[group] > self.largest_block
        )

    def check_fit(self, layout: BlockLayout) -> None:
        """Raise Refused if packed GPU blocks do not fit into the staging buffer."""
        if layout.packed and (largest := max(layout.group_bytes)) > self.largest_block:
            message = (
                f"a packed GPU block has {largest} bytes, more than the {self.largest_block} that "
                "fit into the staging buffer; raise copy.staging, or register without `packed`"
            )
            raise Refused(Code.BAD_LAYOUT, message, largest)

    def modes_of(self, layout: BlockLayout, group: int) -> GroupCopying:
        staged = "packed" if layout.packed else "staged"
        store, load = (
            "direct" if self.is_direct(direction, layout, group) else staged
            for direction in (Direction.STORE, Direction.LOAD)
        )
        return GroupCopying(store, load)


def calibrate(driver: Driver, device: int, device_bytes: int) -> CopyStatus:
    """Measure direct copies between device memory and memory like that of the pool.

    device: address of `device_bytes` of device memory. The fragments are at random addresses, as in
    real transfers: a copy engine then translates more addresses. Raises KVFerryError.
    """
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
    """The speed of each direction with fragments of one size, in bytes per second.

    Of BATCHES consecutive batches the first is not measured, because it waits for the CPU. The
    others wait only if the CPU is slower than the link.
    """
    layout = KVLayout((TensorLayout(blocks, size, size),), ((TensorRef(0, size),),))
    mapping = Mapping(
        BlockLayout(LayoutArrays.from_layout(layout), 0, HOST_BYTES // size),
        np.array([device], dtype=np.int64),
    )
    random, count = np.random.default_rng(size), min(BATCH_BYTES // size, MAX_FRAGMENTS)

    def batch() -> Extent:
        gpu, host = (random.permutation(n)[:count] for n in (blocks, HOST_BYTES // size))
        return Extent(0, gpu, host * size)

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
    """The status if an operator has forced "direct" or "staged" for all sizes."""
    size = 0 if mode == "direct" else 1 << 62
    return CopyStatus(mode, measured.contiguous, measured.direct, size, size)


def modes_from(status: CopyStatus, largest_block: int) -> CopyModes:
    return CopyModes(
        {Direction.STORE: status.direct_from_store, Direction.LOAD: status.direct_from_load},
        largest_block,
    )


def _threshold(speeds: list[tuple[int, float, float]]) -> int:
    """The smallest size from which on all speeds reach MIN_SPEED_SHARE of a contiguous copy.

    speeds: (fragment size, speed, speed of a contiguous copy). Twice the largest size if none does.
    """
    from_size = 2 * speeds[-1][0]
    for size, speed, whole in reversed(speeds):
        if size / (size / speed + FAR_SECONDS) < MIN_SPEED_SHARE * whole:
            break
        from_size = size
    return from_size
