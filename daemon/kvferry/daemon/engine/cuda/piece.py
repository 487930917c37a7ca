"""A piece as the CUDA engine knows it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from kvferry.cuda.driver import Driver, Event
from kvferry.daemon.core.layout import Fragments, Int64s, Rows
from kvferry.daemon.engine.cuda.link import Some
from kvferry.daemon.engine.cuda.staging import Slot
from kvferry.proto.errors import KVFerryError
from kvferry.proto.specs import Direction


@dataclass(frozen=True, slots=True)
class PageTable:
    """A group's pages as the kernel reads them, in device memory."""

    address: int
    pages: int
    block_bytes: int
    vector: int
    """Bytes that one access may have: 16, 4 or 1, as all addresses allow."""
    units_per_page: int


class Stage(msgspec.Struct, frozen=True, eq=False):
    """The way of a staged piece: the blocks of a table, by a slot, and from or to the pool."""

    slot: Slot
    table: PageTable
    blocks: Int64s
    packed: Fragments | Rows | Some


class Piece(msgspec.Struct, eq=False):
    direction: Direction
    nbytes: int
    stage: Stage | None = None
    begun: Event | None = None
    """Some have none that a job never begins with."""
    moved: Event | None = None
    """It is off the link."""
    done: Event | None = None
    """None while it waits for a turn of the GPU."""
    error: KVFerryError | None = None

    @property
    def units(self) -> int:
        """Of the staging buffer."""
        return 0 if self.stage is None else self.stage.slot.units


def over(driver: Driver, event: Event) -> bool:
    """Whether the device has come to an event. One that failed is over too: whoever polls its piece
    is told."""
    try:
        return driver.reached(event)
    except KVFerryError:
        return True


def fail(driver: Driver, pieces: Iterable[Piece], error: KVFerryError) -> None:
    """The device refused something: nothing of these pieces happens any more."""
    with suppress(KVFerryError):  # it is what the pieces are told already
        driver.call("cuCtxSynchronize")
    for piece in pieces:
        piece.error = error
