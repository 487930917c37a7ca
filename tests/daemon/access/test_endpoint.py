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


@pytest.mark.parametrize("linked", ["cpu", "."])
def test_a_link_is_no_folder_for_a_daemon(tmp_path: Path, linked: str) -> None:
    """Whoever made it has a daemon remove files, and open a folder, where it leads."""
    private, place = tmp_path / "private", tmp_path / "kvferry"
    (private / "cpu").mkdir(parents=True)
    for folder in (private, private / "cpu"):
        (folder / "kvferry.sock").touch()
    if linked == ".":
        place.symlink_to(private)
    else:
        place.mkdir()
        (place / "cpu").symlink_to(private)
    with pytest.raises(Refused, match="is a link") as refused:
        Endpoint(place / "cpu", Admission())
    assert refused.value.code == Code.BAD_CONFIG
    assert refused.value.value == str(place / linked)
    assert (private / "kvferry.sock").exists()
    assert (private / "cpu" / "kvferry.sock").exists()


def test_the_folder_above_is_not_open_to_all(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        endpoint = Endpoint(tmp_path / "kvferry" / "cpu", Admission())
    finally:
        os.umask(before)
    assert not (tmp_path / "kvferry").stat().st_mode & 0o022
    endpoint.close()
