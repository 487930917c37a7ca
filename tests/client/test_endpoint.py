"""What a client makes of a daemon's files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvferry.client import endpoint
from kvferry.proto.errors import Gone, Refused


@pytest.mark.parametrize("answers", [[True], [False, True], [False, False]])
def test_files_that_come_and_go_shut_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: list[bool]
) -> None:
    """os.access says no as well where there was no file a moment ago."""
    (tmp_path / "kvferry.sock").touch()
    closed = answers == [False, False]
    monkeypatch.setattr(os, "access", lambda *_, **__: answers.pop(0))
    if closed:
        with pytest.raises(Refused, match="do not let your user in"):
            endpoint.check_open(tmp_path)
    else:
        endpoint.check_open(tmp_path)


@pytest.mark.parametrize(
    ("device", "closed", "error"),
    [
        (None, "GPU-1", Refused),
        ("GPU-1", "GPU-1", Refused),
        ("GPU-1", "", Refused),  # whatever is in it
        ("GPU-1", "GPU-2", Gone),
        (None, "nowhere", Gone),  # closed above: nobody knows whether it is there
    ],
)
def test_a_folder_that_is_closed_is_no_daemon_that_is_gone(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: str | None,
    closed: str,
    error: type[Exception],
) -> None:
    for name in ("GPU-1", "GPU-2"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(endpoint, "runtime_directories", lambda: [tmp_path])
    monkeypatch.setattr(endpoint, "look_for", lambda places: ([], [tmp_path / closed]))
    with pytest.raises(error):
        endpoint.find_daemon(device)
