"""NAMES.md of an integration: the names of its engine that it depends on, in tables."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path


def page_of(folder: Path) -> str:
    return (folder / "NAMES.md").read_text()


def rows_of(folder: Path) -> list[str]:
    """The rows of the page's tables that begin with a name."""
    return re.findall(r"(?m)^\| `.*$", page_of(folder))


def nodes_of(folder: Path) -> Iterator[ast.AST]:
    """The syntax of all modules of the integration."""
    for file in sorted(folder.glob("*.py")):
        yield from ast.walk(ast.parse(file.read_text()))


def check_files(folder: Path) -> None:
    """Each file that a row names exists, and has the row's first name."""
    for row in rows_of(folder):
        name = re.findall(r"`(?:\w+\.)*(\w+)`", row)[0]
        for file in re.findall(r"\]\((\w+\.py)\)", row):
            assert name in (folder / file).read_text(), row
