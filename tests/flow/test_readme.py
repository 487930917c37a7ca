"""The README: its commands exist, its picture shows its table. No page has a dead link."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = [
    *ROOT.glob("*.md"),
    *(
        page
        for name in ("client", "daemon", "deploy", "tests")
        for page in ROOT.glob(f"{name}/*.md")
    ),
    *ROOT.glob("tests/*/README.md"),
]


def test_the_commands_to_try_are_run_before_anything_lands() -> None:
    commands = re.findall(r"(?m)^    (make \S+)", README)
    assert commands == ["make demo", "make test"]
    landing = (ROOT / ".ci" / "run").read_text().splitlines()
    makefile = (ROOT / "Makefile").read_text()
    for command in commands:
        assert f"step {command}" in landing
    for target in re.findall(r"make ([a-z-]+)", README):
        assert re.search(rf"(?m)^{target}:", makefile)


def test_the_picture_shows_the_speeds_of_the_table() -> None:
    """The command in CONTRIBUTING.md draws it again."""
    script = plot_results()
    picture = (ROOT / "tests" / "bench" / "results.svg").read_text()
    rows = script.rows_of(README)
    assert len(rows) == 9
    for row in rows:
        for speed in row.speeds:
            assert speed is None or f">{script.factor(speed)}</text>" in picture
    assert f">{script.TITLE}</text>" in picture


@pytest.mark.parametrize(
    ("cells", "factors"),
    [
        ("**72 ms** (71..78) | 103 ms | 468 ms (computed)", ["6.5x", "4.5x"]),
        ("**2,000 tokens/s** (1,900..2,100) | | 1,000", ["2.0x", None]),
        ("**500 ms** | | 1.5 s", ["3.0x", None]),
    ],
)
def test_the_speeds_of_a_row(cells: str, factors: list[str | None]) -> None:
    script = plot_results()
    page = f"| vLLM 0.33 | kvferry | own | none |\n|---|\n| a figure (of one) | {cells} |\n\n"
    (row,) = script.rows_of(page)
    assert row.label == "a figure"
    assert [speed and script.factor(speed) for speed in row.speeds] == factors


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", page.read_text()):
        file = (page.parent / target) if target else page
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file), f"{target}#{anchor}"


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub names them."""
    headings = re.findall(r"(?m)^#+ (.*)$", page.read_text())
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def plot_results() -> ModuleType:
    path = ROOT / "tests" / "bench" / "plot_results.py"
    spec = importlib.util.spec_from_file_location("plot_results", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
