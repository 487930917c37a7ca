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
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from kvferry.client import LocalDaemon, OffloadClient, shared_empty
from support.command_line import kvferry
from support.time_limits import TIMEOUT


def test_once(daemon: LocalDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    with OffloadClient(daemon.directory, engine="llama") as client:
        client.register_kv_caches(
            {"layer": shared_empty((16, 4096))}, num_blocks=16, host_bytes=8 << 20
        )
        assert kvferry("top", "--once", "-n", "0.2", "-d", daemon.directory) == 0
    output = capsys.readouterr().out
    assert "8 MiB of 64 MiB" in output
    assert "llama" in output


def test_once_without_a_daemon(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert kvferry("top", "--once", "-d", tmp_path) == 1
    assert "no daemon runs here" in capsys.readouterr().out


def test_once_beside_a_daemon_that_does_not_answer(
    kvferryd: LocalDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command has never been connected, so it shows no duration."""
    kvferryd.process.send_signal(signal.SIGSTOP)
    try:
        assert kvferry("top", "--once", "-d", kvferryd.directory) == 1
    finally:
        kvferryd.process.send_signal(signal.SIGCONT)
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
        self.text = self.output = ""

    def wait_until(self, condition: Callable[[str], object], timeout: float = TIMEOUT) -> None:
        """Wait until the output since the last call fulfils the condition, or the process ends."""
        deadline = time.monotonic() + timeout
        self.text = ""
        while not condition(self.text):
            assert time.monotonic() < deadline, self.text[-3000:]
            if select.select([self.descriptor], [], [], 0.1)[0]:
                try:
                    output = os.read(self.descriptor, 65536).decode(errors="replace")
                except OSError:  # the other end is closed
                    break
                self.output += output
                self.text += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.descriptor)


@contextmanager
def top_terminal(daemon: LocalDaemon) -> Iterator[TopTerminal]:
    terminal = TopTerminal(daemon.directory)
    try:
        yield terminal
    finally:
        terminal.close()


@pytest.mark.parametrize(
    ("end", "status"), [("\x03", 0), (signal.SIGTERM, 128 + 15), (signal.SIGHUP, 128 + 1)]
)
def test_top_ends_and_restores_the_terminal(
    daemon: LocalDaemon, end: str | signal.Signals, status: int
) -> None:
    with top_terminal(daemon) as terminal:
        terminal.wait_until(lambda text: "healthy" in text)
        if isinstance(end, signal.Signals):
            terminal.process.send_signal(end)
            terminal.process.send_signal(end)
        else:
            os.write(terminal.descriptor, end.encode())
        terminal.wait_until(lambda text: terminal.process.poll() is not None)
        assert terminal.process.wait(TIMEOUT) % 256 == status
        assert terminal.output.rstrip().endswith("\x1b[?1049l")


def test_top_shows_a_disconnect_and_a_reconnect(kvferryd: LocalDaemon) -> None:
    with top_terminal(kvferryd) as terminal:
        terminal.wait_until(lambda text: f"pid {kvferryd.pid}" in text)
        kvferryd.kill()
        terminal.wait_until(lambda text: "gone for" in text)
        with LocalDaemon(pool_bytes=16 << 20, runtime_dir=kvferryd.runtime_dir) as second:
            terminal.wait_until(lambda text: f"pid {second.pid}" in text and "reconnected" in text)
            os.write(terminal.descriptor, b"q")
            terminal.wait_until(lambda text: terminal.process.poll() is not None)
