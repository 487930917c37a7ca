"""What lines look like, whatever is in them."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import structlog

from kvferry.daemon.config import LogConfig
from kvferry.daemon.logs import start_logging

NAMES = ["a\x1b[2Jb", "a \x1b]0;title\x07", "\x9b31mred", "\x7f", "a\u202eb", "a\u2028b", "a\nb"]


@pytest.fixture(autouse=True)
def configured() -> Iterator[None]:
    yield
    structlog.reset_defaults()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", ["text", "json"])
def test_a_name_moves_no_cursor(form: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever shows the log to a terminal sees what a client calls itself, and nothing else."""
    start_logging(LogConfig(format=form))  # type: ignore[arg-type]
    structlog.get_logger().info("client came", engine=name, client="scheduler")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.isprintable()
    if form == "json":
        assert json.loads(line)["engine"] == name
    else:
        assert f"engine={name!r}" in line
        assert "client=scheduler" in line


def test_other_names_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    start_logging(LogConfig())
    structlog.get_logger().info("client came", engine="müller-70b")
    assert "engine=müller-70b" in capsys.readouterr().err
