"""Copies on a stream: every byte of a batch once, and no copy across two chunks."""

from __future__ import annotations

import ctypes
from typing import Any, TypeAlias, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cuda.driver import Driver
from kvferry.daemon.core.layout import CopyBatch
from kvferry.daemon.engine.cuda.dma import FEW, Dma
from kvferry.proto.specs import Direction

POOL, CHUNK, STREAM = 10_000, 100, 7
GPU = 1_000_000
SMALL = 500
Rows: TypeAlias = list[tuple[int, int, int]]


class DmaFixture:
    """A driver that records copies: (to, from, bytes)."""

    def __init__(self) -> None:
        self.single: Rows = []
        self.batched: Rows = []

    def call(self, name: str, to: int, origin: int, nbytes: int, stream: int) -> None:
        assert (name, stream) == ("cuMemcpyAsync", STREAM)
        self.single.append((to, origin, nbytes))

    def optional(self, name: str) -> Any:
        return _Function(self)


class _Function:
    argtypes: Any = None

    def __init__(self, copies: DmaFixture) -> None:
        self._copies = copies

    def __call__(self, *arguments: Any) -> int:
        *columns, count = arguments[:4]
        assert arguments[-1] == STREAM
        rows = [(ctypes.c_int64 * count).from_address(at) for at in columns]
        self._copies.batched += zip(*map(list, rows), strict=True)
        return 0


def enqueue_batch(direction: Direction, rows: Rows, **options: bool) -> DmaFixture:
    copies, batch = DmaFixture(), CopyBatch(np.ascontiguousarray(np.array(rows, dtype=np.int64).T))
    dma = Dma(cast(Driver, copies), POOL, CHUNK, small=SMALL)
    dma.enqueue(direction, batch, STREAM, **options)
    return copies


def pairs(rows: Rows) -> list[tuple[int, int]]:
    return sorted((to + byte, origin + byte) for to, origin, n in rows for byte in range(n))


def expected(direction: Direction, rows: Rows) -> Rows:
    store = direction is Direction.STORE
    return [(host, gpu, n) if store else (gpu, host, n) for gpu, host, n in rows]


@st.composite
def batches(draw: st.DrawFn) -> Rows:
    """Rows that do not overlap, neither on the GPU nor on the host."""
    sizes = draw(st.lists(st.integers(1, 260), min_size=1, max_size=2 * FEW))
    gaps = draw(st.lists(st.integers(0, 120), min_size=len(sizes), max_size=len(sizes)))
    rows, at = [], 0
    for size, gap in zip(sizes, gaps, strict=True):
        rows.append((GPU + at, POOL + at + gap, size))
        at += size + gap
    return draw(st.permutations(rows))


@given(batches(), st.sampled_from(Direction))
def test_every_byte_is_copied_once_and_no_copy_spans_chunks(
    rows: Rows, direction: Direction
) -> None:
    copies = enqueue_batch(direction, rows)
    few = len(rows) == 1 or (len(rows) <= FEW and sum(size for *_, size in rows) <= SMALL)
    assert bool(copies.single) == few
    assert bool(copies.batched) == (not few)
    enqueued = copies.single + copies.batched
    assert pairs(enqueued) == pairs(expected(direction, rows))
    for to, origin, nbytes in enqueued:
        first = (to if direction is Direction.STORE else origin) - POOL
        assert first // CHUNK == (first + nbytes - 1) // CHUNK


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("count", [2, FEW + 1])
def test_copies_within_a_chunk_are_not_split(direction: Direction, count: int) -> None:
    rows = [(GPU + CHUNK * n, POOL + CHUNK * n, CHUNK // 2) for n in range(count)]
    copies = enqueue_batch(direction, rows, whole=True)
    assert copies.single + copies.batched == expected(direction, rows)
