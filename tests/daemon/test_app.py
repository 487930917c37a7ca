"""A daemon that cannot serve says so in one line with its code, and exits with status 2."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvferry.client import LocalDaemon, OffloadClient
from kvferry.testing.engine import until
from kvferry.testing.plugin import StartKvferryd


@pytest.fixture
def refused(tmp_path: Path) -> Callable[..., str]:
    """Run kvferryd in a directory of its own; it has to refuse, and this is what it says."""

    def run(*arguments: object, **named: object) -> str:
        flags = {"runtime_dir": tmp_path, "pool_size": 1 << 20, **named}
        command = [sys.executable, "-m", "kvferry.daemon", *map(str, arguments)]
        for name, value in flags.items():
            command += [f"--{name.replace('_', '-')}", str(value)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        assert done.returncode == 2, done.stderr
        assert "Traceback" not in done.stderr, done.stderr
        assert not list(tmp_path.glob("*/*.sock"))
        return done.stderr

    return run


@pytest.mark.parametrize("package", ["structlog", "uvloop", "prometheus_client", "xxhash"])
def test_a_package_that_is_missing_is_named(package: str) -> None:
    """As where the client alone was installed; by `python -m` and by the script."""
    missing = f"import sys; sys.modules[{package!r}] = None; "
    for run in (
        "from runpy import run_module; run_module('kvferry.daemon', run_name='__main__')",
        "from kvferry.daemon.__main__ import main; main()",
    ):
        command = [sys.executable, "-c", missing + run]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        install = "pip install '.[daemon]' in a checkout of kvferry"
        said = f"kvferryd: {package} is not installed: {install}\n"
        assert (done.returncode, done.stderr) == (2, said)


@pytest.mark.parametrize("device", ["7", "GPU-00000000-0000-0000-0000-000000000000", "banana"])
def test_a_missing_device_is_refused(refused: Callable[..., str], device: str) -> None:
    assert "no_device" in refused(device=device)


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="here is a driver")
def test_without_a_driver_the_cpu_device_is_suggested(refused: Callable[..., str]) -> None:
    assert "--device cpu" in refused(device="0")


def test_the_cpu_in_any_spelling(start_kvferryd: StartKvferryd) -> None:
    with OffloadClient(start_kvferryd("CPU").directory) as client:
        assert client.daemon.device.kind == "cpu"


def test_a_runtime_directory_too_long(refused: Callable[..., str], tmp_path: Path) -> None:
    said = refused(runtime_dir=tmp_path / ("d" * 120))
    assert "bad_config" in said
    assert "runtime_dir" in said


def test_a_runtime_directory_that_is_a_file(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "bad_config" in refused(runtime_dir=tmp_path / "file")


def test_a_wrong_flag_or_file_is_refused(refused: Callable[..., str], tmp_path: Path) -> None:
    """Which are wrong: tests/daemon/test_config.py."""
    assert "bad_config" in refused(pool_size="much")
    path = tmp_path / "kvferryd.toml"
    path.write_text("device = ")
    said = refused(config=path)
    assert "bad_config" in said
    assert str(path) in said


@pytest.mark.parametrize("taken", [True, False])
@pytest.mark.parametrize("key", ["metrics_listen", "events_publish"])
def test_an_address_that_cannot_be_used_is_refused(
    refused: Callable[..., str], key: str, taken: bool
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        place = f"127.0.0.1:{other.getsockname()[1]}" if taken else "nowhere"
        said = refused(**{key: f"tcp://{place}" if key == "events_publish" else place})
    assert "bad_config" in said
    assert key.replace("_", ".") in said


@pytest.fixture
def start(short_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run kvferryd behind some shell commands until it ends by itself."""

    def run(before: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        kvferryd = [sys.executable, "-m", "kvferry.daemon", "--pool-size", "1MiB"]
        command = ["sh", "-c", f'{before} exec "$@"', "sh", *kvferryd, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=50)

    return run


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
@pytest.mark.parametrize("inodes", [3, 4, 5])  # room for the lock, then for one socket more each
def test_a_file_system_that_is_full(
    start: Callable[..., subprocess.CompletedProcess[str]], short_path: Path, inodes: int
) -> None:
    check_full(start, short_path, f"nr_inodes={inodes}")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_a_full_file_system_is_refused(
    start: Callable[..., subprocess.CompletedProcess[str]], short_path: Path
) -> None:
    """There is a lock file, and its holder cannot write its pid."""
    check_full(start, short_path, "size=4k", "head -c 4096 /dev/zero > {place}/filled;")


def check_full(
    start: Callable[..., subprocess.CompletedProcess[str]],
    place: Path,
    options: str,
    fill: str = "",
) -> None:
    """In a mount namespace of its own, which ends with the daemon."""
    mount = f"mount -t tmpfs -o {options} none {place} &&"
    command = f'{mount} {fill.format(place=place)} "$@"; status=$?; find {place}; exit $status'
    done = start(f"unshare -m sh -c '{command}' sh \"$@\"; exit;", "--runtime-dir", place)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("kvferryd: [bad_config] ")
    assert "No space left on device" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert ".sock" not in done.stdout


@pytest.mark.parametrize("mib", [40, 200, 600, 1100])
def test_little_address_space(
    start: Callable[..., subprocess.CompletedProcess[str]], short_path: Path, mib: int
) -> None:
    """Below some of these OpenBLAS and libzmq would end the process, in words of their own."""
    done = start(f"ulimit -v {mib << 10};", "--runtime-dir", short_path)
    assert done.returncode == 2, done.stderr
    assert "bytes of address space" in done.stderr
    assert "ulimit -v" in done.stderr
    assert str(mib << 20) in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert list(short_path.rglob("*.sock")) == []


NO_THREADS = """
import sys, threading
from kvferry.daemon.__main__ import main

start = threading.Thread.start
def fail(thread):
    if thread.name == sys.argv[1]:
        raise RuntimeError("can't start new thread")
    start(thread)

threading.Thread.start = fail
main(["--pool-size", "1MiB", "--runtime-dir", sys.argv[2]])
"""


def test_no_threads_are_left(short_path: Path) -> None:
    command = [sys.executable, "-c", NO_THREADS, "kvferry-pool", str(short_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert done.returncode == 2
    said = done.stderr.splitlines()[-1]
    assert said.startswith("kvferryd: [bad_config] no memory or threads left")
    assert "Traceback" not in done.stderr
    assert list(short_path.rglob("*.sock")) == []


@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"])
def test_standard_streams_that_are_closed(short_path: Path, closed: str) -> None:
    """It serves, and nothing else gets the number that messages are written to."""
    command = [sys.executable, "-m", "kvferry.daemon", "--pool-size", "1MiB"]
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh", *command, "--runtime-dir", str(short_path)]
    process = subprocess.Popen(shell)
    try:
        until((short_path / "cpu" / "kvferry.sock").exists, 30)
        with OffloadClient(short_path / "cpu") as client:
            assert client.status().pid == process.pid
        assert os.readlink(f"/proc/{process.pid}/fd/2") == os.devnull
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


def test_a_refusal_with_closed_stderr(
    start: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    assert start("exec 2>&-;", "--device", "banana").returncode == 2


def test_private_to_its_user(kvferryd: LocalDaemon) -> None:
    assert os.stat(kvferryd.directory).st_mode & 0o077 == 0
    until(lambda: "serving" in kvferryd.log())
