"""What a client makes of a daemon's files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvferry.client import endpoint
from kvferry.proto.errors import Refused


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
