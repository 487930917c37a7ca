"""deploy/vllm.md: the messages that it explains exist, and all pages have one command."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvferry.client.vllm

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "deploy" / "vllm.md").read_text()
_, _, TABLE = PAGE.partition("| what you see |")
MESSAGES = [
    message
    for row in TABLE.splitlines()[2:]
    for message in re.findall(r"`(.+?)`", row.split("|")[1])
    if message != "kvferry status"
]


def texts(file: Path) -> Iterator[str]:
    """The strings of a module, without what f-strings insert."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@pytest.fixture(scope="module")
def said() -> str:
    """All that the client can say."""
    packages = ROOT / "client" / "kvferry" / "client", ROOT / "proto" / "kvferry" / "proto"
    files = (file for package in packages for file in package.rglob("*.py"))
    return "\n".join(text for file in files for text in texts(file))


def test_messages_are_listed() -> None:
    assert len(MESSAGES) > 8


@pytest.mark.parametrize("message", MESSAGES)
def test_a_listed_message_exists(message: str, said: str) -> None:
    """Where it differs from case to case, the page has "..."."""
    for part in message.strip("[]").split("..."):
        assert part in said


def test_every_page_has_the_same_command() -> None:
    pages = PAGE, (ROOT / "README.md").read_text(), kvferry.client.vllm.__doc__ or ""
    command = r"(PYTHONHASHSEED=0 vllm serve MODEL --kv-transfer-config) '(.*?)'"
    found = [re.findall(command, page, re.S) for page in pages]
    assert [len(commands) for commands in found] == [1, 1, 1]
    assert len({(start, str(json.loads(given))) for ((start, given),) in found}) == 1
