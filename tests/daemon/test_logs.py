"""The format of log lines."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import pytest
import structlog

from kvferry.daemon.config import LogConfig
from kvferry.daemon.logs import start_logging, unfailing

NAMES = ["a\x1b[2Jb", "a \x1b]0;title\x07", "\x9b31mred", "\x7f", "a\u202eb", "a\u2028b", "a\nb"]


@pytest.fixture(autouse=True)
def reset_structlog() -> Iterator[None]:
    yield
    structlog.reset_defaults()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", ["text", "json"])
def test_control_characters_in_names_are_escaped(
    form: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A name of a client cannot control the terminal that shows the log."""
    start_logging(LogConfig(format=form))  # type: ignore[arg-type]
    structlog.get_logger().info("client connected", engine=name, client="scheduler")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.isprintable()
    if form == "json":
        assert json.loads(line)["engine"] == name
    else:
        assert f"engine={name!r}" in line
        assert "client=scheduler" in line


def test_printable_names_are_not_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    start_logging(LogConfig())
    structlog.get_logger().info("client connected", engine="müller-70b")
    assert "engine=müller-70b" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["text", "json"])
def test_an_unexpected_error_is_logged_with_its_location(
    form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    start_logging(LogConfig(format=form))  # type: ignore[arg-type]
    try:
        raise ZeroDivisionError("a mistake")
    except ZeroDivisionError as error:
        structlog.get_logger().error("failed", exc_info=error)
    line = capsys.readouterr().err
    shown = json.loads(line)["exception"] if form == "json" else line
    assert "in test_an_unexpected_error_is_logged_with_its_location" in shown
    assert "ZeroDivisionError: a mistake" in shown
    assert len(shown.splitlines()) < 10


def test_a_line_longer_than_the_pipe_buffer_does_not_block() -> None:
    reader, writer = os.pipe()
    with open(writer, "w") as pipe:
        log = unfailing(pipe)
        log.write("x" * (1 << 20) + "\n")
        log.write("and another\n")
    assert len(os.read(reader, 2 << 20)) <= 1 << 20
    os.close(reader)
