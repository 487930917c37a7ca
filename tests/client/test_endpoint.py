"""What a client makes of a daemon's files."""

from __future__ import annotations

import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvferry.client import Code, Gone, LocalDaemon, OffloadClient, Refused, endpoint
from kvferry.proto import runtime_directory
from kvferry.testing.plugin import StartKvferryd


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


def daemon_in(folder: Path) -> Path:
    """A folder with what a daemon leaves there."""
    folder.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(folder / "kvferry.sock"))
    return folder


def test_a_folder_that_holds_only_a_daemon_s_stands_for_it(short_path: Path) -> None:
    assert endpoint.named(short_path) == short_path  # one may still come
    one = daemon_in(short_path / "cpu")
    (short_path / "empty").mkdir()
    assert endpoint.named(short_path) == one
    assert endpoint.named(one) == one
    daemon_in(short_path / "GPU-1")
    assert endpoint.named(one) == one
    with pytest.raises(Gone, match="several daemons run here") as several:
        endpoint.named(short_path)
    assert several.value.code == Code.DAEMON_GONE
    daemon_in(one / "below")
    assert endpoint.named(one) == one


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("file", "named by the folder of its sockets"),
        ("d" * 120, "name a shorter folder"),
        ("/".join(["d" * 200] * 30), "name a shorter folder"),
    ],
)
def test_where_no_daemon_can_ever_be(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "file").touch()
    began = time.monotonic()
    with pytest.raises(Refused, match=said) as refused:
        OffloadClient(tmp_path / name)
    assert refused.value.code == Code.BAD_CONFIG
    assert time.monotonic() - began < 2


@pytest.mark.parametrize(
    ("name", "said"), [("missing", "no such folder"), (".", r"no kvferry\.sock in this folder")]
)
def test_where_no_daemon_came_in_time(short_path: Path, name: str, said: str) -> None:
    with pytest.raises(Gone, match=f"no daemon answered in time: there is {said}") as gone:
        OffloadClient(short_path / name, timeout=0.2)
    assert (gone.value.code, gone.value.value) == (Code.TIMEOUT, str(short_path / name))


def test_a_daemon_that_comes_in_time(
    short_path: Path, start_kvferryd: StartKvferryd, kvferryd: LocalDaemon
) -> None:
    """The folder is made by the daemon; and a client is content with the folder above one's."""
    with ThreadPoolExecutor(1) as executor:
        waiting = executor.submit(OffloadClient, short_path / "later" / "cpu", timeout=30)
        later = start_kvferryd(runtime_dir=short_path / "later")
        with waiting.result() as client:
            assert client.daemon.pid == later.pid
    with OffloadClient(str(kvferryd.runtime_dir)) as client:
        assert client.directory == kvferryd.directory
        assert client.daemon.pid == kvferryd.pid


@pytest.mark.parametrize(
    "taken",
    [
        "link",
        pytest.param(
            "folder", marks=pytest.mark.skipif(os.geteuid() != 0, reason="gives folders away: root")
        ),
    ],
)
def test_a_folder_below_tmp_is_our_own(
    short_path: Path, monkeypatch: pytest.MonkeyPatch, taken: str
) -> None:
    """Anybody may make it there, and wait for our messages."""
    monkeypatch.setattr(runtime_directory, "SYSTEM_DIRECTORY", short_path / "run")
    monkeypatch.setattr(runtime_directory, "TEMPORARY", short_path)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    place = short_path / f"kvferry-{os.getuid()}"
    theirs = daemon_in(short_path / "theirs" / "cpu")
    if taken == "link":
        place.symlink_to(theirs.parent)
    else:
        theirs.parent.rename(place)
        assert endpoint.find_daemon() == place / "cpu"
        os.chown(place, 61001, 61001)
    with pytest.raises(Refused, match="is taken by user") as refused:
        endpoint.find_daemon()
    assert (refused.value.code, refused.value.value) == (Code.FORBIDDEN, str(place))
    daemon_in(short_path / "run" / "cpu")
    assert endpoint.find_daemon() == short_path / "run" / "cpu"
