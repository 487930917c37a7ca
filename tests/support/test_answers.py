"""The distance of two answers of a model."""

from __future__ import annotations

from typing import Any

import pytest

from support.answers import TIE, answer_distance


def answer(*steps: tuple[int, dict[int, float]]) -> dict[str, Any]:
    """An answer as decoded from JSON."""
    top = [[[token, value] for token, value in likely.items()] for _, likely in steps]
    return {"tokens": [token for token, _ in steps], "top": top}


FIRST = 7, {7: -1.0, 8: -2.0, 9: -3.0}
SECOND = 5, {5: -1.0, 6: -1.1, 4: -3.0}


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (answer(FIRST, SECOND), True),
        (answer((7, {7: -1.1, 8: -1.9, 3: -3.0}), SECOND), True),  # rounding
        (answer((7, {7: -1.0 - 2 * TIE, 8: -2.0, 9: -3.0}), SECOND), False),
        (answer(FIRST, (6, {6: -1.05, 5: -1.06, 4: -3.0})), True),  # within TIE
        (answer(FIRST, (4, {4: -2.9, 5: -1.0, 6: -1.1})), False),
        (answer(FIRST, (3, {3: -1.0, 2: -1.1, 1: -3.0})), False),
        (answer(FIRST, (5, {5: float("nan"), 6: float("nan")})), False),
        (answer(FIRST), False),
    ],
)
def test_answers_that_agree(other: dict[str, Any], same: bool) -> None:
    assert (answer_distance(answer(FIRST, SECOND), other) <= TIE) is same
    assert (answer_distance(other, answer(FIRST, SECOND)) <= TIE) is same


def test_tokens_after_a_tie_are_not_compared() -> None:
    tie = 6, {6: -1.05, 5: -1.06, 4: -3.0}
    after_second, after_tie = (9, {9: -1.0, 1: -2.0}), (2, {2: -1.0, 3: -2.0})
    first, other = answer(FIRST, SECOND, after_second), answer(FIRST, tie, after_tie)
    assert answer_distance(first, other) <= TIE
