"""NAMES.md lists the names of SGLang that the linker uses, and no others.

A name is an import from SGLang, or an attribute of one of its objects. The linker has these in
variables that are named here.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

import kvferry.client.sglang
from kvferry.client.sglang.loads import Loads
from support.names_pages import check_files, nodes_of, page_of, rows_of

FOLDER = Path(kvferry.client.sglang.__path__[0])
VARIABLES = frozenset(
    {
        "params",
        "kvcache",
        "pool",
        "draft",
        "side",
        "req_to_token_pool",
        "mamba",
        "cache",
        "transfer",
    }
)
# Modules whose objects the linker gets, beside those that it imports.
MODULES = ("mem_cache.cache_init_params", "mem_cache.allocator.base")


def imported_names() -> Iterator[str]:
    for node in nodes_of(FOLDER):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang."):
            yield from [alias.name for alias in node.names]


def attributes() -> Iterator[str]:
    """The attributes of SGLang's objects, also those that are read by getattr."""
    for node in nodes_of(FOLDER):
        if isinstance(node, ast.Attribute) and root_of(node) in VARIABLES:
            yield node.attr
        match node:
            case ast.Call(ast.Name("getattr"), [of, ast.Constant(str(name)), *_]):
                if root_of(of) in VARIABLES:
                    yield name


def root_of(node: ast.AST) -> str:
    """The variable that an expression begins with: params, of params.tp_cache_group."""
    while isinstance(node, ast.Attribute | ast.Call):
        node = node.value if isinstance(node, ast.Attribute) else node.func
    return node.id if isinstance(node, ast.Name) else ""


def names_on_page() -> list[str]:
    """The names that the rows begin with, without the variable."""
    return [re.findall(r"`(?:\w+\.)?(\w+)`", row)[0] for row in rows_of(FOLDER)]


def modules_on_page() -> set[str]:
    return {*re.findall(r"(?m)^\| `\w+` \| `([\w.]+)`", page_of(FOLDER))}


def test_each_name_of_sglang_is_on_the_page() -> None:
    by_a_variable = {"mamba_ckpt_pool"}  # getattr in a loop
    used = {*imported_names(), *attributes()} | by_a_variable
    named = names_on_page()
    assert used == {*named}
    assert len(named) == len({*rows_of(FOLDER)})


def test_each_file_on_the_page_exists_and_has_the_name() -> None:
    check_files(FOLDER)


def test_each_module_on_the_page_is_imported_from() -> None:
    modules = {
        (node.module or "").removeprefix("sglang.srt.")
        for node in nodes_of(FOLDER)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang.")
    }
    assert modules == modules_on_page()


@pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed")
def test_the_counter_has_what_sglang_calls_and_reads() -> None:
    package = find_spec("sglang")
    assert package is not None
    assert package.origin is not None
    folder = Path(package.origin).parent / "srt"
    used: set[str] = set()
    for file in [*folder.glob("mem_cache/*.py"), *folder.glob("model_executor/runner/*.py")]:
        used |= {*re.findall(r"\b(?:layer_transfer_)?counter\.(\w+)", file.read_text())}
    read = {"num_layers", "consumer_index"}
    assert {"wait_until", *read} <= used <= {*dir(Loads), *read}


@pytest.mark.filterwarnings("ignore")  # SGLang's own
@pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed")
def test_sglang_has_each_name_on_the_page() -> None:
    modules = {*MODULES, *modules_on_page()}
    text = "\n".join(inspect.getsource(import_module(f"sglang.srt.{name}")) for name in modules)
    assert [name for name in names_on_page() if not re.search(rf"\b{name}\b", text)] == []
