"""The command line: help, usage errors, missing packages, and no running daemon."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import TypeAlias

import pytest

from kvferry.proto.version import kvferry_version
from support.command_line import kvferry

Captured: TypeAlias = pytest.CaptureFixture[str]


WORDS = {
    "": ("status", "bench", "--directory"),
    "status": ("--json",),
    "bench": ("--sizes",),
    **dict.fromkeys(("release", "doctor", "top", "tier", "tier clear"), ()),
}


@pytest.mark.parametrize("command", WORDS)
def test_help_shows_what_the_user_types(command: str, capsys: Captured) -> None:
    """No type beside a flag that takes no value, and no summary that is cut off."""
    assert kvferry(*command.split(), "--help") == 0
    output = capsys.readouterr().out
    assert all(word in output for word in WORDS[command])
    options = output.partition("Options:")[2]
    assert "--help" in options
    assert "<" not in options
    assert "..." not in options


def test_the_version_is_printed(capsys: Captured) -> None:
    assert kvferry("--version") == 0
    assert capsys.readouterr().out == f"kvferry {kvferry_version()}\n"


@pytest.mark.parametrize("command", ["status", "bench"])
def test_no_daemon(
    command: str, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kvferry(command, "--directory", tmp_path) == 1
    error = capsys.readouterr().err
    assert error.startswith("kvferry: ")
    assert error.count("\n") == 1
    assert str(tmp_path) in error
    directories = [tmp_path / "one", tmp_path / "two"]
    monkeypatch.setattr("kvferry.client.endpoint.runtime_directories", lambda: directories)
    assert kvferry("status") == 1
    error = capsys.readouterr().err
    assert all(str(directory) in error for directory in directories)


@pytest.mark.parametrize(
    "command", [("status",), ("doctor",), ("top",), ("bench",), ("release", "engine")]
)
def test_a_directory_without_its_flag_names_the_flag(
    command: tuple[str, ...], capsys: Captured
) -> None:
    assert kvferry(*command, "/run/kvferry/cpu") == 2
    message = "unexpected argument '/run/kvferry/cpu'; name a directory with --directory DIR"
    assert capsys.readouterr().err.splitlines()[-1] == f"Error: {message}"


@pytest.mark.parametrize(
    ("package", "command", "message"),
    [
        ("typer", ["status"], "pip install '.[cli]' in a checkout"),
        ("rich", ["status"], "pip install '.[cli]' in a checkout"),
        ("torch", ["bench"], "pip install '.[tensors]' in a checkout"),
        (
            "torch",
            ["bench"],
            "torch's CPU build (smaller by 5 GB), which is enough for --device cpu",
        ),
    ],
)
def test_a_missing_package_is_named(
    package: str,
    command: list[str],
    message: str,
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded = [name for name in sys.modules if name.startswith("kvferry.client.cli.")]
    for name in [*loaded, *(name for name in sys.modules if name.startswith(f"{package}."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    assert kvferry(*command) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error


@pytest.mark.parametrize(
    "options",
    [
        ("--sizes", "4KiB,many"),
        ("--what", "latency,much"),
        ("--json", "/proc/nowhere/file.json"),
        ("--json", "/proc/file.json"),
        ("--directory", "/tmp", "--device", "cpu"),
        ("--sizes", "0"),
    ],
)
def test_wrong_usage_is_reported_before_anything_runs(
    options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether files can be written is checked first, and leaves them unchanged."""
    bench = import_module("kvferry.client.cli.bench")
    monkeypatch.setattr(bench, "run_plan", lambda *_: pytest.fail("the bench ran"))
    data, new = tmp_path / "bench.json", tmp_path / "new.json"
    data.write_text("{}")
    for path in (data, new):
        assert kvferry("bench", "--json", path, *options) == 2
    assert data.read_text() == "{}"
    assert not new.exists()
