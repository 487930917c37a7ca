"""NAMES.md lists the private names of vLLM that the connector uses, and no others."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import kvferry.client.vllm

FOLDER = Path(kvferry.client.vllm.__path__[0])
PAGE = (FOLDER / "NAMES.md").read_text()


def private_names() -> Iterator[str]:
    """Attributes of other objects than `self`, and those that a subclass of vLLM's worker uses."""
    for file in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Attribute) or not re.fullmatch("_[a-z][a-z_]*", node.attr):
                continue
            if not isinstance(node.value, ast.Name) or node.value.id not in ("self", "cls"):
                yield node.attr


def test_each_private_name_of_vllm_is_on_the_page() -> None:
    named = {*re.findall(r"`(?:\w+\.)?(_[a-z_]+)`", PAGE)}
    inherited = {"_load_jobs", "_connector_worker_meta", "_init_worker"}
    assert {*private_names()} | inherited == named


def test_each_file_on_the_page_exists_and_has_the_name() -> None:
    for row in re.findall(r"(?m)^\| `.*$", PAGE):
        name = re.findall(r"`(?:\w+\.)*(\w+)`", row)[0]
        for file in re.findall(r"\]\((\w+\.py)\)", row):
            assert name in (FOLDER / file).read_text(), row
