"""Finding a daemon by its runtime directory."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest

from kvferry.client import Code, Gone, LocalDaemon, OffloadClient, Refused, endpoint
from kvferry.proto import runtime_directory
from kvferry.proto.errors import KVFerryError
from kvferry.testing.plugin import StartKvferryd
from support.time_limits import PROMPTLY, TIMEOUT


@pytest.mark.parametrize("answers", [[True], [False, True], [False, False]])
def test_a_socket_removed_for_a_moment_is_not_an_access_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: list[bool]
) -> None:
    """os.access also returns False if the file does not exist."""
    (tmp_path / "kvferry.sock").touch()
    denied = answers == [False, False]
    monkeypatch.setattr(os, "access", lambda *_, **__: answers.pop(0))
    if denied:
        with pytest.raises(Refused, match="file permissions deny your user access"):
            endpoint.check_access(tmp_path)
    else:
        endpoint.check_access(tmp_path)


@pytest.mark.parametrize(
    ("device", "inaccessible", "error"),
    [
        (None, "GPU-1", Refused),
        ("GPU-1", "GPU-1", Refused),
        ("GPU-1", "", Refused),  # the parent directory
        ("GPU-1", "GPU-2", Gone),
        (None, "nowhere", Gone),  # the directory does not exist
    ],
)
def test_an_inaccessible_directory_is_reported(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: str | None,
    inaccessible: str,
    error: type[Exception],
) -> None:
    for name in ("GPU-1", "GPU-2"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(endpoint, "runtime_directories", lambda: [tmp_path])
    monkeypatch.setattr(endpoint, "find_daemons", lambda _: ([], [tmp_path / inaccessible]))
    with pytest.raises(error):
        endpoint.find_daemon(device)


def make_runtime_directory(path: Path) -> Path:
    """A runtime directory with a daemon's socket."""
    path.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path / "kvferry.sock"))
    return path


def test_the_parent_of_one_runtime_directory_stands_for_it(short_path: Path) -> None:
    assert endpoint.resolve_directory(short_path) == short_path  # a daemon may still start there
    cpu_directory = make_runtime_directory(short_path / "cpu")
    (short_path / "empty").mkdir()
    assert endpoint.resolve_directory(short_path) == cpu_directory
    assert endpoint.resolve_directory(cpu_directory) == cpu_directory
    make_runtime_directory(short_path / "GPU-1")
    assert endpoint.resolve_directory(cpu_directory) == cpu_directory
    with pytest.raises(Refused, match="2 daemons run; name the directory of one") as several:
        endpoint.resolve_directory(short_path)
    assert several.value.code == Code.SEVERAL_DAEMONS
    both = [short_path / "GPU-1", cpu_directory]
    assert endpoint.find_all_daemons(short_path) == both
    assert endpoint.find_all_daemons(cpu_directory) == [cpu_directory]
    with pytest.raises(Gone, match="start kvferryd"):
        endpoint.find_all_daemons(short_path / "empty")
    make_runtime_directory(cpu_directory / "below")
    assert endpoint.resolve_directory(cpu_directory) == cpu_directory


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("file", "not a runtime directory"),
        ("\udcff", "is not UTF-8"),
        ("d" * 120, "use a shorter directory"),
        ("/".join(["d" * 200] * 30), "use a shorter directory"),
    ],
)
def test_a_path_where_no_daemon_can_be(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "file").touch()
    start = time.monotonic()
    with pytest.raises(Refused, match=message) as refused:
        OffloadClient(tmp_path / name, timeout=TIMEOUT)
    assert refused.value.code == Code.BAD_CONFIG
    assert time.monotonic() - start < PROMPTLY


@pytest.mark.parametrize(
    ("name", "message"),
    [("missing", "the directory does not exist"), (".", r"the directory has no kvferry\.sock")],
)
def test_no_daemon_in_time(short_path: Path, name: str, message: str) -> None:
    with pytest.raises(Gone, match=f"no reply from a daemon in time: {message}") as gone:
        OffloadClient(short_path / name, timeout=0.2)
    assert (gone.value.code, gone.value.value) == (Code.TIMEOUT, str(short_path / name))


def test_a_daemon_that_starts_in_time(
    short_path: Path, start_kvferryd: StartKvferryd, kvferryd: LocalDaemon
) -> None:
    """The daemon creates the directory. A client also accepts its parent."""
    with ThreadPoolExecutor(1) as executor:
        waiting = executor.submit(OffloadClient, short_path / "later" / "cpu", timeout=TIMEOUT)
        later = start_kvferryd(runtime_dir=short_path / "later")
        with waiting.result() as client:
            assert client.daemon.pid == later.pid
    with OffloadClient(str(kvferryd.runtime_dir)) as client:
        assert client.directory == kvferryd.directory
        assert client.daemon.pid == kvferryd.pid


@pytest.mark.parametrize(
    ("device", "found"),
    [
        ("GPU-377e0049", "GPU-377e0049-554c"),
        ("GPU-377e1", "GPU-377e1149-554c"),
        ("MIG-377e0049-554c", "GPU-377e0049-554c"),
        ("cpu", "cpu"),
        ("GPU-377e", Refused(Code.SEVERAL_DAEMONS, "3 daemons run; name the directory of one")),
        ("GPU-4", Gone(Code.DAEMON_GONE, "no daemon runs for device GPU-4")),
    ],
)
def test_a_daemon_is_found_by_the_name_of_its_device_in_cuda(
    gpu_directories: list[Path], device: str, found: str | KVFerryError
) -> None:
    if isinstance(found, str):
        assert endpoint.find_daemon(device) == gpu_directories[0] / found
    else:
        with pytest.raises(type(found), match=found.message):
            endpoint.find_daemon(device)


@pytest.fixture
def gpu_directories(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Of the system and of a user. A MIG instance's name is that of a GPU, as in the driver."""
    for name in ("GPU-377e0049-554c", "GPU-377e1149-554c", "cpu"):
        make_runtime_directory(short_path / "a" / name)
    make_runtime_directory(short_path / "b" / "GPU-377e0049-554c")
    places = [short_path / "a", short_path / "b"]
    monkeypatch.setattr(endpoint, "runtime_directories", lambda: places)
    return places


def test_a_daemon_is_found_in_a_locale_without_its_characters(short_path: Path) -> None:
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    program = (
        "import sys; from kvferry.client import OffloadClient\n"
        f"print(OffloadClient(sys.argv[1], timeout={TIMEOUT}).daemon.pid)"
    )
    with LocalDaemon(runtime_dir=short_path / "ü", pool_bytes=1 << 20) as daemon:
        command = [sys.executable, "-c", program, str(daemon.directory)]
        done = subprocess.run(command, env=os.environ | locale, capture_output=True, text=True)
        assert done.stdout == f"{daemon.pid}\n", done.stderr


@pytest.mark.parametrize(
    "kind",
    [
        "link",
        pytest.param(
            "directory", marks=pytest.mark.skipif(os.geteuid() != 0, reason="chown needs root")
        ),
    ],
)
def test_a_directory_in_tmp_of_another_user_is_not_used(
    short_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Any user can create such a directory, to receive messages of this user."""
    monkeypatch.setattr(runtime_directory, "SYSTEM_DIRECTORY", short_path / "run")
    monkeypatch.setattr(runtime_directory, "TEMPORARY", short_path)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    own = short_path / f"kvferry-{os.getuid()}"
    foreign_directory = make_runtime_directory(short_path / "theirs" / "cpu")
    if kind == "link":
        own.symlink_to(foreign_directory.parent)
    else:
        foreign_directory.parent.rename(own)
        assert endpoint.find_daemon() == own / "cpu"
        os.chown(own, 61001, 61001)
    with pytest.raises(Refused, match="belongs to user") as refused:
        endpoint.find_daemon()
    assert (refused.value.code, refused.value.value) == (Code.FORBIDDEN, str(own))
    make_runtime_directory(short_path / "run" / "cpu")
    assert endpoint.find_daemon() == short_path / "run" / "cpu"


def test_the_process_of_a_runtime_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert endpoint.daemon_pid(tmp_path) is None
    lock = tmp_path / "lock"
    lock.write_text(f"{os.getpid()}\n")
    assert endpoint.daemon_pid(tmp_path) == os.getpid()
    monkeypatch.setattr(os, "kill", Mock(side_effect=PermissionError))  # of another user
    assert endpoint.daemon_pid(tmp_path) == os.getpid()
    monkeypatch.setattr(os, "kill", Mock(side_effect=ProcessLookupError))
    assert endpoint.daemon_pid(tmp_path) is None
    monkeypatch.setattr(Path, "read_text", Mock(side_effect=PermissionError))
    assert endpoint.daemon_pid(tmp_path) is None
