"""The runtime directory: who may enter it, and what a daemon finds and leaves there."""

from __future__ import annotations

import os
import shutil
from contextlib import closing
from pathlib import Path

import pytest

from kvferry.daemon.access import endpoint as module
from kvferry.daemon.access.admission import Admission
from kvferry.daemon.access.endpoint import Endpoint
from kvferry.proto.errors import Code, Refused


@pytest.mark.parametrize("trouble", [OSError(), OverflowError(), Refused(Code.BAD_CONFIG, "no")])
def test_a_group_that_cannot_have_all_files_gets_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: Exception
) -> None:
    """The sockets come first, the folder last."""
    endpoint = Endpoint(tmp_path / "cpu", Admission())
    endpoint.messages.touch()
    endpoint.apply_access()
    before = endpoint.messages.stat(), endpoint.directory.stat()
    give = module._set_access

    def failing(path: Path, owner: int, members: int, gid: int | None) -> None:
        if path == endpoint.directory and gid is not None:
            raise trouble
        give(path, owner, members, gid)

    monkeypatch.setattr(module, "_set_access", failing)
    with pytest.raises(type(trouble)):
        endpoint.change_group(str(os.getegid()))
    after = endpoint.messages.stat(), endpoint.directory.stat()
    assert [about.st_mode for about in after] == [about.st_mode for about in before]
    assert endpoint.admission.gid is None
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


@pytest.fixture
def bound(tmp_path: Path) -> Endpoint:
    """An endpoint whose sockets were bound."""
    endpoint = Endpoint(tmp_path / "cpu", Admission())
    for path in (endpoint.messages, endpoint.descriptors, endpoint.events):
        path.touch()
    endpoint.apply_access()
    return endpoint


def test_a_stopping_daemon_removes_no_socket_of_another(bound: Endpoint) -> None:
    """An operator removed the folder, and started another daemon there."""
    shutil.rmtree(bound.directory)
    with closing(Endpoint(bound.directory, Admission())) as other:
        other.messages.touch()
        bound.close()
        assert other.messages.exists()


def test_a_socket_that_is_not_its_own_stays(bound: Endpoint) -> None:
    other = bound.events.with_name("other")
    other.touch()
    other.rename(bound.events)
    bound.close()
    assert [path.name for path in bound.directory.glob("*.sock")] == ["events.sock"]


def test_missing_files_of_the_directory_are_reported(bound: Endpoint) -> None:
    assert bound.find_problem() is None
    bound.messages.rename(bound.messages.with_suffix(".full"))  # no more clients are accepted
    assert bound.find_problem() is None
    bound.messages.with_suffix(".full").unlink()
    assert f"socket {bound.messages} was removed" in str(bound.find_problem())
    shutil.rmtree(bound.directory)
    assert "was removed" in str(bound.find_problem())
    bound.directory.mkdir()
    (bound.directory / "lock").touch()
    assert "was replaced" in str(bound.find_problem())
    bound.close()
