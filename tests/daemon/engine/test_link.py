"""What is enqueued on a stream: the bytes that were asked for, and no copy across two chunks."""

from __future__ import annotations

import ctypes
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cuda.driver import Driver
from kvferry.daemon.core.layout import Fragments, Rows
from kvferry.daemon.engine.cuda import link
from kvferry.daemon.engine.cuda.link import FEW, Link, Ruler, Some
from kvferry.proto.specs import Direction

POOL, CHUNK, STREAM = 10_000, 100, 7
GPU = 1_000_000
SMALL = 500


class Copies:
    """A driver that notes copies: (to, from, bytes)."""

    def __init__(self) -> None:
        self.single: list[tuple[int, int, int]] = []
        self.batched: list[tuple[int, int, int]] = []

    def call(self, name: str, to: int, origin: int, nbytes: int, stream: int) -> None:
        assert (name, stream) == ("cuMemcpyAsync", STREAM)
        self.single.append((to, origin, nbytes))

    def optional(self, name: str) -> Any:
        return _Function(self)


class _Function:
    argtypes: Any = None

    def __init__(self, copies: Copies) -> None:
        self._copies = copies

    def __call__(self, *arguments: Any) -> int:
        *columns, count = arguments[:4]
        assert arguments[-1] == STREAM
        rows = [(ctypes.c_int64 * count).from_address(at) for at in columns]
        self._copies.batched += zip(*map(list, rows), strict=True)
        return 0


def enqueued(direction: Direction, fragments: Fragments | Rows) -> Copies:
    copies = Copies()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(link, "SMALL", SMALL)
        Link(cast(Driver, copies), POOL, CHUNK).enqueue(direction, fragments, STREAM)
    return copies


def pairs(rows: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
    return sorted((to + byte, origin + byte) for to, origin, n in rows for byte in range(n))


@st.composite
def fragments(draw: st.DrawFn) -> Rows:
    """Apart from each other on both sides."""
    sizes = draw(st.lists(st.integers(1, 260), min_size=1, max_size=2 * FEW))
    gaps = draw(st.lists(st.integers(0, 120), min_size=len(sizes), max_size=len(sizes)))
    rows, at = [], 0
    for size, gap in zip(sizes, gaps, strict=True):
        rows.append((GPU + at, POOL + at + gap, size))
        at += size + gap
    return draw(st.permutations(rows))


@given(fragments(), st.sampled_from(Direction), st.booleans())
def test_every_byte_is_copied_once_and_no_copy_leaves_its_chunk(
    rows: Rows, direction: Direction, arrays: bool
) -> None:
    columns = np.array(rows, dtype=np.int64).T
    copies = enqueued(direction, Fragments.of(*columns) if arrays else rows)
    few = len(rows) == 1 or (len(rows) <= FEW and sum(size for *_, size in rows) <= SMALL)
    assert bool(copies.single) == few
    assert bool(copies.batched) == (not few)
    got = copies.single + copies.batched
    store = direction is Direction.STORE
    wanted = [(host, gpu, n) if store else (gpu, host, n) for gpu, host, n in rows]
    assert pairs(got) == pairs(wanted)
    for to, origin, nbytes in got:
        first = (to if store else origin) - POOL
        assert first // CHUNK == (first + nbytes - 1) // CHUNK


@given(fragments(), st.sampled_from(Direction), st.data())
def test_any_fragments_in_a_row_of_those_made_ready_are_enqueued(
    rows: Rows, direction: Direction, data: st.DataObject
) -> None:
    columns = np.array(rows, dtype=np.int64).T
    first = data.draw(st.integers(0, len(rows) - 1))
    count = data.draw(st.integers(1, len(rows) - first))
    copies = Copies()
    ready = Link(cast(Driver, copies), POOL, CHUNK)
    ready.enqueue_listed(ready.listed(direction, Fragments.of(*columns)), STREAM, first, count)
    store = direction is Direction.STORE
    some = rows[first : first + count]
    assert pairs(copies.batched) == pairs(
        [(host, gpu, n) if store else (gpu, host, n) for gpu, host, n in some]
    )
    for to, origin, nbytes in copies.batched:
        begin = (to if store else origin) - POOL
        assert begin // CHUNK == (begin + nbytes - 1) // CHUNK


@given(fragments(), st.sampled_from(Direction))
def test_what_lies_in_one_chunk_each_need_not_be_cut(rows: Rows, direction: Direction) -> None:
    whole = Fragments.of(*np.array(rows, dtype=np.int64).T)
    first, last = (whole.host - POOL) // CHUNK, (whole.host + whole.size - 1 - POOL) // CHUNK
    whole = Fragments(np.ascontiguousarray(whole.table[:, first == last]))
    listed = []
    for told in (False, True):
        copies = Copies()
        ready = Link(cast(Driver, copies), POOL, CHUNK)
        if whole.size.size:
            ready.enqueue_listed(ready.listed(direction, whole, whole=told), STREAM)
        listed.append(copies.batched)
    assert listed[0] == listed[1]


@pytest.mark.parametrize("direction", Direction)
def test_scattered_blocks_need_only_be_told_where_they_are_on_the_gpu(direction: Direction) -> None:
    copies = Copies()
    whole = Link(cast(Driver, copies), POOL, CHUNK)
    scattered = whole.scattered(np.array([500, 0, 300, 700]), 50)
    assert scattered is not None
    whole.enqueue(direction, Some(scattered, 1, 2, GPU, Ruler(GPU, 100)), STREAM)
    pairs = [(GPU, POOL), (GPU + 50, POOL + 300)]
    if direction is Direction.STORE:
        pairs = [(host, gpu) for gpu, host in pairs]
    assert copies.batched == [(to, origin, 50) for to, origin in pairs]
    assert whole.scattered(np.array([500, 60]), 50) is None  # lies in two chunks


@given(
    st.integers(0, 500),
    st.lists(st.tuples(st.integers(0, 499), st.integers(1, 60)), min_size=1, max_size=20),
    st.integers(1, 3),
)
def test_what_stands_on_a_ruler_is_at_equal_distances(
    begin: int, asked: list[tuple[int, int]], kept: int
) -> None:
    ruler, nbytes = Ruler(begin, 500), 500
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(link, "KEPT", kept)
        for at, apart in asked * 2:
            wanted = [*range(begin + at, begin + nbytes, apart)]
            stands = ruler.mark(begin + at, apart)
            assert [*(ctypes.c_int64 * len(wanted)).from_address(stands)] == wanted
