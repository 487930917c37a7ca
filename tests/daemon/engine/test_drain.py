"""How much of a turn is on its way to the pool at once."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from kvferry.daemon.engine.cuda import drain
from kvferry.daemon.engine.cuda.drain import Drain
from kvferry.daemon.engine.cuda.link import Link
from kvferry.daemon.engine.cuda.piece import Piece, Stage
from kvferry.proto.libcuda import Driver
from kvferry.proto.specs import Direction

from .paper import PaperDriver

PIECES, BYTES = 6, 64


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
        stage = Stage(cast(Any, None), cast(Any, None), np.arange(1), packed)
        drained.add(Piece(Direction.STORE, BYTES, stage), gathered)
    rounds = 1
    while drained.go_on():
        rounds += 1
    assert rounds == most
    assert drained.waiting == PIECES - most
    assert not drained.go_on()
    drained.finish()
    assert drained.waiting == 0
