"""Runs the Python examples of client/README.md with a daemon on the CPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvferry.client import endpoint
from kvferry.testing.plugin import StartKvferryd

README = Path(__file__).parents[2] / "client" / "README.md"
TEXT = README.read_text()
EXAMPLES = re.findall(
    r"^## (.*?)$(?:(?!^## ).)*?^```python\n(.*?)^```\n\n```text\n(.*?)^```", TEXT, re.M | re.S
)


def test_every_example_is_followed_by_its_output() -> None:
    assert len(EXAMPLES) == TEXT.count("```python\n") == 6


@pytest.mark.parametrize(
    ("code", "output"), [example[1:] for example in EXAMPLES], ids=[title for title, *_ in EXAMPLES]
)
def test_an_example_prints_the_output_shown_below_it(
    code: str,
    output: str,
    start_kvferryd: StartKvferryd,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    daemon = start_kvferryd(pool_bytes=8 << 20)
    monkeypatch.setattr(endpoint, "runtime_directories", lambda: [daemon.runtime_dir])
    exec(compile(code, README.name, "exec"), {})
    assert capsys.readouterr().out == output
