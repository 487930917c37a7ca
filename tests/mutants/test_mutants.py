"""The script that runs mutants, with a product of one function; and the list of all mutants."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from mutants.__main__ import ROOT, find_stale, main
from mutants.catalog import MUTANTS
from mutants.source_mutant import SourceMutant
from support.time_limits import PROMPTLY

HALF = SourceMutant(
    "half of a number is rounded",
    "client/half.py",
    "number / 2",
    "number // 2",
    ("tests/test_half.py",),
)
EVEN = ("tests/test_half.py::test_of_an_even_number",)


def changed(name: str, **fields: object) -> SourceMutant:
    """Another mutant of the same function."""
    of_half = {"path": HALF.path, "old": HALF.old, "new": HALF.new, "tests": HALF.tests}
    return SourceMutant(name, **{**of_half, **fields})  # type: ignore[arg-type]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a product, and its tests. pytest starts there without plugins: faster."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    for folder in ("client", "tests", "client/__pycache__"):
        (tmp_path / folder).mkdir()
    (tmp_path / ".gitignore").write_text("__pycache__/\n")
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / HALF.path).write_text("def half(number):\n    return number / 2\n")
    (tmp_path / HALF.tests[0]).write_text(
        "from half import half\n"
        "def test_of_an_even_number():\n"
        "    assert half(4) == 2\n"
        "def test_of_an_odd_number():\n"
        "    assert half(3) == 1.5\n"
    )
    return tmp_path


def run(root: Path, *mutants: SourceMutant, options: tuple[str, ...] = ()) -> int:
    return main(("-j", "1", *options), mutants, root)


def test_a_mutant_that_a_test_notices_is_killed(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(root, HALF) == 0
    printed = capsys.readouterr().out
    assert "killed    half of a number is rounded" in printed
    assert "tests/test_half.py::test_of_an_odd_number" in printed
    assert "1 killed, 0 survived, 0 broken" in printed
    assert "number / 2" in (root / HALF.path).read_text()


def test_a_mutant_that_no_test_notices_is_reported(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also between others of its size that are written within the same second."""
    survivor = changed("an odd number is rounded", tests=EVEN)
    others = [changed(f"divided by {n}", new=f"number // {n}", tests=EVEN) for n in (3, 4)]
    assert run(root, others[0], survivor, others[1]) == 1
    printed = capsys.readouterr().out
    assert "survived: an odd number is rounded (client/half.py)" in printed
    assert "2 killed, 1 survived, 0 broken" in printed


def test_mutants_run_at_the_same_time(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p xdist")
    survivor = changed("an odd number is rounded", tests=EVEN)
    assert run(root, HALF, survivor, options=("-j", "2")) == 1
    assert "1 killed, 1 survived, 0 broken" in capsys.readouterr().out


def test_a_mutant_whose_tests_hang_is_killed_by_the_time_limit(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hanging = changed("a number has no half", new="half(number) if False else wait()", tests=EVEN)
    path = root / HALF.path
    path.write_text(path.read_text() + "def wait():\n    import time\n    time.sleep(1000)\n")
    monkeypatch.setattr("mutants.__main__.LIMIT", PROMPTLY / 4)
    assert run(root, hanging) == 0
    assert f"the time limit of {PROMPTLY / 4:g} s" in capsys.readouterr().out


def test_a_mutant_that_is_no_python_is_an_error(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(root, changed("no Python", new="number /")) == 2
    assert "SyntaxError" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("stale", "why"),
    [
        (changed("gone", old="number * 2"), "has its old text 0 times, not once"),
        (changed("twice", old="number"), "has its old text 2 times, not once"),
        (changed("moved", path="client/third.py"), "client/third.py does not exist"),
        (changed("untested", tests=("tests/test_third.py::test_it",)), "test_it does not exist"),
    ],
    ids=lambda value: value.name if isinstance(value, SourceMutant) else "",
)
def test_a_stale_mutant_is_an_error_that_names_it(
    root: Path, stale: SourceMutant, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(root, HALF, stale) == 2
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"stale mutant {stale.name!r}: ")
    assert line.endswith(why)


def test_tests_must_pass_without_a_mutant(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = root / HALF.tests[0]
    path.write_text(path.read_text() + "def test_that_fails():\n    assert half(1) == 1\n")
    assert run(root, HALF) == 2
    printed = capsys.readouterr().out
    assert "test_that_fails" in printed
    assert "the tests fail without a mutant" in printed


def test_mutants_are_selected_by_name_or_path(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    survivor = changed("an odd number is rounded", tests=EVEN)
    assert run(root, HALF, survivor, options=("half of",)) == 0
    assert "1 killed, 0 survived" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        run(root, HALF, options=("tiers",))


def test_all_mutants_match_the_source() -> None:
    """A change of the source may need one of its mutant, in tests/mutants."""
    assert find_stale(MUTANTS, ROOT) == []
    assert [
        name for name, times in Counter(each.name for each in MUTANTS).items() if times > 1
    ] == []
    assert len(MUTANTS) >= 100
