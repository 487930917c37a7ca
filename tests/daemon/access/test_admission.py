"""Admission at both sockets, with real processes of other users. Needs root."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.client import LocalDaemon, OffloadClient
from kvferry.testing.engine import until
from kvferry.testing.plugin import StartKvferryd
from support.time_limits import TIMEOUT

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="starts processes of other users: root")

OTHER_USER = 61002
GROUP, OTHERS = 61010, 61012

# Connects to both sockets as a user of a group and prints both outcomes. If the user may connect,
# the second socket replies that the session is unknown.
CONNECT = """
import json, os, socket, sys, time
from pathlib import Path
from kvferry.client import OffloadClient
from kvferry.proto.codec import decode_descriptor_reply, encode
from kvferry.proto.fd_passing import SendFds
from kvferry.proto.errors import KVFerryError
from support.raw_client import RawClient
from support.time_limits import TIMEOUT
from kvferry.proto.messages import Hello, Welcome, Error

directory, uid, gid = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
os.setgroups([])
os.setgid(gid)
os.setuid(uid)
result = {}
try:
    with OffloadClient(directory, timeout=TIMEOUT) as client:
        client.status()
    result["client"] = "connected"
except KVFerryError as error:
    result["client"] = error.code
try:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as fd_socket:
        fd_socket.connect(str(directory / "fds.sock"))
        fd_socket.send(encode(SendFds("unknown")))
        result["fds"] = decode_descriptor_reply(fd_socket.recv(9999)).error.code
except PermissionError:
    result["fds"] = "permission denied"
print(json.dumps(result))
"""

JOIN = """
import os, sys
from pathlib import Path
from kvferry.client import OffloadClient
from kvferry.proto.errors import KVFerryError
from support.time_limits import TIMEOUT

os.setgroups([])
os.setgid(int(sys.argv[3]))
os.setuid(int(sys.argv[2]))
try:
    OffloadClient(Path(sys.argv[1]), engine="llama", timeout=TIMEOUT).close()
    print("connected")
except KVFerryError as error:
    print(error.code)
"""

CONNECTED = {"client": "connected", "fds": "no_session"}
DENIED_BY_FILES = {"client": "forbidden", "fds": "permission denied"}
REFUSED = {"client": "forbidden", "fds": "forbidden"}


def connect(daemon: LocalDaemon, uid: int, gid: int = OTHERS) -> Any:
    return connect_as(daemon.directory, uid, gid)


def connect_as(directory: Path, uid: int, gid: int) -> Any:
    command = [sys.executable, "-c", CONNECT, str(directory), str(uid), str(gid)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def error_counts(daemon: LocalDaemon) -> dict[str, int]:
    with OffloadClient(daemon.directory) as client:
        return dict(client.status().errors)


@pytest.fixture
def reachable_dir() -> Iterator[Path]:
    """A directory that other users can reach. They cannot reach those of pytest."""
    path = Path(tempfile.mkdtemp(prefix="kvferry-", dir="/dev/shm"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def start(start_kvferryd: StartKvferryd, reachable_dir: Path) -> Callable[..., LocalDaemon]:
    """start(**options) -> a daemon in reachable_dir."""

    def run(**options: Any) -> LocalDaemon:
        daemon = start_kvferryd(runtime_dir=reachable_dir, **options)
        until(lambda: "serving" in daemon.log())
        return daemon

    return run


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def open_permissions(daemon: LocalDaemon) -> None:
    """Open all file permissions, so that only the check of the daemon is left."""
    for path in daemon.directory.iterdir():
        path.chmod(0o666)
    daemon.directory.chmod(0o755)


def test_without_access_group_only_the_daemons_user_may_connect(
    start: Callable[..., LocalDaemon],
) -> None:
    daemon = start()
    assert mode(daemon.directory) == 0o700
    assert {mode(path) for path in daemon.directory.iterdir()} == {0o600}, "sockets and lock"
    assert connect(daemon, OTHER_USER) == DENIED_BY_FILES
    assert "forbidden" not in error_counts(daemon)


COMMAND = """
import os, sys
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from kvferry.client import cli, endpoint
from kvferry.client.cli import top

endpoint.runtime_directories = top.runtime_directories = lambda: [Path(sys.argv[1])]
with suppress(SystemExit), open(os.devnull, "w") as null, redirect_stdout(null):
    with redirect_stderr(null):
        cli.main([*sys.argv[3:], "-d", "/nowhere"])  # imports modules that the user may not read
os.setgroups([])
os.setgid(int(sys.argv[2]))
os.setuid(int(sys.argv[2]))
cli.main(sys.argv[3:])
"""
NO_ACCESS = "file permissions deny your user access"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("status", f"[forbidden] {NO_ACCESS}"),
        ("status -d DIR", f"[forbidden] {NO_ACCESS}"),
        ("release engine -d DIR", f"[forbidden] {NO_ACCESS}"),
        ("bench -d DIR", f"[forbidden] {NO_ACCESS}"),
        ("doctor -d DIR", "-> usermod -aG"),
        ("top --once", NO_ACCESS),
        ("top --once -d DIR", NO_ACCESS),
    ],
)
def test_the_command_line_reports_missing_permission(
    start: Callable[..., LocalDaemon], command: str, expected: str
) -> None:
    """The user may not read the directory either."""
    daemon = start(access_group=GROUP)
    report_missing_permission(daemon, command, expected)


@pytest.mark.parametrize(
    ("command", "expected"),
    [("status -d DIR", f"[forbidden] {NO_ACCESS}"), ("doctor -d DIR", "-> run the engine as root")],
)
def test_a_closed_directory_above_is_missing_permission(
    start: Callable[..., LocalDaemon], command: str, expected: str
) -> None:
    daemon = start(access_group=GROUP)
    daemon.runtime_dir.chmod(0o700)
    report_missing_permission(daemon, command, expected)


def report_missing_permission(daemon: LocalDaemon, command: str, expected: str) -> None:
    """Run a command as another user, and expect its error."""
    program = [sys.executable, "-c", COMMAND, str(daemon.runtime_dir), str(OTHER_USER)]
    arguments = command.replace("DIR", str(daemon.directory)).split()
    # Another user cannot write coverage's file here, and coverage would print a traceback.
    environ = {name: value for name, value in os.environ.items() if "COVERAGE" not in name}
    environ["COLUMNS"] = "200"
    done = subprocess.run(
        [*program, *arguments], capture_output=True, text=True, timeout=TIMEOUT, env=environ
    )
    assert done.returncode == 1, done.stderr
    assert expected in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_another_user_is_refused_at_both_sockets_and_counted(
    start: Callable[..., LocalDaemon],
) -> None:
    daemon = start(access_group=GROUP)
    open_permissions(daemon)
    assert connect(daemon, OTHER_USER) == REFUSED
    refused = error_counts(daemon)["forbidden"]
    assert refused >= 2  # a refused ZeroMQ socket connects again
    assert connect(daemon, OTHER_USER, GROUP) == CONNECTED
    assert error_counts(daemon)["forbidden"] == refused


def test_an_engine_in_use_belongs_to_one_user(
    start: Callable[..., LocalDaemon],
) -> None:
    daemon = start(access_group=GROUP)
    open_permissions(daemon)
    command = [sys.executable, "-c", JOIN, str(daemon.directory), str(OTHER_USER), str(GROUP)]
    with OffloadClient(daemon.directory, engine="llama"):
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
        assert done.stdout.strip() == "forbidden", done.stderr
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.stdout.strip() == "connected", done.stderr


def test_a_group_may_connect(start: Callable[..., LocalDaemon]) -> None:
    daemon = start(access_group=GROUP)
    assert mode(daemon.directory) == 0o750
    assert daemon.directory.stat().st_gid == GROUP
    sockets = list(daemon.directory.glob("*.sock"))
    assert len(sockets) == 3
    assert {(mode(path), path.stat().st_gid) for path in sockets} == {(0o660, GROUP)}
    assert mode(daemon.directory / "lock") == 0o600
    assert connect(daemon, OTHER_USER, GROUP) == CONNECTED
    assert connect(daemon, OTHER_USER) == DENIED_BY_FILES


def test_a_reload_changes_who_may_connect(
    start: Callable[..., LocalDaemon], tmp_path: Path
) -> None:
    file = tmp_path / "kvferryd.toml"
    file.write_text("")
    daemon = start(config=file)
    assert connect(daemon, OTHER_USER, GROUP) == DENIED_BY_FILES
    file.write_text(f'[access]\ngroup = "{GROUP}"\n')
    daemon.process.send_signal(signal.SIGHUP)
    until(lambda: "configuration reloaded" in daemon.log())
    assert connect(daemon, OTHER_USER, GROUP) == CONNECTED
    file.write_text("")
    daemon.process.send_signal(signal.SIGHUP)
    until(lambda: daemon.log().count("configuration reloaded") == 2)
    assert connect(daemon, OTHER_USER, GROUP) == DENIED_BY_FILES
    open_permissions(daemon)
    assert connect(daemon, OTHER_USER, GROUP) == REFUSED


def test_a_reload_applies_to_a_closed_accept_gate(
    start: Callable[..., LocalDaemon], tmp_path: Path
) -> None:
    file = tmp_path / "kvferryd.toml"
    file.write_text("")
    daemon = start(config=file)
    front = daemon.directory / "kvferry.sock"
    shut = front.rename(front.with_suffix(".full"))  # the gate does so if descriptors run out
    assert not shut.stat().st_mode & stat.S_IRWXG
    file.write_text(f'[access]\ngroup = "{GROUP}"\n')
    daemon.process.send_signal(signal.SIGHUP)
    until(lambda: "configuration reloaded" in daemon.log())
    assert shut.stat().st_mode & stat.S_IRWXG
    assert shut.stat().st_gid == GROUP


# A daemon of one group. It cannot give files to another group, although it is root.
DAEMON = ["setpriv", "--bounding-set=-chown", f"--regid={OTHERS}", "--clear-groups"]
DAEMON += [sys.executable, "-m", "kvferry.daemon", "--pool-size", "1MiB", "--runtime-dir"]


def start_refused(runtime_dir: Path, *flags: str) -> str:
    """Start DAEMON, which must refuse its configuration. Returns its error output."""
    command = [*DAEMON, str(runtime_dir), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 2, done.stderr
    assert "bad_config" in done.stderr
    return done.stderr


def test_a_group_that_the_daemon_cannot_give_files_to_is_refused(reachable_dir: Path) -> None:
    message = start_refused(reachable_dir, "--access-group", str(GROUP))
    assert f"to group {GROUP}" in message


def test_a_failed_reload_changes_nothing(reachable_dir: Path) -> None:
    file, log = reachable_dir / "kvferryd.toml", reachable_dir / "log"
    file.write_text(f'[access]\ngroup = "{OTHERS}"\n')
    command = [*DAEMON, str(reachable_dir), "--config", str(file)]
    with log.open("wb") as output:
        daemon = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        until(lambda: "serving" in log.read_text())
        file.write_text(f'[access]\ngroup = "{GROUP}"\n')
        daemon.send_signal(signal.SIGHUP)
        until(lambda: "cannot give" in log.read_text())
        assert connect_as(reachable_dir / "cpu", OTHER_USER, OTHERS) == CONNECTED
        assert connect_as(reachable_dir / "cpu", OTHER_USER, GROUP) == DENIED_BY_FILES
    finally:
        daemon.terminate()
        assert daemon.wait(TIMEOUT) == 0, log.read_text()


def test_an_unknown_group_is_refused(reachable_dir: Path) -> None:
    assert "no-such-group" in start_refused(reachable_dir, "--access-group", "no-such-group")


def test_a_directory_of_another_user_is_refused(reachable_dir: Path) -> None:
    (reachable_dir / "cpu").mkdir()
    os.chown(reachable_dir / "cpu", OTHER_USER, OTHERS)
    assert f"belongs to user {OTHER_USER}" in start_refused(reachable_dir)


def test_a_directory_inside_that_of_another_user_is_refused(reachable_dir: Path) -> None:
    os.chown(reachable_dir, OTHER_USER, OTHERS)
    message = start_refused(reachable_dir)
    assert f"belongs to user {OTHER_USER}" in message
    assert str(reachable_dir) in message
    assert not (reachable_dir / "cpu").exists()
