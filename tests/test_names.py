"""Names that a reader can search for: no private language, one class for one class name."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = [
    path for part in ("proto", "client", "daemon", "tests") for path in (ROOT / part).rglob("*.py")
]
# Words that no module or class is named by: what they meant here, a reader cannot guess.
BANNED = frozenset(
    [
        "berth",
        "beat",
        "bell",
        "books",
        "bulletin",
        "cargo",
        "collect",
        "condemned",
        "courtesy",
        "crossing",
        "crew",
        "deed",
        "deposit",
        "desk",
        "door",
        "drain",
        "flight",
        "ground",
        "harbour",
        "helm",
        "holdings",
        "house",
        "inbox",
        "intake",
        "journal",
        "keeper",
        "lane",
        "landed",
        "listen",
        "naps",
        "news",
        "nobody",
        "paper",
        "patience",
        "pier",
        "quay",
        "returns",
        "rounds",
        "rubble",
        "shelf",
        "sparingly",
        "standing",
        "stretches",
        "tally",
        "tenancy",
        "track",
        "tray",
        "trays",
        "turns",
        "visit",
        "vitals",
        "words",
        "world",
    ]
)


def words_of(name: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def classes(path: Path) -> list[str]:
    tree = ast.parse(path.read_text())
    return [node.name for node in tree.body if isinstance(node, ast.ClassDef)]


def test_no_module_or_class_has_a_name_of_a_private_language() -> None:
    named = {
        str(path.relative_to(ROOT)): BANNED & {w for name in names for w in words_of(name)}
        for path in SOURCES
        for names in ([path.stem, *classes(path)],)
    }
    assert {path: words for path, words in named.items() if words} == {}


def test_a_class_name_has_one_class() -> None:
    places = defaultdict[str, list[str]](list)
    for path in SOURCES:
        for name in classes(path):
            if not name.startswith("_"):
                places[name].append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
