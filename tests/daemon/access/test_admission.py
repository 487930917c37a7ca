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


# Runs commands as another user. Prints [status, output] of each.
COMMANDS = """
import io, json, os, sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from kvferry.client import cli, endpoint
from kvferry.client.cli import top

endpoint.runtime_directories = top.runtime_directories = lambda: [Path(sys.argv[1])]

def run(arguments):
    output = io.StringIO()
    with redirect_stdout(output), redirect_stderr(output):
        try:
            status = cli.main(arguments)
        except SystemExit as ended:
            status = ended.code
    return status, output.getvalue()

commands = [command.split() for command in sys.argv[3:]]
for command in commands:
    run([*command, "-d", "/nowhere"])  # imports modules that the user may not read
os.setgroups([])
os.setgid(int(sys.argv[2]))
os.setuid(int(sys.argv[2]))
print(json.dumps([run(command) for command in commands]))
"""
NO_ACCESS = "file permissions deny your user access"


def test_the_command_line_reports_missing_permission(start: Callable[..., LocalDaemon]) -> None:
    """The user may not read the directory either."""
    daemon = start(access_group=GROUP)
    status, one, doctor, top = run_as_other_user(
        daemon, "status", "status -d DIR", "doctor -d DIR", "top --once"
    )
    assert f"[forbidden] {NO_ACCESS}" in status
    assert f"[forbidden] {NO_ACCESS}" in one
    assert "-> usermod -aG" in doctor
    assert NO_ACCESS in top
    daemon.runtime_dir.chmod(0o700)  # a closed directory above
    one, doctor = run_as_other_user(daemon, "status -d DIR", "doctor -d DIR")
    assert f"[forbidden] {NO_ACCESS}" in one
    assert "-> run the engine as root" in doctor


def run_as_other_user(daemon: LocalDaemon, *commands: str) -> list[str]:
    """Run commands, which fail. Returns their output."""
    program = [sys.executable, "-c", COMMANDS, str(daemon.runtime_dir), str(OTHER_USER)]
    program += [command.replace("DIR", str(daemon.directory)) for command in commands]
    # Another user cannot write coverage's file here, and coverage would print a traceback.
    environ = {name: value for name, value in os.environ.items() if "COVERAGE" not in name}
    environ["COLUMNS"] = "200"
    done = subprocess.run(program, capture_output=True, text=True, timeout=TIMEOUT, env=environ)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert [status for status, _ in results] == [1] * len(commands), results
    return [output for _, output in results]


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


def test_the_group_decides_who_may_connect(
    start: Callable[..., LocalDaemon], tmp_path: Path
) -> None:
    """Without one, only the daemon's user. File permissions and the daemon refuse others."""
    file = tmp_path / "kvferryd.toml"
    file.write_text("")
    daemon = start(config=file)
    assert mode(daemon.directory) == 0o700
    assert {mode(path) for path in daemon.directory.iterdir()} == {0o600}, "sockets and lock"
    assert connect(daemon, OTHER_USER, GROUP) == DENIED_BY_FILES
    assert "forbidden" not in error_counts(daemon)
    file.write_text(f'[access]\ngroup = "{GROUP}"\n')
    daemon.process.send_signal(signal.SIGHUP)
    until(lambda: "configuration reloaded" in daemon.log())
    assert (mode(daemon.directory), daemon.directory.stat().st_gid) == (0o750, GROUP)
    sockets = list(daemon.directory.glob("*.sock"))
    assert len(sockets) == 3
    assert {(mode(path), path.stat().st_gid) for path in sockets} == {(0o660, GROUP)}
    assert mode(daemon.directory / "lock") == 0o600
    assert connect(daemon, OTHER_USER) == DENIED_BY_FILES
    open_permissions(daemon)
    assert connect(daemon, OTHER_USER) == REFUSED
    refused = error_counts(daemon)["forbidden"]
    assert refused >= 2  # a refused ZeroMQ socket connects again
    assert connect(daemon, OTHER_USER, GROUP) == CONNECTED
    assert error_counts(daemon)["forbidden"] == refused
    file.write_text("")
    daemon.process.send_signal(signal.SIGHUP)
    until(lambda: daemon.log().count("configuration reloaded") == 2)
    assert connect(daemon, OTHER_USER, GROUP) == DENIED_BY_FILES
    open_permissions(daemon)
    assert connect(daemon, OTHER_USER, GROUP) == REFUSED


# A daemon of one group. It cannot give files to another group, although it is root.
DAEMON = ["setpriv", "--bounding-set=-chown", f"--regid={OTHERS}", "--clear-groups"]
DAEMON += [sys.executable, "-m", "kvferry.daemon", "--pool-size", "1MiB", "--runtime-dir"]


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
