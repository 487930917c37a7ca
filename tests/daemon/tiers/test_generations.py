"""The generations of namespaces, and their file."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.daemon.tiers.generations import MAX_KEPT, NOT_KNOWN, Generations

A, B = "a" * 16, "b" * 16


def test_only_another_number_than_the_known_one_is_a_change() -> None:
    generations = Generations()
    assert not generations.is_noted(A)
    assert not generations.note(A, NOT_KNOWN)
    assert (generations.is_noted(A), generations.get(A)) == (True, NOT_KNOWN)
    assert not generations.note(A, 7)
    assert not generations.note(A, 7)
    assert not generations.note(A, NOT_KNOWN)
    assert generations.get(A) == 7
    assert generations.drops == 0
    assert generations.note(A, 5)
    assert (generations.get(A), generations.drops) == (5, 1)


def test_the_known_numbers_are_found_by_the_next_daemon(tmp_path: Path) -> None:
    generations = Generations(path := tmp_path / "state" / "generations")
    assert generations.take_unsaved() == {}
    generations.note(A, 7)
    generations.note(B, NOT_KNOWN)
    generations.save(generations.take_unsaved())
    assert generations.take_unsaved() == {}
    generations = Generations(path)
    assert (generations.get(A), generations.is_noted(B)) == (7, False)


def test_the_namespaces_that_were_noted_last_are_kept() -> None:
    generations = Generations()
    for number in range(MAX_KEPT):
        generations.note(str(number), 1)
    generations.note("0", 1)
    generations.note("new", 1)
    assert [generations.get(name) for name in ("0", "1", "2", "new")] == [1, NOT_KNOWN, 1, 1]
    assert len(generations.take_unsaved()) == MAX_KEPT


@pytest.mark.parametrize("text", ["", "[1]", '{"a": "b"}', "{", "\xff"])
def test_a_damaged_file_is_ignored(tmp_path: Path, text: str) -> None:
    path = tmp_path / "generations"
    path.write_text(text, encoding="latin-1")
    assert not Generations(path).is_noted("a")


def test_a_file_that_cannot_be_written_or_read_is_ignored(tmp_path: Path) -> None:
    (path := tmp_path / "generations").mkdir()
    generations = Generations(path)
    generations.note(A, 7)
    generations.save(generations.take_unsaved())
    assert generations.get(A) == 7
