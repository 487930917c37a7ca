"""Names that a reader can search for: one class for one class name."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = [
    path for part in ("proto", "client", "daemon", "tests") for path in (ROOT / part).rglob("*.py")
]


def classes(path: Path) -> list[str]:
    tree = ast.parse(path.read_text())
    return [node.name for node in tree.body if isinstance(node, ast.ClassDef)]


def test_a_class_name_has_one_class() -> None:
    places = defaultdict[str, list[str]](list)
    for path in SOURCES:
        for name in classes(path):
            if not name.startswith("_"):
                places[name].append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
