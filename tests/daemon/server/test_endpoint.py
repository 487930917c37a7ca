"""Who is admitted changes whole, or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvferry.daemon.server import endpoint as module
from kvferry.daemon.server.admission import Admission
from kvferry.daemon.server.endpoint import Endpoint
from kvferry.daemon.server.fence import fence
from kvferry.proto.errors import Code, Refused


@pytest.mark.parametrize("trouble", [OSError(), OverflowError(), Refused(Code.BAD_CONFIG, "no")])
def test_what_fails_half_way_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: Exception
) -> None:
    """The sockets come first, the folder last."""
    endpoint = Endpoint(tmp_path / "cpu", Admission())
    endpoint.messages.touch()
    endpoint.open()
    before = endpoint.messages.stat(), endpoint.directory.stat()

    def failing(path: Path, owner: int, admitted: int, admission: Admission) -> None:
        if path == endpoint.directory and admission.groups:
            raise trouble
        fence(path, owner, admitted, admission)

    monkeypatch.setattr(module, "fence", failing)
    with pytest.raises(type(trouble)):
        endpoint.admit([], [os.getegid()])
    after = endpoint.messages.stat(), endpoint.directory.stat()
    assert [about.st_mode for about in after] == [about.st_mode for about in before]
    assert not endpoint.admission.groups
    endpoint.close()
