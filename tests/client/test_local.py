"""LocalDaemon: a daemon of this process."""

from __future__ import annotations

import contextlib
import signal
import sys
import tempfile
from pathlib import Path

import pytest

from kvferry.client import Code, Gone, LocalDaemon, Refused
from kvferry.testing.engine import until


def test_a_local_daemon_where_one_serves(kvferryd: LocalDaemon) -> None:
    """LocalDaemon tells, instead of taking the other's socket for its own."""
    with pytest.raises(Refused, match=f"did not start: .*{kvferryd.pid}") as refused:
        LocalDaemon(runtime_dir=kvferryd.runtime_dir, pool_bytes=1 << 20)
    assert refused.value.code == Code.ENDPOINT_IN_USE


def test_a_local_daemon_that_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    """It refused nothing: what it said is all there is."""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(Gone, match="kvferryd did not start") as gone:
        LocalDaemon(pool_bytes=1 << 20)
    assert gone.value.code == Code.DAEMON_GONE


def test_an_interrupted_start_leaves_no_daemon(
    monkeypatch: pytest.MonkeyPatch, short_path: Path
) -> None:
    """By ctrl-c in a notebook, or a test's timeout: nobody else could stop it."""

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
    until(lambda: not kvferryds(short_path))


def kvferryds(place: Path) -> list[str]:
    """The processes that were told of a folder there."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{place}/" in (folder / "cmdline").read_text():
                found.append(folder.name)
    return found
