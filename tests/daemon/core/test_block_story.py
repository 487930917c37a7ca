"""The last transitions of blocks, and transitions that must not happen."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.daemon.core.block_story import BlockStory, IllegalTransition
from kvferry.daemon.core.block_table import COMMITTED, PENDING, BlockTable
from kvferry.proto.layout import Int64s

STATES_NAMED = "free", "pending", "stored"


def blocks(*numbers: int) -> Int64s:
    return np.array(numbers, np.int64)


def add(story: BlockStory, some: Int64s, before: int, after: int, cause: str) -> None:
    story.add(some, np.full(some.size, before, np.uint8), after, cause)


def test_a_story_names_states_and_causes() -> None:
    story = BlockStory(STATES_NAMED)
    add(story, blocks(1, 2), 0, 1, "reserved")
    add(story, blocks(2), 1, 2, "completed")
    story.add_for_all("new epoch")
    add(story, blocks(1), 1, 0, "store failed")
    assert story.of(2) == "free > pending (reserved) > stored (completed) > new epoch"
    assert story.of(1) == "free > pending (reserved) > new epoch > free (store failed)"


def test_only_the_last_transitions_are_kept() -> None:
    story = BlockStory(STATES_NAMED, kept=4)
    add(story, blocks(7), 0, 1, "first")
    add(story, blocks(1, 2, 3), 0, 1, "second")
    assert story.of(7) == "free > pending (first)"
    add(story, blocks(*range(10, 20)), 0, 1, "third")
    assert [story.of(block) for block in (7, 15, 19)] == [
        "nothing is known",
        "nothing is known",
        "free > pending (third)",
    ]


def test_a_transition_that_must_not_happen_tells_the_story() -> None:
    table = BlockTable(8)
    table.set_pending(blocks(3, 4))
    table.set_stored(blocks(4))
    with pytest.raises(IllegalTransition) as raised:
        table._move(blocks(4, 3), COMMITTED, "checksum")
    assert str(raised.value) == (
        "host block 3 is pending, and cannot become committed; its story: free > pending (reserved)"
    )
    assert table.among(blocks(3), PENDING).all()
