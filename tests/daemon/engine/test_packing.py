"""Each block of a piece is in its place, and blocks that lie in a row are one fragment."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cuda.driver import Driver
from kvferry.daemon.core.layout import Extent, Fragments, Rows
from kvferry.daemon.engine.cuda import packing
from kvferry.daemon.engine.cuda.link import Link, Ruler, Some
from kvferry.daemon.engine.cuda.packing import Packing

SLOT, POOL = 1 << 32, 10_000
RULER = Ruler(SLOT - 1000, 1 << 14)
BLOCKS = 60


@st.composite
def runs(draw: st.DrawFn) -> list[int]:
    """Where blocks lie, in blocks: some of them in a row."""
    rows = draw(st.lists(st.tuples(st.integers(0, 200), st.integers(1, 9)), min_size=1, max_size=9))
    return [start + number for start, length in rows for number in range(length)][:BLOCKS]


def wanted(places: list[int], nbytes: int) -> Rows:
    """Block by block: what lies behind the one before it goes with that."""
    rows: Rows = []
    for number, place in enumerate(places):
        if number and place == places[number - 1] + 1:
            gpu, host, size = rows[-1]
            rows[-1] = gpu, host, size + nbytes
        else:
            rows.append((SLOT + number * nbytes, POOL + place * nbytes, nbytes))
    return rows


class Device:
    """Stands in for the driver, of which Link wants a function."""

    def optional(self, name: str) -> Any:
        return SimpleNamespace()


def rows_of(packed: Fragments | Rows | Some) -> Rows:
    if isinstance(packed, Fragments):
        return packed.rows()
    if not isinstance(packed, Some):
        return packed
    gpu = packed.ruler.mark(packed.gpu, packed.of.nbytes)
    columns = gpu, *packed.of.addresses(packed.first)
    listed = ([*(ctypes.c_int64 * packed.count).from_address(at)] for at in columns)
    return [*zip(*listed, strict=True)]


@given(
    runs(),
    st.integers(1, 9),
    st.sets(st.integers(1, BLOCKS - 1)),
    st.sampled_from([0, 3, 32]),
    st.sampled_from([1, 7, BLOCKS]),
    st.sampled_from([11, 1 << 40]),
)
def test_a_piece_has_as_few_fragments_as_its_places_allow(
    places: list[int],
    nbytes: int,
    cuts: set[int],
    few: int,
    stretch: int,
    chunk: int,
) -> None:
    packed = Packing(Link(cast(Driver, Device()), POOL, chunk), RULER)
    run = Extent(0, np.arange(len(places)), np.array(places) * nbytes)
    ends = [*sorted(cut for cut in cuts if cut < len(places)), len(places)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "FEW", few)
        patch.setattr(packing, "STRETCH", stretch)
        for start, end in zip([0, *ends], ends, strict=False):
            got = packed.fragments(run.cut(start, end), nbytes, SLOT)
            rows = wanted(places[start:end], nbytes)
            assert rows_of(got) == rows
            if isinstance(got, Some):
                assert len(places) > few
                assert all((host - POOL) % chunk + size <= chunk for _, host, size in rows)
            elif len(places) > few:
                assert isinstance(got, Fragments) == (len(rows) > few)


def test_blocks_in_places_of_their_own_are_ready_but_for_the_slot() -> None:
    """And those that lie across two chunks are not."""
    for chunk, ready in ((1 << 20, True), (3000, False)):
        packed = Packing(Link(cast(Driver, Device()), POOL, chunk), RULER)
        run = Extent(0, np.arange(40), np.arange(80, 0, -2) * 1024)
        assert isinstance(packed.fragments(run.cut(3, 9), 1024, SLOT), Some) == ready


def test_blocks_of_which_a_buffer_holds_very_many_have_no_ruler() -> None:
    """Or somebody's blocks of a byte would cost gigabytes of addresses."""
    ruler = Ruler(SLOT, 256 << 20)
    packed = Packing(Link(cast(Driver, Device()), POOL, 1 << 40), ruler)
    for nbytes, ready in ((1, False), (8 << 10, False), (16 << 10, True)):
        run = Extent(0, np.arange(40), np.arange(80, 0, -2) * nbytes)
        assert isinstance(packed.fragments(run.cut(3, 40), nbytes, SLOT), Some) == ready
