"""A submitted chunk of the CUDA engine, and the page tables that its kernels read.

Used only by the device worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from kvferry.cuda.driver import Driver, Event
from kvferry.daemon.core.layout import NO_BLOCKS, CopyBatch, Int64s
from kvferry.daemon.engine.cuda.staging import Slot
from kvferry.proto.errors import KVFerryError
from kvferry.proto.specs import Direction


@dataclass(frozen=True, slots=True)
class PageTable:
    """The pages of a group as the kernel reads them, at `address` in device memory.

    pages: per GPU block. vector: bytes of one access of the kernel: 16, 4 or 1, depending on the
    alignment of all addresses; 0: pages are packed. units_per_page: units of the kernel
    (kernels.cu) in one page.
    """

    address: int
    pages: int
    block_bytes: int
    vector: int
    units_per_page: int


class Stage(msgspec.Struct, frozen=True, eq=False):
    """The two steps of a staged chunk.

    The kernel copies `blocks` of `table` to or from `slot`; DMA copies `batch`.
    """

    slot: Slot
    table: PageTable
    blocks: Int64s
    batch: CopyBatch


def _never() -> bool:
    return False


class Chunk(msgspec.Struct, eq=False):
    """One submitted chunk.

    begun: event before its first copy; None if it is not the first chunk of a transfer. moved:
    event after its copies over the link. done: event after everything; None until its kernel is
    launched. error: set if the device refused it. revoked: see base.Mapping. unpackable: positions
    of blocks, once it is done.
    """

    direction: Direction
    nbytes: int
    stage: Stage | None = None
    begun: Event | None = None
    moved: Event | None = None
    done: Event | None = None
    error: KVFerryError | None = None
    revoked: Callable[[], bool] = _never
    unpackable: Int64s = NO_BLOCKS

    @property
    def units(self) -> int:
        """Units of the staging buffer that it uses."""
        return 0 if self.stage is None else self.stage.slot.units


def is_over(driver: Driver, event: Event) -> bool:
    """Whether the device has reached an event, or has failed: then `poll` of its chunk raises."""
    try:
        return driver.reached(event)
    except KVFerryError:
        return True


def fail_chunks(driver: Driver, chunks: Iterable[Chunk], error: KVFerryError) -> None:
    """Wait until the device has finished all submitted work. Then end the chunks with an error."""
    with suppress(KVFerryError):  # the first error is reported
        driver.call("cuCtxSynchronize")
    for chunk in chunks:
        chunk.error = error
