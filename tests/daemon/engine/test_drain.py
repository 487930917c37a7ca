"""How much of a turn is on its way to the pool at once."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from kvferry.cuda.driver import Driver
from kvferry.daemon.core.layout import Fragments
from kvferry.daemon.engine.cuda import drain
from kvferry.daemon.engine.cuda.drain import Drain
from kvferry.daemon.engine.cuda.link import Link
from kvferry.daemon.engine.cuda.piece import PageTable, Piece, Stage
from kvferry.proto.specs import Direction

from .paper import PaperDriver

PIECES, BYTES = 6, 64
TABLE = PageTable(0, 1, BYTES, 1, 1)


@pytest.mark.parametrize(
    ("ahead", "most"), [(1, 2), (BYTES, 2), (3 * BYTES, 3), (3 * BYTES + 1, 4), (1 << 30, PIECES)]
)
def test_the_link_has_as_much_as_keeps_it_busy_and_another_piece_behind_the_first(
    ahead: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However large pieces are."""
    monkeypatch.setattr(drain, "AHEAD", ahead)
    device = cast(Driver, paper := PaperDriver())
    monkeypatch.setattr(paper, "reached", lambda event: False)
    memory = np.zeros((2, PIECES, BYTES), dtype=np.uint8)
    pool, stream = memory[1].ctypes.data, device.create_stream()
    drained = Drain(device, Link(device, pool, memory.nbytes), stream)
    gathered = device.record(stream)
    for number in range(PIECES):
        packed = [(memory[0, number].ctypes.data, memory[1, number].ctypes.data, BYTES)]
        stage = Stage(cast(Any, None), TABLE, np.arange(1), packed)
        drained.add(Piece(Direction.STORE, BYTES, stage), gathered)
    rounds = 1
    while drained.go_on():
        rounds += 1
    assert rounds == most
    assert drained.waiting == PIECES - most
    assert not drained.go_on()
    drained.finish()
    assert drained.waiting == 0


MANY, PART = 7, 3


class Scene:
    """Two pieces of MANY fragments each, which go PART at a time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(drain, "PART", PART)
        monkeypatch.setattr(drain, "PART_BYTES", BYTES)
        monkeypatch.setattr(PaperDriver, "batch", self._batch)
        self.batches: list[int] = []
        self.refuses = False
        self.paper = PaperDriver()
        device = cast(Driver, self.paper)
        monkeypatch.setattr(self.paper, "reached", lambda event: False)
        self._memory = np.zeros((2, 2, MANY, BYTES), dtype=np.uint8)
        pool, stream = self._memory[1].ctypes.data, device.create_stream()
        self.drain = Drain(device, Link(device, pool, self._memory.nbytes), stream)
        self.pieces = [self._piece(number) for number in range(2)]
        for piece in self.pieces:
            self.drain.add(piece, device.record(stream))

    def _batch(self, *arguments: Any) -> int:
        self.batches.append(arguments[3])
        return int(self.refuses)

    def _piece(self, number: int) -> Piece:
        gpu, host = (self._memory[side, number].ctypes.data for side in (0, 1))
        apart = np.arange(MANY) * BYTES
        packed = Fragments.of(gpu + apart, host + apart, np.full(MANY, BYTES))
        stage = Stage(cast(Any, None), TABLE, np.arange(MANY), packed)
        return Piece(Direction.STORE, MANY * BYTES, stage)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def test_a_piece_goes_a_part_at_a_time(scene: Scene) -> None:
    drained, (first, second) = scene.drain, scene.pieces
    seen = list[tuple[int, bool, bool]]()
    for _ in range(6):
        assert drained.go_on() is (len(seen) < 5)
        seen.append((drained.waiting, first.done is not None, second.done is not None))
    assert scene.batches == [3, 3, 1, 3, 3, 1]
    assert seen == [
        (2, False, False),
        (2, False, False),
        (1, True, False),
        (1, True, False),
        (1, True, False),
        (0, True, True),
    ]


def test_the_link_is_not_dry_between_two_parts(scene: Scene) -> None:
    assert scene.drain.dry
    scene.drain.go_on()
    assert not scene.drain.dry
    scene.drain.finish()
    assert not scene.drain.dry
    assert sum(scene.batches) == 2 * MANY


def test_a_part_that_the_driver_refuses_ends_the_piece_and_those_behind_it(scene: Scene) -> None:
    scene.drain.go_on()
    scene.refuses = True
    assert not scene.drain.go_on()
    assert [piece.error is not None for piece in scene.pieces] == [True, True]
    assert scene.drain.waiting == 0
    scene.refuses = False
    device = cast(Driver, scene.paper)
    scene.drain.add(scene.pieces[0], device.record(device.create_stream()))
    scene.drain.finish()
    assert scene.batches == [3, 3, 3, 3, 1]
