"""Each block of a piece is in its place, and blocks that lie in a row are one fragment."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.daemon.core.geometry import Fragments, Rows, Run
from kvferry.daemon.engine.cuda import packing
from kvferry.daemon.engine.cuda.packing import Packing

SLOT, POOL = 1 << 32, 10_000
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


@given(
    runs(),
    st.integers(1, 9),
    st.sets(st.integers(1, BLOCKS - 1)),
    st.sampled_from([0, 3, 32]),
    st.sampled_from([1, 7, BLOCKS]),
)
def test_a_piece_has_as_few_fragments_as_its_places_allow(
    places: list[int], nbytes: int, cuts: set[int], few: int, stretch: int
) -> None:
    packed = Packing()
    run = Run(0, np.arange(len(places)), np.array(places) * nbytes)
    ends = [*sorted(cut for cut in cuts if cut < len(places)), len(places)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "FEW", few)
        patch.setattr(packing, "STRETCH", stretch)
        for start, end in zip([0, *ends], ends, strict=False):
            got = packed.fragments(run.cut(start, end), nbytes, SLOT, POOL)
            rows = wanted(places[start:end], nbytes)
            assert (got.rows() if isinstance(got, Fragments) else got) == rows
            assert isinstance(got, Fragments) == (len(rows) > few)
