"""Direct copies: whatever is made ready before its turn, each piece has its own fragments."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cuda.driver import Driver
from kvferry.daemon.core.layout import BlockLayout, Extent, Fragments
from kvferry.daemon.engine.base import Mapping
from kvferry.daemon.engine.cuda import direct
from kvferry.daemon.engine.cuda.direct import DirectCopy
from kvferry.daemon.engine.cuda.link import Link
from kvferry.daemon.engine.cuda.stretches import KEPT
from kvferry.proto.layout import LayoutArrays
from kvferry.proto.specs import Direction, KVLayout, TensorLayout, TensorRef

PAGE, BLOCKS, POOL, STREAM = 512, 40, 1 << 20, 3
CHUNK = 1 << 20


class Notes:
    """A link that is given rows, or some of what it made ready; and a driver without a device."""

    def __init__(self) -> None:
        self.made = 0
        self.copies: list[tuple[int, int, int]] = []

    def create_stream(self, *, urgent: bool) -> int:
        return STREAM

    def record(self, stream: int) -> object:
        return object()

    def enqueue(self, direction: Direction, rows: list[tuple[int, int, int]], stream: int) -> None:
        self.copies += rows

    def whole(self, geometry: BlockLayout) -> bool:
        return geometry.whole(CHUNK)

    def listed(self, direction: Direction, fragments: Fragments, *, whole: bool) -> Fragments:
        self.made += 1
        return fragments

    def enqueue_listed(self, listed: Fragments, stream: int, first: int, count: int) -> None:
        self.copies += listed.rows()[first : first + count]

    def copy(self) -> DirectCopy:
        return DirectCopy(cast(Driver, self), cast(Link, self))


def mapped(tensors: int) -> Mapping:
    layout = KVLayout(
        (TensorLayout(BLOCKS, PAGE, PAGE),) * tensors,
        (tuple(TensorRef(number, PAGE) for number in range(tensors)),),
    )
    return Mapping(
        BlockLayout(LayoutArrays.from_layout(layout), 0, BLOCKS), np.arange(1, tensors + 1) << 32
    )


@st.composite
def runs(draw: st.DrawFn) -> tuple[Extent, list[int]]:
    """A run, and where it is cut into pieces."""
    size = draw(st.integers(1, BLOCKS))
    blocks, hosts = (draw(st.permutations(range(BLOCKS)))[:size] for _ in range(2))
    cuts = draw(st.sets(st.integers(1, BLOCKS - 1)))
    return (
        Extent(0, np.array(blocks), np.array(hosts) * PAGE),
        [0, *sorted(cut for cut in cuts if cut < size), size],
    )


@given(
    st.lists(runs(), min_size=1, max_size=KEPT + 2),
    st.sampled_from([1, 3, 20]),
    st.sampled_from([1, 16, 64]),
)
def test_each_piece_has_its_own_fragments_whatever_comes_between(
    cut: list[tuple[Extent, list[int]]], tensors: int, stretch: int
) -> None:
    mapping, notes = mapped(tensors), Notes()
    copy = notes.copy()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct, "STRETCH", stretch)
        for number in range(BLOCKS):
            for run, cuts in cut:
                if number + 1 < len(cuts):
                    piece = run.cut(*cuts[number : number + 2])
                    copy.enqueue(Direction.STORE, mapping, piece, POOL)
                    assert notes.copies == mapping.geometry.rows(piece, mapping.bases, POOL)
                    notes.copies.clear()


def test_of_a_run_only_the_last_stretch_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where pieces lie across the ends of stretches: or other runs would find no room."""
    monkeypatch.setattr(direct, "STRETCH", 16)
    mapping, notes = mapped(1), Notes()
    copy = notes.copy()
    run = Extent(0, np.arange(BLOCKS), np.arange(BLOCKS) * PAGE)
    for begin in range(0, BLOCKS - 10, 10):
        copy.enqueue(Direction.STORE, mapping, run.cut(begin, begin + 10), POOL)
        assert len(copy._stretches._kept) <= 1


@pytest.mark.parametrize(("stretch", "made"), [(BLOCKS, 1), (BLOCKS // 2, 2), (1, 4)])
def test_what_was_made_ready_serves_the_pieces_to_come(
    stretch: int, made: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "STRETCH", stretch)
    mapping, notes = mapped(1), Notes()
    copy = notes.copy()
    run = Extent(0, np.arange(BLOCKS), np.arange(BLOCKS) * PAGE)
    rest, pieces = run, 4
    for _ in range(pieces):
        (piece, others) = mapping.geometry.split((rest,), BLOCKS // pieces * PAGE, BLOCKS)
        rest = others[0] if others else rest
        copy.enqueue(Direction.LOAD, mapping, piece, POOL)
    assert notes.copies == mapping.geometry.rows(run, mapping.bases, POOL)
    assert notes.made == made
