"""Two daemons share a Mooncake Store in the demo, with real processes of Mooncake."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from rich.progress import Progress

from kvferry.testing import demo_cluster
from kvferry.testing.engine import until
from kvferry.testing.mooncake_store import INSTALL, MooncakeStore, is_installed
from support.time_limits import TIMEOUT

pytestmark = pytest.mark.skipif(not is_installed(), reason=f"Mooncake is not installed: {INSTALL}")


def test_without_mooncake_the_command_that_installs_it_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo_cluster, "is_installed", lambda: False)
    assert demo_cluster.main([]) == 2
    install = "pip install '.[mooncake]' in a checkout of kvferry"
    assert capsys.readouterr().out == f"Mooncake is not installed: {install}\n"


def test_the_packages_of_a_missing_library_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reason = "libibverbs.so.1: cannot open shared object file: No such file or directory"
    loader = f"echo 'mooncake_master: error while loading shared libraries: {reason}'; exit 127"
    store = partial(MooncakeStore, commands=(["sh", "-c", loader], ()))
    monkeypatch.setattr(demo_cluster, "MooncakeStore", store)
    assert demo_cluster.main([]) == 1
    output = capsys.readouterr().out
    assert f"mooncake_master cannot be started: {reason}; " in output
    assert "apt-get install libcurl4 libibverbs1 libnuma1" in output


def test_the_demo_detects_wrong_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engine A stores other bytes than engine B expects."""

    def fill(engine: demo_cluster.ClusterEngine) -> None:
        engine._pages[...] = 7

    monkeypatch.setattr(demo_cluster.ClusterEngine, "fill", fill)
    with Progress(disable=True) as progress:
        report = demo_cluster.play(4, progress)
    assert report.wrong == 4


def processes_of(session: int) -> list[str]:
    """The command lines of the processes of a session that have not ended."""
    found = list[str]()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(process.name)) == session:
                found.append((process / "cmdline").read_text())
        except (ProcessLookupError, FileNotFoundError):
            continue
    return [command for command in found if command]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_demo_leaves_no_process(number: signal.Signals) -> None:
    """The store of such a process has open ports, and its daemons have large pools."""
    command = [sys.executable, "-m", "kvferry.testing.demo_cluster"]
    demo = subprocess.Popen(command, start_new_session=True)
    try:
        until(lambda: any("mooncake tier" in each for each in processes_of(demo.pid)))
        demo.send_signal(number)
        assert demo.wait(TIMEOUT) == 130
        until(lambda: not processes_of(demo.pid))
    finally:
        with suppress(ProcessLookupError):
            os.killpg(demo.pid, signal.SIGKILL)
        demo.wait()
