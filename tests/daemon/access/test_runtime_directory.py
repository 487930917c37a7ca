"""The runtime directory: its permissions, and files that a daemon finds and removes."""

from __future__ import annotations

import os
import shutil
from contextlib import closing
from pathlib import Path

import pytest

from kvferry.daemon.access import runtime_directory as module
from kvferry.daemon.access.admission import Admission
from kvferry.daemon.access.runtime_directory import Endpoint, closed_path
from kvferry.proto.errors import Code, Refused


@pytest.mark.parametrize("error", [OSError(), OverflowError(), Refused(Code.BAD_CONFIG, "no")])
def test_a_group_gets_either_all_files_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The sockets change first and the directory last."""
    endpoint = Endpoint(tmp_path / "cpu", Admission())
    endpoint.messages.touch()
    endpoint.apply_access()
    before = endpoint.messages.stat(), endpoint.directory.stat()
    set_access = module._set_access

    def fail_for_directory(path: Path, owner: int, members: int, gid: int | None) -> None:
        if path == endpoint.directory and gid is not None:
            raise error
        set_access(path, owner, members, gid)

    monkeypatch.setattr(module, "_set_access", fail_for_directory)
    with pytest.raises(type(error)):
        endpoint.change_group(str(os.getegid()))
    after = endpoint.messages.stat(), endpoint.directory.stat()
    assert [stat.st_mode for stat in after] == [stat.st_mode for stat in before]
    assert endpoint.admission.gid is None
    endpoint.close()


@pytest.mark.parametrize("linked", ["cpu", "."])
def test_a_symbolic_link_is_refused_as_a_directory(tmp_path: Path, linked: str) -> None:
    """With a link, another user could make the daemon remove files in its target and open it."""
    private, runtime_dir = tmp_path / "private", tmp_path / "kvferry"
    (private / "cpu").mkdir(parents=True)
    for folder in (private, private / "cpu"):
        (folder / "kvferry.sock").touch()
    if linked == ".":
        runtime_dir.symlink_to(private)
    else:
        runtime_dir.mkdir()
        (runtime_dir / "cpu").symlink_to(private)
    with pytest.raises(Refused, match="is a link") as refused:
        Endpoint(runtime_dir / "cpu", Admission())
    assert refused.value.code == Code.BAD_CONFIG
    assert refused.value.value == str(runtime_dir / linked)
    assert (private / "kvferry.sock").exists()
    assert (private / "cpu" / "kvferry.sock").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives directories to other users")
@pytest.mark.parametrize("owned", ["cpu", "."])
def test_a_directory_of_another_user_is_refused(tmp_path: Path, owned: str) -> None:
    runtime_dir = tmp_path / "kvferry"
    (runtime_dir / "cpu").mkdir(parents=True)
    os.chown(runtime_dir / owned, 61002, 61012)
    with pytest.raises(Refused, match="belongs to user 61002") as refused:
        Endpoint(runtime_dir / "cpu", Admission())
    assert refused.value.value == str(runtime_dir / owned)
    assert not list((runtime_dir / "cpu").iterdir())


def test_the_parent_directory_is_not_writable_for_others(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        endpoint = Endpoint(tmp_path / "kvferry" / "cpu", Admission())
    finally:
        os.umask(before)
    assert not (tmp_path / "kvferry").stat().st_mode & 0o022
    endpoint.close()


@pytest.fixture
def endpoint(tmp_path: Path) -> Endpoint:
    """An endpoint with its sockets."""
    endpoint = Endpoint(tmp_path / "cpu", Admission())
    for path in (endpoint.messages, endpoint.descriptors, endpoint.events):
        path.touch()
    endpoint.apply_access()
    return endpoint


def test_a_group_is_given_the_socket_of_a_closed_accept_gate(endpoint: Endpoint) -> None:
    """The gate renames it if descriptors run out."""
    assert {path.stat().st_mode & 0o777 for path in endpoint.directory.iterdir()} == {0o600}
    shut = endpoint.messages.rename(closed_path(endpoint.messages))
    endpoint.change_group(str(os.getegid()))
    assert (shut.stat().st_mode & 0o777, shut.stat().st_gid) == (0o660, os.getegid())
    assert endpoint.directory.stat().st_mode & 0o777 == 0o750
    endpoint.close()


def test_a_group_that_does_not_exist_is_refused(endpoint: Endpoint) -> None:
    with pytest.raises(Refused, match="unknown group 'no-such-group'") as refused:
        endpoint.change_group("no-such-group")
    assert refused.value.code == Code.BAD_CONFIG
    endpoint.close()


def test_a_stopping_daemon_removes_no_socket_of_another_daemon(
    endpoint: Endpoint,
) -> None:
    """An operator has removed the directory and started another daemon there."""
    shutil.rmtree(endpoint.directory)
    with closing(Endpoint(endpoint.directory, Admission())) as other:
        other.messages.touch()
        endpoint.close()
        assert other.messages.exists()


def test_a_socket_that_was_replaced_is_not_removed(endpoint: Endpoint) -> None:
    other = endpoint.events.with_name("other")
    other.touch()
    other.rename(endpoint.events)
    endpoint.close()
    assert [path.name for path in endpoint.directory.glob("*.sock")] == ["events.sock"]


def test_missing_files_of_the_directory_are_reported(endpoint: Endpoint) -> None:
    assert endpoint.find_problem() is None
    endpoint.messages.rename(endpoint.messages.with_suffix(".full"))  # the accept gate is closed
    assert endpoint.find_problem() is None
    endpoint.messages.with_suffix(".full").unlink()
    assert f"socket {endpoint.messages} was removed" in str(endpoint.find_problem())
    shutil.rmtree(endpoint.directory)
    assert "was removed" in str(endpoint.find_problem())
    endpoint.directory.mkdir()
    (endpoint.directory / "lock").touch()
    assert "was replaced" in str(endpoint.find_problem())
    endpoint.close()
