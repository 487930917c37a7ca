"""LocalDaemon: a daemon that this process starts."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kvferry.client import Code, Gone, LocalDaemon, Refused
from kvferry.testing.engine import until


def test_a_local_daemon_in_a_directory_in_use_is_refused(kvferryd: LocalDaemon) -> None:
    """LocalDaemon must not take the socket of the other daemon for its own."""
    with pytest.raises(Refused, match=f"did not start: .*{kvferryd.pid}") as refused:
        LocalDaemon(runtime_dir=kvferryd.runtime_dir, pool_bytes=1 << 20)
    assert refused.value.code == Code.ENDPOINT_IN_USE


def test_a_local_daemon_that_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon ends without a refusal, so the error has only its output."""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(Gone, match="kvferryd did not start") as gone:
        LocalDaemon(pool_bytes=1 << 20)
    assert gone.value.code == Code.DAEMON_GONE


def test_a_local_daemon_ends_with_its_parent(short_path: Path) -> None:
    """Also if a thread that has ended since started it."""
    program = (
        "import sys, threading, time; from pathlib import Path; from kvferry.client import *; "
        "start = lambda: LocalDaemon(pool_bytes=1 << 20, runtime_dir=Path(sys.argv[1])); "
        "thread = threading.Thread(target=start); thread.start(); thread.join(); "
        "print(flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", program, str(short_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        try:
            assert parent.stdout is not None
            assert parent.stdout.readline()
            (lock,) = short_path.glob("*/lock")
            daemon = os.pidfd_open(int(lock.read_text()))
        finally:
            parent.kill()
    try:
        assert select.select([daemon], [], [], 60.0)[0]  # it has ended
    finally:
        os.close(daemon)


def test_an_interrupted_start_leaves_no_daemon(
    monkeypatch: pytest.MonkeyPatch, short_path: Path
) -> None:
    """An interrupt comes from Ctrl-C in a notebook, or from a test's timeout."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tempfile, "tempdir", str(short_path))
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt):
            LocalDaemon(pool_bytes=1 << 20)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert list(short_path.iterdir()) == []
    until(lambda: not find_processes(short_path))


def find_processes(directory: Path) -> list[str]:
    """The pids of processes with a path below the directory in their arguments."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{directory}/" in (folder / "cmdline").read_text():
                found.append(folder.name)
    return found
