"""A chunk as the CUDA engine knows it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from kvferry.cuda.driver import Driver, Event
from kvferry.daemon.core.layout import CopyBatch, Int64s
from kvferry.daemon.engine.cuda.staging import Slot
from kvferry.proto.errors import KVFerryError
from kvferry.proto.specs import Direction


@dataclass(frozen=True, slots=True)
class PageTable:
    """A group's pages as the kernel reads them, in device memory.

    vector: bytes of one access of the kernel: 16, 4 or 1, as the alignment of all addresses allows.
    """

    address: int
    pages: int
    block_bytes: int
    vector: int
    units_per_page: int


class Stage(msgspec.Struct, frozen=True, eq=False):
    """The two steps of a staged chunk: the kernel has blocks of a table, DMA has a batch."""

    slot: Slot
    table: PageTable
    blocks: Int64s
    batch: CopyBatch


def _never() -> bool:
    return False


class Chunk(msgspec.Struct, eq=False):
    """One submitted chunk.

    begun: before its first copy; None if no transfer starts with it. moved: behind its copies on
    the link. done: behind everything; None until its kernel is launched. error: the device refused
    it. revoked: see Mapping.
    """

    direction: Direction
    nbytes: int
    stage: Stage | None = None
    begun: Event | None = None
    moved: Event | None = None
    done: Event | None = None
    error: KVFerryError | None = None
    revoked: Callable[[], bool] = _never

    @property
    def units(self) -> int:
        """Of the staging buffer."""
        return 0 if self.stage is None else self.stage.slot.units


def over(driver: Driver, event: Event) -> bool:
    """Whether the device has reached an event, or failed: then `poll` of its chunk raises."""
    try:
        return driver.reached(event)
    except KVFerryError:
        return True


def fail(driver: Driver, chunks: Iterable[Chunk], error: KVFerryError) -> None:
    """The device refused something: end these chunks with this error, when it has stopped."""
    with suppress(KVFerryError):  # the first error counts
        driver.call("cuCtxSynchronize")
    for chunk in chunks:
        chunk.error = error
