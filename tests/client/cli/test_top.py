"""`kvferry top` on a terminal, and with --once."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from kvferry.client import LocalDaemon, OffloadClient, shared_empty
from kvferry.client.cli import main
from support.time_limits import TIMEOUT


@pytest.fixture
def daemon() -> Iterator[LocalDaemon]:
    with LocalDaemon(pool_bytes=16 << 20) as daemon:
        yield daemon


def test_once(daemon: LocalDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    with OffloadClient(daemon.directory, engine="llama") as client:
        client.register_kv_caches(
            {"layer": shared_empty((16, 4096))}, num_blocks=16, host_bytes=8 << 20
        )
        with pytest.raises(SystemExit) as ended:
            main(["top", "--once", "-n", "0.2", "-d", str(daemon.directory)])
    assert not ended.value.code
    output = capsys.readouterr().out
    assert "8 MiB of 16 MiB" in output
    assert "llama" in output


def test_once_without_a_daemon(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["top", "--once", "-d", str(tmp_path)])
    assert ended.value.code == 1
    assert "no daemon runs here" in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_once_beside_a_daemon_that_does_not_answer(
    daemon: LocalDaemon, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    """The command has never been connected, so it shows no duration."""
    daemon.process.send_signal(number)
    try:
        with pytest.raises(SystemExit) as ended:
            main(["top", "--once", "-d", str(daemon.directory)])
    finally:
        daemon.process.send_signal(signal.SIGCONT)
    assert ended.value.code == 1
    output = capsys.readouterr().out
    assert "no reply from a daemon in time" in output
    assert "gone for" not in output


class TopTerminal:
    """kvferry top on a terminal of 100 x 30."""

    def __init__(self, directory: Path) -> None:
        terminal, child_end = pty.openpty()
        self.descriptor = terminal
        command = [sys.executable, "-m", "kvferry.client.cli", "top", "-n", "0.1"]
        environ = os.environ | {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"}
        self.process = subprocess.Popen(
            [*command, "-d", str(directory)],
            env=environ,
            pass_fds=[child_end],
            preexec_fn=partial(os.login_tty, child_end),
        )
        os.close(child_end)
        self.text = ""

    def wait_until(self, condition: Callable[[str], object], timeout: float = TIMEOUT) -> None:
        """Wait until the output since the last call fulfils the condition."""
        deadline = time.monotonic() + timeout
        self.text = ""
        while not condition(self.text):
            assert time.monotonic() < deadline, self.text[-3000:]
            if select.select([self.descriptor], [], [], 0.1)[0]:
                try:
                    output = os.read(self.descriptor, 65536).decode(errors="replace")
                except OSError:  # the other end is closed
                    break
                self.text += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.descriptor)


@pytest.fixture
def terminal(daemon: LocalDaemon) -> Iterator[TopTerminal]:
    terminal = TopTerminal(daemon.directory)
    yield terminal
    terminal.close()


@pytest.mark.parametrize("key", ["q", "\x03"])
def test_top_exits_on_q_and_ctrl_c(terminal: TopTerminal, key: str) -> None:
    terminal.wait_until(lambda text: "healthy" in text)
    os.write(terminal.descriptor, key.encode())
    terminal.wait_until(lambda text: terminal.process.poll() is not None)
    assert terminal.process.wait(TIMEOUT) == 0


def test_top_shows_a_disconnect_and_a_reconnect(daemon: LocalDaemon, terminal: TopTerminal) -> None:
    terminal.wait_until(lambda text: f"pid {daemon.pid}" in text)
    daemon.kill()
    terminal.wait_until(lambda text: "gone for" in text)
    with LocalDaemon(pool_bytes=16 << 20, runtime_dir=daemon.runtime_dir) as second:
        terminal.wait_until(lambda text: f"pid {second.pid}" in text and "reconnected" in text)
        os.write(terminal.descriptor, b"q")
        terminal.wait_until(lambda text: terminal.process.poll() is not None)
