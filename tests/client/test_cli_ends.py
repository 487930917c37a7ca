"""How commands end when they are made to: by signals, and by where their output goes."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvferry.client import LocalDaemon, OffloadClient, shared_empty
from kvferry.client.cli.bench import below

KVFERRY = [sys.executable, "-m", "kvferry.client.cli"]
PATIENCE = 30.0


@pytest.fixture(scope="module")
def daemon() -> Iterator[LocalDaemon]:
    with LocalDaemon(pool_bytes=16 << 20) as daemon:
        yield daemon


class InterruptedBench:
    """kvferry bench in a group of its own, whose daemons have their folders in `place`."""

    def __init__(self, what: str, place: Path, before: tuple[str, ...] = ()) -> None:
        self.process = subprocess.Popen(
            [*before, *KVFERRY, "bench", "--device", "cpu", "--quick", "--what", what],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=os.environ | {"TMPDIR": str(place)},
            start_new_session=True,
        )
        self._place = place
        self._await(lambda: list(place.glob("kvferry-*/cpu/kvferry.sock")))

    def await_process(self, word: str) -> None:
        """Until one of its processes has this in its command line."""
        self._await(lambda: any(word in line for line in self.processes()))

    def processes(self) -> list[str]:
        """The command lines of those of its session that there are."""
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
        """Its exit status, and what it said."""
        (os.killpg if group else os.kill)(self.process.pid, number)
        _, said = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, said.decode()

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()

    def _await(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline
            assert self.process.poll() is None
            time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("seconds", [0, 0.5])
def test_a_bench_that_is_ended_takes_its_daemon_along(
    short_path: Path, number: signal.Signals, seconds: float
) -> None:
    """Wherever it is. A terminal that is closed says so to all that run in it."""
    bench = InterruptedBench("queued", short_path)
    try:
        time.sleep(seconds)
        status, said = bench.end(number, group=number == signal.SIGHUP)
        assert (status, said) == (128 + number, "")
        assert bench.processes() == []
        assert list(short_path.iterdir()) == []
    finally:
        bench.close()


CAUGHT = """
import os, sys, time, weakref
from kvferry.client import cli
from kvferry.client.cli import app

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

app.app = command
cli.main([])
"""
"""A signal that comes while Python runs a callback, where no exception leaves."""


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)]
)
def test_a_command_that_is_ended_in_a_callback_ends(number: int, status: int) -> None:
    """A collector's, or a weak set's: there it was ignored, and all that came after it."""
    command = [sys.executable, "-c", CAUGHT, str(int(number))]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert (ended.returncode, ended.stderr) == (status, "")


def test_who_wants_no_hangup_has_none(short_path: Path) -> None:
    bench = InterruptedBench("latency", short_path, before=("nohup",))
    try:
        os.kill(bench.process.pid, signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            bench.process.wait(0.5)
        assert bench.end(signal.SIGTERM, group=False)[0] == 128 + signal.SIGTERM
    finally:
        bench.close()


@pytest.mark.parametrize("seconds", [0, 0.5])
def test_a_bench_that_is_interrupted_says_nothing(short_path: Path, seconds: float) -> None:
    """Ctrl-c goes to all in its group, and is no failure of those that help it, or begin to."""
    bench = InterruptedBench("latency", short_path)
    try:
        bench.await_process("bare.py")
        time.sleep(seconds)
        assert bench.end(signal.SIGINT, group=True) == (130, "")
        assert bench.processes() == []
    finally:
        bench.close()


def test_an_interrupt_while_messages_are_sent_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that takes them is not waited for in vain."""

    def interrupted(times: int, call: Callable[[], object]) -> list[float]:
        call()
        raise KeyboardInterrupt

    monkeypatch.setattr(below, "_spaced", interrupted)
    with pytest.raises(KeyboardInterrupt):
        below._sends(50)
    assert [one for one in threading.enumerate() if "_eat" in one.name] == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_top_leaves_the_terminal_as_it_was(daemon: LocalDaemon, number: signal.Signals) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["TERM"] = "xterm-256color"
        os.execv(sys.executable, [*KVFERRY, "top", "-n", "0.1", "-d", str(daemon.directory)])
    shown, told, deadline = b"", False, time.monotonic() + PATIENCE
    while select.select([terminal], [], [], max(0, deadline - time.monotonic()))[0]:
        try:
            shown += os.read(terminal, 65536)
        except OSError:  # it has ended
            break
        if b"healthy" in shown and not told:
            os.kill(pid, number)
            os.kill(pid, number)
            told = True
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 128 + number
    assert shown.rstrip().endswith(b"\x1b[?1049l")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_locale_without_the_letters(daemon: LocalDaemon, encoding: str) -> None:
    """Bars are no bars then; for programs nothing is lost."""
    environ = os.environ | {"PYTHONIOENCODING": encoding}

    def said(*arguments: str) -> bytes:
        command = [*KVFERRY, *arguments, "-d", str(daemon.directory)]
        return subprocess.run(command, env=environ, capture_output=True, check=True).stdout

    with OffloadClient(daemon.directory, engine="zürich-東京") as client:
        client.register_kv_caches({"layer": shared_empty((8, 64))}, num_blocks=8, host_bytes=512)
        assert b"z?rich-??" in said("status").replace(b"\xfc", b"?")
        assert b"host memory" in said("top", "--once")
        names = [engine["name"] for engine in json.loads(said("status", "--json"))["engines"]]
    assert "zürich-東京" in names
