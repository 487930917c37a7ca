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
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import zmq

from kvferry.client import GPULoadStoreSpec, LocalDaemon, OffloadClient
from kvferry.client.doctor import CheckContext, Finding, Verdict, daemon, run_checks
from kvferry.proto import messages as wire
from kvferry.proto import status as proto_status
from kvferry.proto.codec import decode_client_message, encode
from kvferry.proto.errors import Code, ErrorInfo, Refused
from kvferry.proto.version import kvferry_version
from kvferry.testing.engine import until
from kvferry.testing.plugin import StartKvferryd
from support.client_keys import FINGERPRINT
from support.raw_client import RawClient
from support.time_limits import TIMEOUT

AS_NOBODY = """
import os, sys
from pathlib import Path
import msgspec
from kvferry.client import doctor

doctor.CHECKS = doctor.CHECKS[1:]  # other users may not be able to read installed packages
doctor.run_checks(Path("/nowhere"))  # imports all modules before the user changes
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
sys.stdout.buffer.write(msgspec.json.encode(doctor.run_checks(Path(sys.argv[1]), 20.0)))
"""
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


def by_check(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.check: finding for finding in findings}


def only_failure(findings: list[Finding]) -> Finding:
    """The only failure. The checks after it did not run."""
    (failure,) = [finding for finding in findings if finding.verdict is Verdict.FAIL]
    assert "round trip" not in by_check(findings)
    return failure


def run_checks_as_nobody(directory: Path) -> list[Finding]:
    command = [sys.executable, "-c", AS_NOBODY, str(directory)]
    done = subprocess.run(command, capture_output=True, timeout=TIMEOUT, check=True)
    return msgspec.json.decode(done.stdout, type=list[Finding])


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


def test_an_engine_that_was_refused_is_named(kvferryd: LocalDaemon) -> None:
    with OffloadClient(kvferryd.directory, engine="llama") as client:
        with pytest.raises(Refused):
            client.open_namespace(FINGERPRINT, cpu_bytes_to_use=1 << 40)
        findings = by_check(run_checks(kvferryd.directory, TIMEOUT))
        assert findings["refused"].verdict is Verdict.WARN
        assert "engine 'llama': [pool_full]" in findings["refused"].found
        client.open_namespace(FINGERPRINT, cpu_bytes_to_use=1 << 20)
        assert "refused" not in by_check(run_checks(kvferryd.directory, TIMEOUT))


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
    failure = only_failure(run_checks_as_nobody(kvferryd.runtime_dir))
    assert failure.check == "directory"
    assert f"{kvferryd.directory}: permission denied, owned by root" in failure.found
    assert failure.change.startswith((change, f"join its group: {change}"))


@as_root
def test_another_user_is_warned_that_there_may_be_a_daemon(kvferryd: LocalDaemon) -> None:
    """A client that searches for a daemon reports the same."""
    kvferryd.runtime_dir.chmod(0o755)
    program = AS_NOBODY[: AS_NOBODY.index("sys.stdout")] + (
        "from kvferry.client import endpoint\n"
        "endpoint.runtime_directories = lambda: [Path(sys.argv[1])]\n"
        "try:\n    endpoint.find_daemon()\n"
        "except Exception as error:\n    print(type(error).__name__, error)\n"
    )
    command = [sys.executable, "-c", program, str(kvferryd.runtime_dir)]
    done = subprocess.run(command, capture_output=True, timeout=TIMEOUT, check=True, text=True)
    assert done.stdout.startswith("Refused [forbidden] file permissions deny your user access")
    assert str(kvferryd.directory) in done.stdout


@as_root
def test_another_user_may_not_connect(kvferryd: LocalDaemon) -> None:
    kvferryd.runtime_dir.chmod(0o711)
    kvferryd.directory.chmod(0o755)
    for name in ("kvferry.sock", "fds.sock"):
        failure = only_failure(run_checks_as_nobody(kvferryd.directory))
        assert (failure.check, name in failure.found) == ("sockets", True)
        (kvferryd.directory / name).chmod(0o777)
    failure = only_failure(run_checks_as_nobody(kvferryd.directory))
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


class Impostor:
    """A fake daemon that sends its prepared replies, one for each message."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.replies = directory, list[bytes]()
        self.received: list[wire.ClientMessage] = []
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(f"ipc://{directory / 'kvferry.sock'}")
        self._fd_server = SilentFdServer(directory / "fds.sock")
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._closed.is_set():
            if self._socket.poll(20):
                sender, data = self._socket.recv_multipart()
                self.received.append(decode_client_message(data))
                if self.replies:
                    self._socket.send_multipart([sender, self.replies.pop(0)])

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        self._fd_server.close()
        self._socket.close()
        self._context.term()


class SilentFdServer:
    """A descriptor socket that accepts no connection. waiting: connections that the kernel queues,
    before further ones must wait."""

    def __init__(self, path: Path, waiting: int = 9) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(str(path))
        self._socket.listen(waiting - 1)

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def impostor() -> Iterator[Impostor]:
    with tempfile.TemporaryDirectory(prefix="kvferry-") as directory:
        impostor = Impostor(Path(directory))
        yield impostor
        impostor.close()


CPU = proto_status.DeviceInfo("cpu", "cpu", "host")


def welcome(
    protocol: int = 1, version: str = "0.1.0", info: proto_status.DeviceInfo = CPU
) -> wire.Welcome:
    return wire.Welcome(protocol, "boot", "s", version, 1, info, proto_status.Limits(9, 9, 9))


@pytest.mark.parametrize("how", ["refuses", "sends an unknown field"])
def test_a_daemon_of_another_build(impostor: Impostor, how: str) -> None:
    unknown = [*msgspec.msgpack.decode(encode(welcome())), "a field of a later version"]
    refusal = wire.Error(None, ErrorInfo(Code.PROTOCOL_VERSION, "this daemon speaks protocol 9"))
    impostor.replies = [encode(refusal) if how == "refuses" else msgspec.msgpack.encode(unknown)]
    failure = only_failure(run_checks(impostor.directory, TIMEOUT))
    assert failure.check == "connection"
    assert f"this client is kvferry {kvferry_version()}, protocol " in failure.found
    assert "same build" in failure.change


def test_a_daemon_of_another_version_that_never_answers(impostor: Impostor) -> None:
    impostor.replies = [encode(welcome(1, "7.0"))]
    findings = by_check(run_checks(impostor.directory, 3.0))
    assert findings["version"].verdict is Verdict.WARN
    assert findings["status"].verdict is Verdict.FAIL
    assert findings["processes"].verdict is Verdict.WARN
    assert "round trip" not in findings


def test_a_descriptor_socket_with_a_full_queue_does_not_block_the_doctor(tmp_path: Path) -> None:
    server, case = SilentFdServer(tmp_path / "fds.sock", waiting=1), CheckContext(None, 0.1)
    case.client = Mock(directory=tmp_path, daemon=welcome())
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as queued:
        queued.connect(str(tmp_path / "fds.sock"))
        (finding,) = daemon.processes(case)
    server.close()
    assert (finding.check, finding.verdict) == ("processes", Verdict.WARN)
    assert str(tmp_path / "fds.sock") in finding.found


def test_a_gpu_that_is_not_visible_to_the_client(
    impostor: Impostor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    other = welcome(info=proto_status.DeviceInfo("cuda", "GPU-of-another-machine", "NVIDIA X"))
    impostor.replies = [encode(other)]
    driver = Mock(device_count=lambda: 1, device_uuid=lambda _: "GPU-of-this-machine")
    monkeypatch.setattr(daemon, "driver", lambda: driver)
    findings = by_check(run_checks(impostor.directory, 3.0))
    assert findings["device"].verdict is Verdict.FAIL
    assert "CUDA_VISIBLE_DEVICES=7" in findings["device"].found
    assert "visible here: GPU-of-this-machine" in findings["device"].found


def test_device_nodes_that_are_not_accessible_are_named(
    impostor: Impostor, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = proto_status.DeviceInfo("cuda", "GPU-of-this-machine", "NVIDIA X")
    impostor.replies = [encode(welcome(info=cuda))]
    monkeypatch.setattr(daemon, "driver", Mock(side_effect=Refused(Code.NO_DEVICE, "no driver")))
    monkeypatch.setattr(daemon, "DEVICE_NODES", ("/dev/null", "/dev/nowhere"))
    found = by_check(run_checks(impostor.directory, 3.0))["device"].found
    assert "no driver" in found
    assert found.endswith("; not accessible here: /dev/nowhere")


# Storing and loading


def test_a_full_pool_is_not_changed(start_kvferryd: StartKvferryd) -> None:
    running = start_kvferryd(pool_bytes=8 * 4096)
    with RawClient(running.directory, "full") as raw:
        raw.register(num_blocks=8, page=4096)
        (last,) = run_checks(running.directory)[-1:]
        assert (last.check, last.verdict) == ("round trip", Verdict.WARN)
        assert "full" in last.found


def test_wrong_bytes_are_detected(kvferryd: LocalDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    real = OffloadClient.transfer_async

    def store_another(client: OffloadClient, job_id: int, spec: Any, wait_for: int = 0) -> None:
        real(client, job_id, (GPULoadStoreSpec([1]), spec[1]) if job_id == 1 else spec, wait_for)

    monkeypatch.setattr(OffloadClient, "transfer_async", store_another)
    last = run_checks(kvferryd.directory)[-1]
    assert (last.check, last.verdict) == ("round trip", Verdict.FAIL)
    assert "differ" in last.found


@pytest.mark.parametrize(("uptime", "verdict"), [(10.0, Verdict.OK), (1e4, Verdict.WARN)])
def test_a_partly_registered_pool(kvferryd: LocalDaemon, uptime: float, verdict: Verdict) -> None:
    with OffloadClient(kvferryd.directory) as client:
        status = client.status()
    pool = msgspec.structs.replace(status.pool, pinned_bytes=status.pool.size_bytes // 2)
    case = CheckContext(None, 1.0)
    case.status = msgspec.structs.replace(status, pool=pool, uptime_seconds=uptime)
    (finding,) = daemon.pool(case)
    assert finding.verdict is verdict
    assert "MiB registered (50%, being registered)" in finding.found


def test_a_round_trip_that_waits_for_the_pool_is_no_failure(start_kvferryd: StartKvferryd) -> None:
    running = start_kvferryd(reference_stall=4.0)
    with OffloadClient(running.directory, engine="doctor", timeout=TIMEOUT) as client:
        status = client.status()
    with OffloadClient(running.directory, engine="doctor", timeout=3.0) as client:
        case = CheckContext(None, 0.5)
        pool = msgspec.structs.replace(status.pool, pinned_bytes=0)
        case.client, case.status = client, msgspec.structs.replace(status, pool=pool)
        (finding,) = daemon.round_trip(case)
    assert finding.verdict is Verdict.WARN
    assert "the pool to be registered" in finding.found
