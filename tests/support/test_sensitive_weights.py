"""The distance of two answers of a model, and the model's weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.sensitive_weights import TIE, answer_distance, shapes, write_weights

MODEL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
}


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


def test_a_checkpoint_is_written_once(tmp_path: Path) -> None:
    load_file = pytest.importorskip("safetensors.torch").load_file
    write_weights(tmp_path, MODEL)
    (file,) = tmp_path.iterdir()
    weights, written = load_file(file), file.stat().st_mtime_ns
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == shapes(MODEL)
    assert (weights["model.norm.weight"] == 1).all()
    queries, keys = (weights[f"model.layers.1.self_attn.{x}_proj.weight"].float() for x in "qk")
    assert 2.5 < queries.std() / keys.std() < 3.5
    write_weights(tmp_path, MODEL)
    assert file.stat().st_mtime_ns == written
