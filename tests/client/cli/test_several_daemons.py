"""Commands with several daemons in one runtime directory, as on a machine with several GPUs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvferry.client import LocalDaemon
from kvferry.client.cli import status
from support.command_line import kvferry

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[LocalDaemon]]]:
    """A directory with the sockets of two daemons."""
    parent = tmp_path_factory.mktemp("run")
    with ExitStack() as running:
        started = [running.enter_context(LocalDaemon(pool_bytes=16 << 20)) for _ in range(2)]
        for name, each in zip(("GPU-1", "GPU-2"), started, strict=True):
            (parent / name).symlink_to(each.directory)
        yield parent, started


def test_status_shows_and_checks_all(
    daemons: tuple[Path, list[LocalDaemon]], capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent, started = daemons
    pids = [each.pid for each in started]
    assert kvferry("status", "-d", str(parent)) == 0
    output = capsys.readouterr().out
    assert [f"pid {pid}" in output for pid in pids] == [True, True]
    assert kvferry("status", "-d", str(parent), "--json") == 0
    assert [each["pid"] for each in json.loads(capsys.readouterr().out)] == pids
    assert kvferry("status", "-d", str(parent / "GPU-2"), "--json") == 0
    assert json.loads(capsys.readouterr().out)["pid"] == pids[1]
    monkeypatch.setattr(status, "summarize_health", lambda report: (report.pid == pids[0], "why"))
    assert kvferry("status", "-d", str(parent), "--check") == 1
    assert [line.rpartition(": ")[2] for line in capsys.readouterr().out.splitlines()] == [
        "why"
    ] * 2


def test_one_must_be_named_where_something_is_changed(
    daemons: tuple[Path, list[LocalDaemon]], capsys: Captured
) -> None:
    parent, _ = daemons
    assert kvferry("release", "llama", "-d", str(parent)) == 1
    error = capsys.readouterr().err
    assert "[several_daemons] 2 daemons run; name the directory of one" in error
    assert str(parent / "GPU-1") in error


def test_shells_can_complete_the_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr("shellingham.detect_shell", lambda: ("bash", "/bin/bash"))
    assert kvferry("--show-completion") == 0
    assert "kvferry" in capsys.readouterr().out
