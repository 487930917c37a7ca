"""The limits of CONTRIBUTING.md for files, classes and constructors.

The tables below list each place that is larger, with its size. No place may grow. If a place
shrinks, change its entry.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILE_LINES, CLASS_LINES, CONSTRUCTOR_PARAMETERS = 400, 300, 6

# Lists of one kind of thing, which are looked up rather than read from start to end.
LISTS = {
    "proto/kvferry/proto/messages.py": 461,
    "proto/kvferry/proto/status.py": 428,
}
# The engine's interfaces: as many methods as vLLM calls, and their documentation.
INTERFACES = {
    "client/kvferry/client/manager.py": 436,
    "client/kvferry/client/manager.py OffloadingManager": 371,
    "client/kvferry/client/nonblocking.py NonBlockingClient.__init__": 7,
    "client/kvferry/client/vllm/scheduler_side.py": 415,
    "client/kvferry/client/vllm/scheduler_side.py SchedulerSide": 312,
}
# To divide.
LARGE = {
    "daemon/kvferry/daemon/core/core.py Core": 305,
    "daemon/kvferry/daemon/core/namespaces.py Namespaces": 317,
    "tests/gpu/sglang_figures.py": 492,
    "tests/gpu/vllm_scenarios.py": 545,
    "tests/support/namespaces_fixture.py NamespacesFixture.__init__": 9,
    "tests/support/sglang_tree.py TreeServer.__init__": 9,
    "tests/support/sibling_cores.py SiblingCore": 318,
    "tests/support/vllm_process.py VLLM.__init__": 7,
}


def oversized(path: Path) -> Iterator[tuple[str, int]]:
    text, name = path.read_text(), str(path.relative_to(ROOT))
    if (lines := text.count("\n")) > FILE_LINES:
        yield name, lines
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            if (lines := (node.end_lineno or 0) - node.lineno + 1) > CLASS_LINES:
                yield f"{name} {node.name}", lines
            for part in node.body:
                if isinstance(part, ast.FunctionDef) and part.name == "__init__":
                    every = part.args.posonlyargs + part.args.args + part.args.kwonlyargs
                    if len(every) - 1 > CONSTRUCTOR_PARAMETERS:
                        yield f"{name} {node.name}.__init__", len(every) - 1


def test_files_classes_and_constructors_are_small() -> None:
    parts = "proto", "client", "daemon", "tests"
    paths = (path for part in parts for path in sorted((ROOT / part).rglob("*.py")))
    assert dict(found for path in paths for found in oversized(path)) == LISTS | INTERFACES | LARGE
