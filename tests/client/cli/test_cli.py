"""How commands end by signals, and what they print in other encodings."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvferry.client import LocalDaemon, OffloadClient, shared_empty
from support.time_limits import TIMEOUT

KVFERRY = [sys.executable, "-m", "kvferry.client.cli"]


class BenchProcess:
    """kvferry bench in its own process group, without end.

    The runtime directories of its daemons are in `directory`.
    """

    def __init__(self, directory: Path, before: tuple[str, ...] = ()) -> None:
        self.process = subprocess.Popen(
            [*before, *KVFERRY, "bench", "--device", "cpu", "--quick", "--reps", "1000000"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=os.environ | {"TMPDIR": str(directory)},
            start_new_session=True,
        )
        try:
            self._wait_until(lambda: list(directory.glob("kvferry-*/cpu/kvferry.sock")))
        except BaseException:
            self.close()
            raise

    def processes(self) -> list[str]:
        """The command lines of the processes of its session."""
        lines = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                state = (folder / "stat").read_text().rpartition(")")[2].split()
                if int(state[3]) == self.process.pid and state[0] != "Z":
                    lines.append((folder / "cmdline").read_text().replace("\0", " "))
            except (OSError, IndexError):
                pass
        return lines

    def end(self, number: int, *, group: bool) -> tuple[int, str]:
        """Send a signal. Returns the exit status and standard error."""
        (os.killpg if group else os.kill)(self.process.pid, number)
        _, error = self.process.communicate(timeout=TIMEOUT)
        return self.process.returncode, error.decode()

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()

    def _wait_until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + TIMEOUT
        while not condition():
            assert time.monotonic() < deadline
            assert self.process.poll() is None
            time.sleep(0.05)


@pytest.mark.parametrize(
    ("number", "group"), [(signal.SIGTERM, False), (signal.SIGHUP, True), (signal.SIGINT, True)]
)
def test_a_terminated_bench_stops_its_daemon(
    short_path: Path, number: signal.Signals, group: bool
) -> None:
    """A closed terminal and Ctrl-C send their signals to all processes of the group."""
    bench = BenchProcess(short_path)
    try:
        assert bench.end(number, group=group) == (128 + number, "")
        assert bench.processes() == []
        assert list(short_path.iterdir()) == []
    finally:
        bench.close()


# A signal arrives while Python runs a callback, which propagates no exception.
IN_CALLBACK = """
import os, sys, time, weakref
from kvferry.client import cli
from kvferry.client.cli import commands

class Thing:
    pass

def callback(_):
    os.kill(os.getpid(), int(sys.argv[1]))

def command(*_, **__):
    for _ in range(2):
        thing = Thing()
        kept = weakref.ref(thing, callback)
        del thing
    time.sleep(30)

commands.app = command
cli.main([])
"""


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)]
)
def test_a_signal_in_a_callback_ends_the_command(number: int, status: int) -> None:
    """A callback of the garbage collector, or of a weak set."""
    command = [sys.executable, "-c", IN_CALLBACK, str(int(number))]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    assert (ended.returncode, ended.stderr) == (status, "")


def test_nohup_ignores_sighup(short_path: Path) -> None:
    bench = BenchProcess(short_path, before=("nohup",))
    try:
        os.kill(bench.process.pid, signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            bench.process.wait(0.5)
        assert bench.end(signal.SIGTERM, group=False)[0] == 128 + signal.SIGTERM
    finally:
        bench.close()


def test_a_locale_that_cannot_encode_a_character(daemon: LocalDaemon) -> None:
    """Question marks replace bars. JSON output is complete."""
    environ = os.environ | {"PYTHONIOENCODING": "ascii"}

    def run_kvferry(*arguments: str) -> bytes:
        command = [*KVFERRY, *arguments, "-d", str(daemon.directory)]
        return subprocess.run(command, env=environ, capture_output=True, check=True).stdout

    with OffloadClient(daemon.directory, engine="zürich-東京") as client:
        client.register_kv_caches({"layer": shared_empty((8, 64))}, num_blocks=8, host_bytes=512)
        assert b"z?rich-??" in run_kvferry("status")
        assert b"host memory" in run_kvferry("top", "--once")
        names = [
            engine["name"] for engine in json.loads(run_kvferry("status", "--json"))["engines"]
        ]
    assert "zürich-東京" in names
