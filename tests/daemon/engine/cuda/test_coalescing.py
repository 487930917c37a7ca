"""Each block of a chunk is in its place, and blocks that lie in a row are one copy."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvferry.daemon.engine.cuda.coalescing import coalesce

SLOT, POOL = 1 << 32, 10_000
BLOCKS = 60


@st.composite
def places(draw: st.DrawFn) -> list[int]:
    """Where blocks lie, in blocks: some of them in a row."""
    rows = draw(st.lists(st.tuples(st.integers(0, 200), st.integers(1, 9)), min_size=1, max_size=9))
    return [start + number for start, length in rows for number in range(length)][:BLOCKS]


def wanted(places: list[int], nbytes: int) -> list[tuple[int, int, int]]:
    """Block by block: one that lies behind the one before it goes with that."""
    rows: list[tuple[int, int, int]] = []
    for number, place in enumerate(places):
        if number and place == places[number - 1] + 1:
            gpu, host, size = rows[-1]
            rows[-1] = gpu, host, size + nbytes
        else:
            rows.append((SLOT + number * nbytes, POOL + place * nbytes, nbytes))
    return rows


@given(places(), st.integers(1, 9))
def test_a_chunk_has_as_few_copies_as_its_places_allow(places: list[int], nbytes: int) -> None:
    batch = coalesce(np.array(places) * nbytes, nbytes, SLOT, POOL)
    assert batch.rows() == wanted(places, nbytes)
