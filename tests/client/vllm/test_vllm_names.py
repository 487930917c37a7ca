"""NAMES.md lists the private names of vLLM that the connector uses, and no others."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import kvferry.client.vllm
from support.names_pages import check_files, nodes_of, page_of

FOLDER = Path(kvferry.client.vllm.__path__[0])


def private_names() -> Iterator[str]:
    """Attributes of other objects than `self`, and those that a subclass of vLLM's worker uses."""
    for node in nodes_of(FOLDER):
        if not isinstance(node, ast.Attribute) or not re.fullmatch("_[a-z][a-z_]*", node.attr):
            continue
        if not isinstance(node.value, ast.Name) or node.value.id not in ("self", "cls"):
            yield node.attr


def test_each_private_name_of_vllm_is_on_the_page() -> None:
    named = {*re.findall(r"`(?:\w+\.)?(_[a-z_]+)`", page_of(FOLDER))}
    inherited = {"_load_jobs", "_connector_worker_meta", "_init_worker"}
    assert {*private_names()} | inherited == named


def test_each_file_on_the_page_exists_and_has_the_name() -> None:
    check_files(FOLDER)
