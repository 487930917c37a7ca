"""A device worker with an engine, and a model of all memory that the engine may write."""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, TypeAlias

import msgspec
import numpy as np
import pytest

from kvferry.cuda.driver import driver
from kvferry.daemon.core.actions import (
    Continue,
    CopyCalibrated,
    CopyPlan,
    MapTensors,
    StartTransfer,
    TensorsMapped,
    TensorsUnmapped,
    UnmapTensors,
)
from kvferry.daemon.core.layout import BlockLayout, ResolvedBlocks
from kvferry.daemon.device.device_worker import DeviceWorker
from kvferry.daemon.device.mappings import MapCommand
from kvferry.daemon.engine.base import CopyEngine, Mapping
from kvferry.daemon.engine.cuda import cuda_engine
from kvferry.daemon.engine.cuda.cuda_engine import CudaEngine, CudaOptions
from kvferry.daemon.engine.packing import pack_tiles, unpack_tiles
from kvferry.daemon.engine.reference import ReferenceEngine
from kvferry.daemon.memory.pool import HostPool
from kvferry.proto.errors import KVFerryError
from kvferry.proto.layout import LayoutArrays
from kvferry.proto.packing import PACKED_TILE_BYTES, TILE_BYTES, packed_bytes
from kvferry.proto.specs import (
    Direction,
    GPULoadStoreSpec,
    KVLayout,
    TensorLayout,
    TensorRef,
    section_starts,
)
from kvferry.proto.status import CalibrationPoint, CopyStatus
from support.time_limits import TIMEOUT

from .simulated_driver import SimulatedDriver

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
POOL = 24 << 20
# Small, so that many blocks cross two registered chunks.
CHUNK = 1 << 20
JOBS = 60
MODES = ("direct", "staged", "auto")
SIMULATED_STAGING = 4 << 20
Make: TypeAlias = Callable[[pytest.MonkeyPatch], CopyEngine]
Job: TypeAlias = tuple[Direction, GPULoadStoreSpec, list[int]]


def reference(patch: pytest.MonkeyPatch) -> CopyEngine:
    return ReferenceEngine()


def cuda(mode: str) -> Make:
    return lambda patch: CudaEngine("0", CudaOptions(mode, 64 << 20, CHUNK))


def simulated(mode: str, seed: int = 0, **options: Any) -> Make:
    """The CUDA engine with a simulated driver. "auto" copies pages of 4 KiB and more directly.

    The staging buffer is small, so it is reused often. options: of CudaOptions.
    """

    def make(patch: pytest.MonkeyPatch) -> CopyEngine:
        measured = CopyStatus("auto", CalibrationPoint(0, 1.0, 1.0), (), 4096, 4096)
        patch.setattr(cuda_engine, "driver", lambda: SimulatedDriver(seed))
        patch.setattr(cuda_engine, "calibrate", lambda *_: measured)
        small = CudaOptions(mode, SIMULATED_STAGING, CHUNK, SIMULATED_STAGING)
        return CudaEngine("0", replace(small, **options))

    return make


ENGINES: list[Any] = [
    pytest.param(reference, id="reference"),
    *(pytest.param(simulated(mode), id=f"simulated-{mode}") for mode in MODES),
    *(pytest.param(cuda(mode), id=f"cuda-{mode}", marks=pytest.mark.gpu) for mode in MODES),
]


def has_gpu() -> bool:
    with contextlib.suppress(KVFerryError):
        return driver().device_count() > 0
    return False


def layout(
    pages: list[int],
    paddings: list[int],
    groups: list[list[int]],
    factor: int,
    packed: bool = False,
    sections: int = 1,
) -> KVLayout:
    """Tensors with these page sizes and paddings of rows. Groups use complete pages."""
    tensors = [TensorLayout(40, p, p + pad) for p, pad in zip(pages, paddings, strict=True)]
    refs = [tuple(TensorRef(t, pages[t]) for t in group) for group in groups]
    return KVLayout(tuple(tensors), tuple(refs), factor, packed, sections)


LAYOUTS = {
    "one page": layout([4096], [0], [[0]], 1),
    "layers": layout([2048] * 24, [0] * 24, [list(range(24))], 3),
    "padded and interleaved": layout([4096, 512, 1024], [64, 16, 4096], [[0, 1, 2]], 4),
    "odd widths": layout([12, 100, 36], [4, 8, 4], [[0, 1, 2]], 5),
    "single bytes": layout([1, 7, 333], [0, 2, 3], [[2, 0, 1]], 2),
    "two groups": layout([1024, 1024, 65536], [0, 0, 0], [[0, 1], [2]], 2),
    "shared tensors": layout([8192, 8192], [0, 0], [[0, 1], [1, 0]], 3),
    "unpadded": KVLayout(
        (TensorLayout(40, 4096, 4096), TensorLayout(40, 8192, 8192)),
        ((TensorRef(1, 5000), TensorRef(0, 4092)),),
        3,
    ),
    "large": layout([300_000, 300_000], [0, 0], [[0, 1]], 2),
    "packed": layout([4096, 2048, 65536], [0, 16, 32], [[0, 1, 2]], 3, packed=True),
    "packed groups": layout([2048] * 8, [0] * 8, [[0, 1, 2, 3, 4], [5, 6, 7]], 2, packed=True),
    "sections": layout(
        [2048, 36] * 12, [0, 4] * 12, [[*range(14)], [*range(14, 24)]], 3, sections=5
    ),
    "packed sections": layout(
        [4096, 2048] * 4, [16] * 8, [[*range(8)]], 2, packed=True, sections=3
    ),
}
# JOBS of these use a staging buffer several times.
MIXED = {
    "staged": layout([2048] * 64, [0] * 64, [list(range(64))], 1),
    "odd blocks": layout([1008] * 31, [16] * 31, [list(range(31))], 2),
    "staged and direct": layout(
        [2048] * 32 + [65536] * 2, [0] * 34, [list(range(32)), [32, 33]], 2
    ),
    "packed": layout([8192] * 4, [0] * 4, [list(range(4))], 1, packed=True),
}


@dataclass
class ContractFixture:
    """An engine, its device worker, and models of its registrations."""

    engine: CopyEngine
    pool: HostPool
    worker: DeviceWorker
    reports: queue.SimpleQueue[Any]
    serials: Iterator[int] = field(default_factory=lambda: count(1))

    def open(self, shape: KVLayout, **options: Any) -> ModelledRegistration:
        """Allocate tensors and fill them. options: of `map`."""
        number, report = self.map(shape, **options)
        for descriptor in report.descriptors:
            os.close(descriptor)
        opened = self.opened(number)
        opened.fill()
        return opened

    def map(
        self,
        shape: KVLayout,
        *,
        keep: bool = False,
        reuse: int | None = None,
        registered: tuple[TensorsMapped, tuple[int, ...]] | None = None,
    ) -> tuple[int, TensorsMapped]:
        """Have the worker allocate tensors, or map those of `registered` by its descriptors."""
        block_layout = BlockLayout(
            LayoutArrays.from_layout(shape), CHUNK // 2, (POOL - CHUNK) // shape.host_block_bytes
        )
        number = next(self.serials)
        action = MapTensors(number, "s", block_layout, (), None, None, keep, reuse)
        if registered is not None:
            report, descriptors = registered
            action = replace(action, allocations=report.allocations, locations=report.locations)
        else:
            descriptors = ()
        self.worker.post_command(MapCommand(action, descriptors, None))
        report = self.report(TensorsMapped)
        assert report.error is None, report.error
        return number, report

    def opened(self, number: int) -> ModelledRegistration:
        mapping = self.worker._registrations[number].mapping
        return ModelledRegistration(self, number, mapping.layout, mapping)

    def unmap(self, opened: ModelledRegistration) -> None:
        self.worker.post_command(UnmapTensors(opened.number))
        assert self.report(TensorsUnmapped).registration == opened.number

    def report(self, kind: type[Any]) -> Any:
        while not isinstance(report := self.reports.get(timeout=TIMEOUT), kind):
            assert isinstance(report, CopyCalibrated | Continue)
        return report


@dataclass
class ModelledRegistration:
    fixture: ContractFixture
    number: int
    block_layout: BlockLayout
    mapping: Mapping
    rows: list[Bytes] = field(default_factory=list)
    # Byte offsets in the pool of GPU blocks of the last store that could not be packed.
    unpackable: list[int] = field(default_factory=list)

    def fill(self) -> None:
        """Random tensors; if they are packed, some of the pages cannot be."""
        rng = np.random.default_rng(7)
        for index, span in enumerate(self.block_layout.layout_arrays.span_bytes):
            rows = rng.integers(0, 256, span, dtype=np.uint8)
            if self.block_layout.packed:  # most exponents of three quarters are 120 to 127
                values = rows[: span // 8 * 6].view("<u2")
                values &= 0x83FF
                values |= 0x3C00
                values[rng.random(values.size) < 0.004] &= 0x80FF
            self.rows.append(rows)
            self.write(index, self.rows[index])
        self.fill_host()

    def fill_host(self) -> None:
        rng = np.random.default_rng(8)
        self.host = rng.integers(0, 256, POOL, dtype=np.uint8)
        ctypes.memmove(self.fixture.pool.address, self.host.ctypes.data, POOL)

    def write(self, tensor: int, content: Bytes) -> None:
        address = int(self.mapping.bases[tensor])
        if isinstance(self.fixture.engine, CudaEngine):
            device = self.fixture.engine._driver
            device.retain_context(0)
            device.copy_to_device(address, content)
        else:
            ctypes.memmove(address, content.ctypes.data, content.nbytes)

    def read(self, tensor: int) -> Bytes:
        content = np.empty(self.block_layout.layout_arrays.span_bytes[tensor], dtype=np.uint8)
        address = int(self.mapping.bases[tensor])
        if isinstance(self.fixture.engine, CudaEngine):
            device = self.fixture.engine._driver
            device.call("cuMemcpyAsync", content.ctypes.data, address, content.nbytes, None)
            device.call("cuCtxSynchronize")
        else:
            ctypes.memmove(content.ctypes.data, address, content.nbytes)
        return content

    def start(
        self, direction: Direction, spec: GPULoadStoreSpec, hosts: list[int], model: bool = True
    ) -> int:
        """Start a transfer, and perform it in the model."""
        command = self.command(direction, spec, hosts)
        self.fixture.worker.post_command(command)
        if model:
            self.model(direction, spec, hosts)
        return command.plan.serial

    def start_borrowed(self, spec: GPULoadStoreSpec, hosts: list[int], away: int) -> None:
        """Start a load of host blocks that are `away` bytes from where they are in the pool."""
        layout = self.block_layout
        extents = layout.group_extents(Direction.LOAD, spec, len(hosts))
        starts = layout.region_start + np.array(hosts, np.int64) * layout.host_block_bytes
        blocks = layout.resolve_borrowed(extents, np.full(len(hosts), -1), starts + away)
        assert not blocks.host_blocks.size
        if spec.section is not None:
            blocks = layout.section_of(blocks, spec.section)
        self.fixture.worker.post_command(self._started(Direction.LOAD, blocks, host_end=0))
        self.model(Direction.LOAD, spec, hosts)

    def command(
        self, direction: Direction, spec: GPULoadStoreSpec, hosts: list[int]
    ) -> StartTransfer:
        blocks = self.block_layout.resolve(direction, spec, np.array(hosts, dtype=np.int64))
        if spec.section is not None:
            blocks = self.block_layout.section_of(blocks, spec.section)
        return self._started(direction, blocks, self.block_layout.end_offset(blocks.extents))

    def _started(
        self, direction: Direction, blocks: ResolvedBlocks, host_end: int
    ) -> StartTransfer:
        serial, runs = next(self.fixture.serials), blocks.extents
        plan = CopyPlan(
            serial, self.number, direction, runs, self.block_layout.count_bytes(runs), 0, 0,
            host_end,
        )  # fmt: skip
        return StartTransfer(plan, "session", plan.serial)

    def model(self, direction: Direction, spec: GPULoadStoreSpec, hosts: list[int]) -> None:
        shape, host_blocks, gpu_blocks = self.shape, list(hosts), spec.block_ids.tolist()
        self.unpackable = []
        for group, (size, first) in enumerate(
            zip(spec.group_sizes or (), spec.block_indices or (), strict=True)
        ):
            skip = first % shape.block_size_factor
            group_blocks = [
                host_blocks.pop(0)
                for _ in range(-(-(size + skip) // shape.block_size_factor) * (size > 0))
            ]
            for position in range(size):
                block, sub = divmod(skip + position, shape.block_size_factor)
                at = (
                    CHUNK // 2
                    + group_blocks[block] * shape.host_block_bytes
                    + sub * shape.group_bytes(group)
                )
                row, fits, begin = gpu_blocks.pop(0), True, at
                refs = shape.groups[group]
                used = range(len(refs))
                if (section := spec.section) is not None:
                    used = range(*section_starts(len(refs), shape.sections)[section : section + 2])
                for number, ref in enumerate(refs):
                    start = row * shape.tensors[ref.tensor].row_stride_bytes
                    paged = self.rows[ref.tensor][start : start + ref.page_size_bytes]
                    nbytes = packed_bytes(paged.size) if shape.packed else paged.size
                    hosted = self.host[at : at + nbytes]
                    if number not in used:
                        pass
                    elif direction is Direction.STORE:
                        hosted[:], page_fits = _packed(paged) if shape.packed else (paged, True)
                        fits &= page_fits
                    else:
                        paged[:] = _unpacked(hosted) if shape.packed else hosted
                    at += nbytes
                if not fits:
                    self.unpackable.append(begin)

    def check(self) -> None:
        for index, rows in enumerate(self.rows):
            assert np.array_equal(self.read(index), rows), f"tensor {index}"
        bad = np.flatnonzero(self.pool != self.host)
        blocks = (bad - CHUNK // 2) // self.block_layout.host_block_bytes
        assert not bad.size, f"{bad.size} bytes of host blocks {sorted({*blocks.tolist()})}: {bad}"

    @property
    def shape(self) -> KVLayout:
        return msgspec.convert(self.block_layout.layout_arrays.to_lists(), KVLayout)

    @property
    def pool(self) -> Bytes:
        return np.ctypeslib.as_array(
            (ctypes.c_uint8 * POOL).from_address(self.fixture.pool.address)
        )

    def both_directions(self, rng: np.random.Generator) -> tuple[Job, Job]:
        """A store and a load. All stores of this function have other blocks than all its loads."""
        half, layout = self.block_layout.host_blocks // 2, self.shape
        return (
            (Direction.STORE, *transfer(layout, half, rng, range(20))),
            (Direction.LOAD, *transfer(layout, half, rng, range(20, 40), half)),
        )


def of_section(
    direction: Direction, spec: GPULoadStoreSpec, shape: KVLayout, rng: np.random.Generator
) -> GPULoadStoreSpec:
    """A load of one section, if there are several."""
    if direction is Direction.STORE or shape.sections == 1:
        return spec
    return msgspec.structs.replace(spec, section=int(rng.integers(shape.sections)))


def _packed(paged: Bytes) -> tuple[Bytes, bool]:
    packed, fits = pack_tiles(paged.reshape(-1, TILE_BYTES))
    return packed.ravel(), bool(fits.all())


def _unpacked(hosted: Bytes) -> Bytes:
    return unpack_tiles(hosted.reshape(-1, PACKED_TILE_BYTES)).ravel()


def transfer(
    shape: KVLayout,
    hosts: int,
    rng: np.random.Generator,
    rows: Sequence[int] = range(40),
    first_host: int = 0,
) -> tuple[GPULoadStoreSpec, list[int]]:
    """A random transfer: some blocks of each group, from any index of a request."""
    factor = shape.block_size_factor
    share = len(rows) // len(shape.groups)
    ids = rng.permutation(rows).tolist()
    sizes = [int(rng.integers(0, share + 1)) for _ in shape.groups]
    firsts = [int(rng.integers(0, 100)) for _ in shape.groups]
    needs = [-(-(n + i % factor) // factor) * (n > 0) for n, i in zip(sizes, firsts, strict=True)]
    chosen = (first_host + rng.permutation(min(hosts, 200)))[: sum(needs)].tolist()
    while sum(needs) > len(chosen):
        sizes = [size // 2 for size in sizes]
        needs = [
            -(-(n + i % factor) // factor) * (n > 0) for n, i in zip(sizes, firsts, strict=True)
        ]
        chosen = chosen[: sum(needs)]
    return GPULoadStoreSpec(ids[: sum(sizes)], tuple(sizes), tuple(firsts)), chosen
