"""Coalescing: each block has its address, and adjacent blocks are one copy."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvferry.daemon.engine.cuda.coalescing import coalesce

SLOT, POOL = 1 << 32, 10_000
BLOCKS = 60


@st.composite
def positions(draw: st.DrawFn) -> list[int]:
    """Positions of host blocks, some of them adjacent."""
    rows = draw(st.lists(st.tuples(st.integers(0, 200), st.integers(1, 9)), min_size=1, max_size=9))
    return [start + number for start, length in rows for number in range(length)][:BLOCKS]


def expected(positions: list[int], nbytes: int) -> list[tuple[int, int, int]]:
    """Block by block. A block behind the previous block extends its copy."""
    rows: list[tuple[int, int, int]] = []
    for number, position in enumerate(positions):
        if number and position == positions[number - 1] + 1:
            gpu, host, size = rows[-1]
            rows[-1] = gpu, host, size + nbytes
        else:
            rows.append((SLOT + number * nbytes, POOL + position * nbytes, nbytes))
    return rows


@given(positions(), st.integers(1, 9))
def test_a_chunk_has_as_few_copies_as_possible(positions: list[int], nbytes: int) -> None:
    batch = coalesce(np.array(positions) * nbytes, nbytes, SLOT, POOL)
    assert batch.rows() == expected(positions, nbytes)
