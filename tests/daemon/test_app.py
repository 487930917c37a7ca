"""Start of the daemon. If it cannot serve, it prints one line with a code and exits with 2."""

from __future__ import annotations

import os
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import structlog

from kvferry.client import LocalDaemon, OffloadClient
from kvferry.daemon.app import main
from kvferry.testing.engine import until
from support.time_limits import TIMEOUT


@pytest.fixture
def start_refused(tmp_path: Path) -> Callable[..., str]:
    """Run kvferryd in its own directory. It must exit with status 2. Returns its error output."""

    def run(*arguments: object, **flags: object) -> str:
        flags = {"runtime_dir": tmp_path, "pool_size": 1 << 20, **flags}
        command = [sys.executable, "-m", "kvferry.daemon", *map(str, arguments)]
        for name, value in flags.items():
            command += [f"--{name.replace('_', '-')}", str(value)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
        assert done.returncode == 2, done.stderr
        assert "Traceback" not in done.stderr, done.stderr
        assert not list(tmp_path.glob("*/*.sock"))
        return done.stderr

    return run


MODULE = "from runpy import run_module; run_module('kvferry.daemon', run_name='__main__')"
SCRIPT = "from kvferry.daemon.__main__ import main; main()"


@pytest.mark.parametrize(
    ("package", "run"),
    [
        ("structlog", MODULE),
        ("uvloop", SCRIPT),
        ("prometheus_client", MODULE),
        ("xxhash", SCRIPT),
    ],
)
def test_a_missing_package_is_reported(package: str, run: str) -> None:
    """Packages are missing if only the client is installed. Tests `python -m` and the script."""
    missing = f"import sys; sys.modules[{package!r}] = None; "
    command = [sys.executable, "-c", missing + run]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    install = "pip install '.[daemon]' in a checkout of kvferry"
    message = f"kvferryd: {package} is not installed: {install}\n"
    assert (done.returncode, done.stderr) == (2, message)


TIER = "--tiers-disk-path=FOLDER/tier --tiers-disk-size=64MiB --tiers-disk-key-file=FOLDER/file"


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--pool-size=much", "pool.size"),  # test_config.py has the other values
        ("--config=FOLDER/kvferryd.toml", "FOLDER/kvferryd.toml"),
        ("--runtime-dir=FOLDER/file", "FOLDER/file"),
        (f"--runtime-dir=FOLDER/{'d' * 120}", "runtime_dir"),
        (TIER, "tiers.disk.key_file = 'FOLDER/file' has mode 0640"),
    ],
)
def test_a_configuration_that_cannot_be_used_is_refused(
    tmp_path: Path,
    flags: str,
    named: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "kvferryd.toml").write_text("device = ")
    (tmp_path / "file").write_text("")
    (tmp_path / "file").chmod(0o640)
    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr(sys, "stderr", sys.stderr)  # which the daemon replaces
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    filled = flags.replace("FOLDER", str(tmp_path)).split()
    with pytest.raises(SystemExit) as ended:
        main([f"--runtime-dir={tmp_path}", "--pool-size=1MiB", *filled])
    structlog.reset_defaults()
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("kvferryd: [bad_config] ")
    assert named.replace("FOLDER", str(tmp_path)) in line
    assert ended.value.code == 2
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("--device=7", "[no_device]"),
        ("--metrics-listen=127.0.0.1:PORT", "[bad_config] "),
        ("--events-publish=tcp://127.0.0.1:PORT", "[bad_config] "),
    ],
)
def test_a_device_or_address_that_cannot_be_used_is_refused(
    short_path: Path, flag: str, expected: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        flag = flag.replace("PORT", str(other.getsockname()[1]))
        command = [sys.executable, "-m", "kvferry.daemon", "--pool-size=1MiB", flag]
        command += ["--runtime-dir", str(short_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 2, done.stderr
    assert f"kvferryd: {expected}" in done.stderr
    assert flag.partition("=")[0].strip("-").replace("-", ".") in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(short_path.glob("*/*.sock"))


@pytest.fixture
def start(short_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run shell commands and then kvferryd, until it ends."""

    def run(before: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        kvferryd = [sys.executable, "-m", "kvferry.daemon", "--pool-size", "1MiB"]
        command = ["sh", "-c", f'{before} exec "$@"', "sh", *kvferryd, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)

    return run


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
@pytest.mark.parametrize("inodes", [3, 5])  # for the lock, and for 0 or 2 sockets
def test_a_file_system_without_free_inodes_is_refused(
    start: Callable[..., subprocess.CompletedProcess[str]], short_path: Path, inodes: int
) -> None:
    check_full(start, short_path, f"nr_inodes={inodes}")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_a_full_file_system_is_refused(
    start: Callable[..., subprocess.CompletedProcess[str]], short_path: Path
) -> None:
    """The daemon creates the lock file, but cannot write its pid."""
    check_full(start, short_path, "size=4k", "head -c 4096 /dev/zero > {path}/filled;")


def check_full(
    start: Callable[..., subprocess.CompletedProcess[str]],
    path: Path,
    options: str,
    fill: str = "",
) -> None:
    """Run the daemon on a full file system, in a mount namespace that ends with the daemon."""
    mount = f"mount -t tmpfs -o {options} none {path} &&"
    command = f'{mount} {fill.format(path=path)} "$@"; status=$?; find {path}; exit $status'
    done = start(f"unshare -m sh -c '{command}' sh \"$@\"; exit;", "--runtime-dir", path)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("kvferryd: [bad_config] ")
    assert "No space left on device" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert ".sock" not in done.stdout


@pytest.mark.parametrize("mib", [40, 1100])
def test_a_small_limit_of_address_space_is_refused(
    start: Callable[..., subprocess.CompletedProcess[str]], short_path: Path, mib: int
) -> None:
    """Without the check, OpenBLAS or libzmq would end the process with their own messages."""
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


def test_a_failed_start_of_a_thread_is_refused(short_path: Path) -> None:
    command = [sys.executable, "-c", NO_THREADS, "kvferry-pool", str(short_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 2
    message = done.stderr.splitlines()[-1]
    assert message.startswith("kvferryd: [bad_config] no memory or threads left")
    assert "Traceback" not in done.stderr
    assert list(short_path.rglob("*.sock")) == []


def test_a_path_that_the_locale_does_not_have_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "kvferryd.toml"
    file.write_text(f'runtime_dir = "{tmp_path}/ü"', encoding="utf-8")
    command = [sys.executable, "-m", "kvferry.daemon", "--config", str(file)]
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        command, env=os.environ | locale, capture_output=True, text=True, timeout=TIMEOUT
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("kvferryd: [bad_config] runtime_dir = ")
    assert "PYTHONUTF8=1" in done.stderr


# As another user, because the limit does not apply to root.
FEW_THREADS = """
import os, resource, sys
from kvferry.daemon.app import main

resource.setrlimit(resource.RLIMIT_NPROC, (12, 12))
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(54321)
    os.setuid(54321)
main(["--pool-size", "1MiB", "--runtime-dir", sys.argv[1]])
"""


def test_a_start_with_too_few_threads_is_refused(short_path: Path) -> None:
    command = [sys.executable, "-c", FEW_THREADS, str(short_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 2, done.stderr
    assert re.fullmatch(
        r"kvferryd: \[bad_config\] \d+ threads can be started, but \d+ are needed; raise "
        r"LimitNPROC and TasksMax .*\n",
        done.stderr,
    )


def test_a_daemon_serves_with_closed_standard_streams(short_path: Path) -> None:
    """No other file gets the descriptor number of standard error."""
    command = [sys.executable, "-m", "kvferry.daemon", "--pool-size", "1MiB"]
    shell = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command, "--runtime-dir", str(short_path)]
    process = subprocess.Popen(shell)
    try:
        until((short_path / "cpu" / "kvferry.sock").exists)
        with OffloadClient(short_path / "cpu") as client:
            assert client.status().pid == process.pid
        assert os.readlink(f"/proc/{process.pid}/fd/2") == os.devnull
        process.terminate()
        assert process.wait(TIMEOUT) == 0
    finally:
        process.kill()
        process.wait()


def test_a_refused_start_with_closed_stderr_exits_with_status_2(
    start: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    assert start("exec 2>&-;", "--device", "banana").returncode == 2


@pytest.mark.parametrize(
    ("name", "folder"),
    [("PROMETHEUS_MULTIPROC_DIR", "missing"), ("prometheus_multiproc_dir", ".")],
)
def test_an_engines_directory_of_metrics_is_not_used(
    name: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine's container sets it, and the daemon inherits it."""
    monkeypatch.setenv(name, str(tmp_path / folder))
    with LocalDaemon(pool_bytes=1 << 20):
        assert not list(tmp_path.iterdir())
