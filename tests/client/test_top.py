"""`kvferry top`: what it draws of what it saw, and the real thing on a terminal."""

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
from io import StringIO
from math import sin
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from kvferry.client import Fingerprint, LocalDaemon, OffloadClient, shared_empty
from kvferry.client.cli import main
from kvferry.client.cli.panels import bar, screen, spark
from kvferry.client.cli.status import show
from kvferry.client.cli.watch import Look, Rates, Seen
from kvferry.proto import status as told

GIB = 1 << 30
WHOSE = Fingerprint("meta-llama/Llama-3.1-70B-Instruct", 2 << 20, rank=1, world_size=4)
SPACE = told.NamespaceStatus(
    WHOSE.name,
    WHOSE,
    "arc",
    ("llama-0",),
    32768,
    2 << 20,
    900,
    4,
    31860,
    0,
    0,
    12,
    93,
    7,
    1,
    2,
    38861,
)
STATUS = told.DaemonStatus(
    version="0.1.0",
    boot_id="boot",
    pid=4711,
    uptime_seconds=11520.0,
    device=told.DeviceInfo("cuda", "GPU-6f1b9c52-0000-0000-0000-000000000000", "NVIDIA H200"),
    pool=told.PoolStatus(128 * GIB, 96 * GIB, 72 * GIB),
    sessions=3,
    engines=(
        told.EngineStatus("llama-0", True, 1, 1, 1234),
        told.EngineStatus("[red]qwen", False, 1, 1, 0),
    ),
    totals=told.Totals(5, 4, 1 << 35, 1 << 34, 1, 2),
    errors={"busy": 3},
    copying=told.CopyStatus(
        "auto", told.CalibrationPoint(1 << 26, 5.5e10, 5.5e10), (), 65536, 65536
    ),
    health=told.HealthStatus(True, (), 0.000212, 3.2, 0.012, 12.0, 0.0001, 0.0002),
)


def later(status: told.DaemonStatus, seconds: float, stored: int, loaded: int) -> told.DaemonStatus:
    old = status.totals
    totals = msgspec.structs.replace(
        old,
        stored_bytes=old.stored_bytes + stored,
        loaded_bytes=old.loaded_bytes + loaded,
        stores=old.stores + 1000,
    )
    return msgspec.structs.replace(
        status, uptime_seconds=status.uptime_seconds + seconds, totals=totals
    )


@pytest.fixture
def seen() -> Seen:
    seen, status, space = Seen(Path("/run/kvferry/GPU-6f1b")), STATUS, SPACE
    for step in range(40):
        seen.take(Look(status, (space,)), now=100.0 + step)
        stored, loaded = int(4e10 * (1 + sin(step / 3)) / 2), int(5e10 * (1 + sin(step / 5)) / 2)
        status = later(status, 1.0, stored, loaded)
        space = msgspec.structs.replace(space, hits=space.hits + 9, misses=space.misses + 3)
    return seen


def drawn(*daemons: Seen, width: int = 100, now: float = 140.0) -> str:
    console = Console(width=width, record=True, highlight=False, file=StringIO())
    console.print(screen(daemons, now, width, "/run/kvferry"))
    text = console.export_text()
    assert all(len(line) <= width for line in text.splitlines())
    return text


def test_a_verification_is_shown_until_it_is_complete() -> None:
    for decided, shown in ((32 * GIB, True), (64 * GIB, False)):
        seen = Seen(Path("/run/kvferry/GPU-6f1b"))
        verification = told.VerificationStatus(64 * GIB, decided)
        seen.take(Look(msgspec.structs.replace(STATUS, verification=verification), ()), now=100.0)
        assert ("verified 50% of 64 GiB from before" in drawn(seen, now=101.0)) == shown


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_everything_is_on_it(seen: Seen, width: int) -> None:
    text = drawn(seen, width=width)
    rates = seen.rates
    for word in (
        "NVIDIA H200",
        "pid 4711",
        "healthy",
        f"{rates.store / 1e9:.2f} GB/s",
        f"{rates.load / 1e9:.2f} GB/s",
        "1,234 under way",
        "1,000 jobs/s",
        "72 GiB of 128 GiB",
        "75% registered",
        "97%",
        "75%",
        "llama-0",
        "[red]qwen (away)",
        "busy x3",
    ):
        assert word in text, word
    assert "waiting for its engine 12.0 s" in " ".join(text.replace("│", " ").split())
    assert ("Llama-3.1-70B-Instruct 2/4" in text) == (width >= 80)


def test_an_unhealthy_daemon_says_why(seen: Seen) -> None:
    health = told.HealthStatus(False, ("the lane has not moved for 31.2 s",))
    assert seen.look is not None
    status = msgspec.structs.replace(seen.look.status, health=health)
    seen.take(Look(status, ()), 141.0)
    assert "the lane has not moved for 31.2 s" in drawn(seen)


def test_a_daemon_that_goes_and_comes_back(seen: Seen) -> None:
    seen.miss("the daemon went away", 150.0)
    seen.miss("nobody answers", 152.0)
    gone = drawn(seen, now=153.0)
    assert "gone for 3.0 s: nobody answers" in gone
    assert "it was pid 4711" in gone
    assert seen.look is not None
    status = msgspec.structs.replace(STATUS, boot_id="other", pid=4712)
    seen.take(Look(status, ()), 160.0)
    back = drawn(seen, now=162.0)
    assert "back for 2.0 s" in back
    assert "pid 4712" in back
    assert "back for" not in drawn(seen, now=200.0)
    assert seen.rates == Rates()  # its totals began anew, and are nobody's rate


def test_nobody_is_there() -> None:
    assert "no daemon runs here (looked at /run/kvferry)" in drawn()


def test_bars_are_as_wide_as_they_should_be() -> None:
    for fraction in (0.0, 0.001, 0.3, 1.0, 1.5):
        assert len(bar([(fraction, "x", ""), (fraction, "y", "")], 10)) == 10
    assert bar([(0.001, "x", "")], 10).plain == "x" + 9 * "░"
    assert bar([(0.0, "x", "")], 10).plain == 10 * "░"


def test_a_spark_shows_the_last_and_never_hides_a_little() -> None:
    assert spark([0, 1, 50, 100], 100, 10) == " ▁▄█"
    assert spark([0, 1, 50, 100], 100, 2) == "▄█"
    assert spark([1.0], 1.0, 0) == ""


def test_names_move_no_cursor() -> None:
    """Here and in kvferry status: a client calls itself and its model what it likes."""
    name = "a\x1b[2J\x9bb"
    whose = Fingerprint(name, 2 << 20)
    space = msgspec.structs.replace(SPACE, fingerprint=whose, engines=(name,))
    engine = told.EngineStatus(name, True, 1, 1, 1)
    status = msgspec.structs.replace(STATUS, engines=(engine,))
    seen, console = Seen(Path("/run/kvferry/cpu")), Console(width=160, record=True, file=StringIO())
    seen.take(Look(status, (space,)), now=100.0)
    show(status, (space,), console)
    for text in (drawn(seen, width=160), console.export_text()):
        assert all(line.isprintable() for line in text.splitlines())
        assert text.count(repr(name)[1:-1]) >= 2


# The real thing


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
    """For how long it has not, nobody has seen."""
    daemon.process.send_signal(number)
    try:
        with pytest.raises(SystemExit) as ended:
            main(["top", "--once", "-d", str(daemon.directory)])
    finally:
        daemon.process.send_signal(signal.SIGCONT)
    assert ended.value.code == 1
    output = capsys.readouterr().out
    assert "no daemon answered in time" in output
    assert "gone for" not in output


class Terminal:
    """kvferry top on a terminal of 100 x 30."""

    def __init__(self, directory: Path) -> None:
        ours, theirs = pty.openpty()
        self.ours = ours
        command = [sys.executable, "-m", "kvferry.client.cli", "top", "-n", "0.1"]
        environ = os.environ | {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"}
        self.process = subprocess.Popen(
            [*command, "-d", str(directory)],
            env=environ,
            pass_fds=[theirs],
            preexec_fn=partial(os.login_tty, theirs),
        )
        os.close(theirs)
        self.text = ""

    def until(self, condition: Callable[[str], object], timeout: float = 20.0) -> None:
        """Until what was drawn since the last time fulfils it."""
        deadline = time.monotonic() + timeout
        self.text = ""
        while not condition(self.text):
            assert time.monotonic() < deadline, self.text[-3000:]
            if select.select([self.ours], [], [], 0.1)[0]:
                try:
                    drawn = os.read(self.ours, 65536).decode(errors="replace")
                except OSError:  # the other end is closed
                    break
                self.text += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.ours)


@pytest.fixture
def terminal(daemon: LocalDaemon) -> Iterator[Terminal]:
    terminal = Terminal(daemon.directory)
    yield terminal
    terminal.close()


@pytest.mark.parametrize("key", ["q", "\x03"])
def test_it_ends_on_q_and_ctrl_c(terminal: Terminal, key: str) -> None:
    terminal.until(lambda text: "healthy" in text)
    os.write(terminal.ours, key.encode())
    terminal.until(lambda text: terminal.process.poll() is not None)
    assert terminal.process.wait(20) == 0


def test_it_says_when_a_daemon_goes_and_comes_back(daemon: LocalDaemon, terminal: Terminal) -> None:
    terminal.until(lambda text: f"pid {daemon.pid}" in text)
    daemon.kill()
    terminal.until(lambda text: "gone for" in text)
    with LocalDaemon(pool_bytes=16 << 20, runtime_dir=daemon.runtime_dir) as again:
        terminal.until(lambda text: f"pid {again.pid}" in text and "back for" in text)
        os.write(terminal.ours, b"q")
        terminal.until(lambda text: terminal.process.poll() is not None)
