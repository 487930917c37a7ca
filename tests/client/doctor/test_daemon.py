"""`kvferry doctor`: each fault, provoked."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
import zmq

from kvferry.client import LocalDaemon
from kvferry.client.doctor import CheckContext, Finding, Verdict, daemon, run_checks
from kvferry.proto import messages as wire
from kvferry.proto import status as proto_status
from kvferry.proto.codec import encode
from kvferry.proto.errors import Code, ErrorInfo, Gone, Refused
from kvferry.proto.version import kvferry_version
from kvferry.testing.engine import until
from kvferry.testing.plugin import StartKvferryd
from support.status_reports import STATUS
from support.time_limits import TIMEOUT

# Prints the findings, and on standard error why no daemon is found without a directory.
AS_NOBODY = """
import os, sys
from pathlib import Path
import msgspec
from kvferry.client import doctor, endpoint

doctor.CHECKS = doctor.CHECKS[1:]  # other users may not be able to read installed packages
doctor.run_checks(Path("/nowhere"))  # imports all modules before the user changes
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
sys.stdout.buffer.write(msgspec.json.encode(doctor.run_checks(Path(sys.argv[1]), 20.0)))
endpoint.runtime_directories = lambda: [Path(sys.argv[1])]
try:
    endpoint.find_daemon()
except Exception as error:
    print(type(error).__name__, error, file=sys.stderr)
"""
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


def by_check(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.check: finding for finding in findings}


def only_failure(findings: list[Finding]) -> Finding:
    """The only failure. The checks after it did not run."""
    (failure,) = [finding for finding in findings if finding.verdict is Verdict.FAIL]
    assert "round trip" not in by_check(findings)
    return failure


def run_checks_as_nobody(directory: Path) -> tuple[list[Finding], str]:
    command = [sys.executable, "-c", AS_NOBODY, str(directory)]
    done = subprocess.run(command, capture_output=True, timeout=TIMEOUT, check=True)
    return msgspec.json.decode(done.stdout, type=list[Finding]), done.stderr.decode()


# Finding the daemon


def test_no_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directories = [tmp_path / "one", tmp_path / "two"]
    monkeypatch.setattr("kvferry.client.doctor.daemon.runtime_directories", lambda: directories)
    failure = only_failure(run_checks())
    assert all(str(directory) in failure.found for directory in directories)
    assert failure.change.startswith("kvferryd ")


def test_all_daemons_are_checked(start_kvferryd: StartKvferryd, tmp_path: Path) -> None:
    """The engine's environment is checked once."""
    started = {name: start_kvferryd() for name in ("one", "two")}
    for name, each in started.items():
        (tmp_path / name).symlink_to(each.directory)
    started["two"].kill()
    findings = run_checks(tmp_path)
    directories = [each.found for each in findings if each.check == "directory"]
    assert directories == [str(tmp_path / "one"), str(tmp_path / "two")]
    assert [each.check for each in findings if each.verdict is Verdict.FAIL] == ["sockets"]
    assert [each.check for each in findings].count("kernel") == 1


def test_a_daemon_that_was_killed(kvferryd: LocalDaemon) -> None:
    kvferryd.kill()
    failure = only_failure(run_checks(kvferryd.directory))
    assert failure.check == "sockets"
    assert "no process listens" in failure.found
    assert failure.change == "kvferryd --device cpu"
    gpu = kvferryd.directory.with_name("GPU-1")
    kvferryd.directory.rename(gpu)
    assert only_failure(run_checks(gpu)).change.startswith("kvferryd --device GPU-1 --pool-size")


@as_root
@pytest.mark.parametrize(
    ("mode", "change"), [(0o700, "run the engine as root"), (0o710, "usermod -aG root")]
)
def test_another_user_may_not_read_the_directory(
    kvferryd: LocalDaemon, mode: int, change: str
) -> None:
    kvferryd.runtime_dir.chmod(0o755)
    kvferryd.directory.chmod(mode)
    findings, error = run_checks_as_nobody(kvferryd.runtime_dir)
    assert error.startswith("Refused [forbidden] file permissions deny your user access")
    assert str(kvferryd.directory) in error
    failure = only_failure(findings)
    assert failure.check == "directory"
    assert f"{kvferryd.directory}: permission denied, owned by root" in failure.found
    assert failure.change.startswith((change, f"join its group: {change}"))


@as_root
def test_another_user_may_not_connect(kvferryd: LocalDaemon) -> None:
    kvferryd.runtime_dir.chmod(0o711)
    kvferryd.directory.chmod(0o755)
    for name in ("kvferry.sock", "fds.sock"):
        failure = only_failure(run_checks_as_nobody(kvferryd.directory)[0])
        assert (failure.check, name in failure.found) == ("sockets", True)
        (kvferryd.directory / name).chmod(0o777)
    failure = only_failure(run_checks_as_nobody(kvferryd.directory)[0])
    assert failure.check == "connection"
    assert failure.change.startswith("name a group of this user as access.group")


# Connecting to the daemon


def test_a_daemon_that_is_stopped_by_a_signal(kvferryd: LocalDaemon) -> None:
    os.kill(kvferryd.pid, signal.SIGSTOP)
    try:
        failure = only_failure(run_checks(kvferryd.directory, 0.3))
    finally:
        os.kill(kvferryd.pid, signal.SIGCONT)
    assert failure.check == "connection"
    assert failure.change.endswith(f"kill -CONT {kvferryd.pid}")


def unshare_command() -> str | None:
    command = shutil.which("unshare")
    if command is None or subprocess.run([command, "--pid", "--fork", "true"]).returncode:
        return None
    return command


@pytest.mark.skipif(unshare_command() is None, reason="this machine cannot create PID namespaces")
def test_a_daemon_in_another_pid_namespace() -> None:
    """Neither sees the other's pid, as in a container without --pid=host."""
    with tempfile.TemporaryDirectory(prefix="kvferry-") as directory:
        arguments = ["--device", "cpu", "--pool-size", "1MiB", "--runtime-dir", directory]
        daemon_ = [sys.executable, "-m", "kvferry.daemon", *arguments]
        inside = [str(unshare_command()), "--pid", "--fork", "--kill-child", *daemon_]
        with subprocess.Popen(inside, stderr=subprocess.DEVNULL) as process:
            runtime_directory = Path(directory, "cpu")
            try:
                until(lambda: (runtime_directory / "kvferry.sock").exists())
                findings = by_check(run_checks(runtime_directory))
            finally:
                process.kill()
    assert findings["processes"].verdict is Verdict.WARN
    assert "--pid=host" in findings["processes"].change
    assert findings["round trip"].verdict is Verdict.OK


class SilentFdServer:
    """A descriptor socket that accepts no connection. waiting: connections that the kernel queues,
    before further ones must wait."""

    def __init__(self, path: Path, waiting: int = 9) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(str(path))
        self._socket.listen(waiting - 1)

    def close(self) -> None:
        self._socket.close()


def answer_one(directory: Path, reply: bytes) -> threading.Thread:
    """Bind a daemon's sockets, and answer the first message."""
    context, bound = zmq.Context(), threading.Event()

    def serve() -> None:
        fd_server = SilentFdServer(directory / "fds.sock")
        with context, context.socket(zmq.ROUTER) as router:
            router.bind(f"ipc://{directory / 'kvferry.sock'}")
            bound.set()
            sender, _ = router.recv_multipart()
            router.send_multipart([sender, reply])
            router.close(1000)
        fd_server.close()

    thread = threading.Thread(target=serve)
    thread.start()
    assert bound.wait(TIMEOUT)
    return thread


CPU = proto_status.DeviceInfo("cpu", "cpu", "host")
GPU = proto_status.DeviceInfo("cuda", "GPU-of-the-daemon", "NVIDIA X")


def welcome(version: str = "0.1.0", info: proto_status.DeviceInfo = CPU) -> wire.Welcome:
    return wire.Welcome(1, "boot", "s", version, 1, info, proto_status.Limits(9, 9, 9))


def connected(tmp_path: Path, daemon: wire.Welcome) -> Any:
    """The context of checks that are connected to such a daemon. Its client is a Mock."""
    case = CheckContext(None, 0.1)
    case.client = Mock(directory=tmp_path, daemon=daemon)
    return case


@pytest.mark.parametrize("how", ["refuses", "sends an unknown field"])
def test_a_daemon_of_another_build(short_path: Path, how: str) -> None:
    unknown = [*msgspec.msgpack.decode(encode(welcome())), "a field of a later version"]
    refusal = wire.Error(None, ErrorInfo(Code.PROTOCOL_VERSION, "this daemon speaks protocol 9"))
    reply = encode(refusal) if how == "refuses" else msgspec.msgpack.encode(unknown)
    thread = answer_one(short_path, reply)
    failure = only_failure(run_checks(short_path, TIMEOUT))
    thread.join()
    assert failure.check == "connection"
    assert f"this client is kvferry {kvferry_version()}, protocol " in failure.found
    assert "same build" in failure.change


def test_a_daemon_of_another_version_that_never_answers(tmp_path: Path) -> None:
    case = connected(tmp_path, welcome("7.0"))
    case.client.status.side_effect = Gone(Code.TIMEOUT, "no reply in time")
    (version,), (status,) = daemon.version(case), daemon.status(case)
    assert (version.verdict, status.verdict) == (Verdict.WARN, Verdict.FAIL)
    assert [*daemon.round_trip(case)] == []


def test_a_descriptor_socket_with_a_full_queue_does_not_block_the_doctor(tmp_path: Path) -> None:
    server = SilentFdServer(tmp_path / "fds.sock", waiting=1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as queued:
        queued.connect(str(tmp_path / "fds.sock"))
        (finding,) = daemon.processes(connected(tmp_path, welcome()))
    server.close()
    assert (finding.check, finding.verdict) == ("processes", Verdict.WARN)
    assert str(tmp_path / "fds.sock") in finding.found


def test_a_gpu_that_is_not_visible_to_the_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    driver = Mock(device_count=lambda: 1, device_uuid=lambda _: "GPU-of-this-machine")
    monkeypatch.setattr(daemon, "driver", lambda: driver)
    (finding,) = daemon.device(connected(tmp_path, welcome(info=GPU)))
    assert finding.verdict is Verdict.FAIL
    assert "CUDA_VISIBLE_DEVICES=7" in finding.found
    assert "visible here: GPU-of-this-machine" in finding.found
    monkeypatch.setattr(daemon, "driver", Mock(side_effect=Refused(Code.NO_DEVICE, "no driver")))
    monkeypatch.setattr(daemon, "DEVICE_NODES", ("/dev/null", "/dev/nowhere"))
    (finding,) = daemon.device(connected(tmp_path, welcome(info=GPU)))
    assert "no driver" in finding.found
    assert finding.found.endswith("; not accessible here: /dev/nowhere")


# Storing and loading


@pytest.mark.parametrize(("uptime", "verdict"), [(10.0, Verdict.OK), (1e4, Verdict.WARN)])
def test_a_partly_registered_pool(tmp_path: Path, uptime: float, verdict: Verdict) -> None:
    pool = proto_status.PoolStatus(64 << 20, 32 << 20, 0)
    case = connected(tmp_path, welcome())
    case.status = msgspec.structs.replace(STATUS, pool=pool, uptime_seconds=uptime)
    (finding,) = daemon.pool(case)
    assert finding.verdict is verdict
    assert "MiB registered (50%, being registered)" in finding.found
    case.client.wait.side_effect = Gone(Code.TIMEOUT, "no reply in time")
    case.client.allocate_kv_caches.return_value = Mock(tensors=[np.zeros((2, 4096), np.int8)])
    case.status = msgspec.structs.replace(case.status, device=CPU)
    (finding,) = daemon.round_trip(case)  # it waits for the pool
    assert finding.verdict is Verdict.WARN
    assert "the pool to be registered" in finding.found


def test_a_round_trip_in_a_full_pool_or_with_wrong_bytes(tmp_path: Path) -> None:
    case = connected(tmp_path, welcome())
    full = proto_status.PoolStatus(64 << 20, 64 << 20, 64 << 20)
    case.status = msgspec.structs.replace(STATUS, pool=full, device=CPU)
    (finding,) = daemon.round_trip(case)
    assert (finding.check, finding.verdict) == ("round trip", Verdict.WARN)
    assert "full" in finding.found
    assert not case.client.allocate_kv_caches.called
    case.status = msgspec.structs.replace(STATUS, device=CPU)
    tensor = np.zeros((2, 4096), np.int8)  # nothing is loaded into its second page
    case.client.allocate_kv_caches.return_value = Mock(tensors=[tensor])
    case.client.get_finished.return_value = []
    (finding,) = daemon.round_trip(case)
    assert (finding.check, finding.verdict) == ("round trip", Verdict.FAIL)
    assert "differ" in finding.found


def test_an_engine_that_was_refused_is_named(tmp_path: Path) -> None:
    case = connected(tmp_path, welcome())
    engines = {"llama": ErrorInfo(Code.POOL_FULL, "no room")}
    case.status = msgspec.structs.replace(STATUS, refused_engines=engines)
    (finding,) = daemon.refused(case)
    assert finding.verdict is Verdict.WARN
    assert "engine 'llama': [pool_full]" in finding.found
