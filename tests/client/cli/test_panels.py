"""Panels of `kvferry top`, rendered from synthetic histories."""

from __future__ import annotations

from io import StringIO
from math import sin
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from kvferry.client import Fingerprint
from kvferry.client.cli.panels import render_bar, render_screen, render_sparkline
from kvferry.client.cli.status import print_status
from kvferry.client.cli.watcher import DaemonHistory, Rates, StatusSample
from kvferry.proto.status import DaemonStatus, EngineStatus, HealthStatus, VerificationStatus
from support.status_reports import GIB, NAMESPACE, STATUS

RANK = msgspec.structs.replace(NAMESPACE.fingerprint, rank=1, world_size=4)
SPACE = msgspec.structs.replace(NAMESPACE, fingerprint=RANK, blocks=32768, free=900, ready=31864)


def advance_status(status: DaemonStatus, seconds: float, stored: int, loaded: int) -> DaemonStatus:
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
def history() -> DaemonHistory:
    history, status, space = DaemonHistory(Path("/run/kvferry/GPU-6f1b")), STATUS, SPACE
    for step in range(40):
        history.add_sample(StatusSample(status, (space,)), now=100.0 + step)
        stored, loaded = int(4e10 * (1 + sin(step / 3)) / 2), int(5e10 * (1 + sin(step / 5)) / 2)
        status = advance_status(status, 1.0, stored, loaded)
        space = msgspec.structs.replace(space, hits=space.hits + 9, misses=space.misses + 3)
    return history


def render(*daemons: DaemonHistory, width: int = 100, now: float = 140.0) -> str:
    console = Console(width=width, record=True, highlight=False, file=StringIO())
    console.print(render_screen(daemons, now, width, "/run/kvferry"))
    text = console.export_text()
    assert all(len(line) <= width for line in text.splitlines())
    return text


def test_a_verification_is_shown_until_it_is_complete() -> None:
    for decided, shown in ((32 * GIB, True), (64 * GIB, False)):
        history = DaemonHistory(Path("/run/kvferry/GPU-6f1b"))
        verification = VerificationStatus(64 * GIB, decided)
        history.add_sample(
            StatusSample(msgspec.structs.replace(STATUS, verification=verification), ()), now=100.0
        )
        assert ("verified 50% of 64 GiB from before" in render(history, now=101.0)) == shown


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_a_panel_shows_everything(history: DaemonHistory, width: int) -> None:
    text = render(history, width=width)
    rates = history.rates
    for word in (
        "NVIDIA H200",
        "pid 4711",
        "healthy",
        f"{rates.store / 1e9:.2f} GB/s",
        f"{rates.load / 1e9:.2f} GB/s",
        "1,234 in flight",
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


def test_an_unhealthy_daemon_shows_the_reason(history: DaemonHistory) -> None:
    assert "no daemon runs here (searched /run/kvferry)" in render()
    health = HealthStatus(False, ("the device worker has not moved for 31.2 s",))
    assert history.sample is not None
    status = msgspec.structs.replace(history.sample.status, health=health)
    history.add_sample(StatusSample(status, ()), 141.0)
    assert "the device worker has not moved for 31.2 s" in render(history)


def test_a_daemon_that_disconnects_and_reconnects(history: DaemonHistory) -> None:
    history.add_failure("the daemon disconnected", 150.0)
    history.add_failure("no reply", 152.0)
    disconnected = render(history, now=153.0)
    assert "gone for 3.0 s: no reply" in disconnected
    assert "last seen as pid 4711" in disconnected
    assert history.sample is not None
    status = msgspec.structs.replace(STATUS, boot_id="other", pid=4712)
    history.add_sample(StatusSample(status, ()), 160.0)
    reconnected = render(history, now=162.0)
    assert "reconnected 2.0 s ago" in reconnected
    assert "pid 4712" in reconnected
    assert "reconnected" not in render(history, now=200.0)
    assert history.rates == Rates()  # the totals of another process give no rate


def test_bars_have_the_requested_width() -> None:
    for fraction in (0.0, 0.001, 0.3, 1.0, 1.5):
        assert len(render_bar([(fraction, "x", ""), (fraction, "y", "")], 10)) == 10
    assert render_bar([(0.001, "x", "")], 10).plain == "x" + 9 * "░"
    assert render_bar([(0.0, "x", "")], 10).plain == 10 * "░"


def test_a_sparkline_shows_the_last_values_and_small_values() -> None:
    assert render_sparkline([0, 1, 50, 100], 100, 10) == " ▁▄█"
    assert render_sparkline([0, 1, 50, 100], 100, 2) == "▄█"
    assert render_sparkline([1.0], 1.0, 0) == ""


def test_control_characters_in_names_are_escaped() -> None:
    """In `kvferry top` and `kvferry status`, because clients choose their names freely."""
    name = "a\x1b[2J\x9bb"
    fingerprint = Fingerprint(name, 2 << 20)
    space = msgspec.structs.replace(SPACE, fingerprint=fingerprint, engines=(name,))
    engine = EngineStatus(name, True, 1, 1, 1)
    status = msgspec.structs.replace(STATUS, engines=(engine,))
    history, console = (
        DaemonHistory(Path("/run/kvferry/cpu")),
        Console(width=160, record=True, file=StringIO()),
    )
    history.add_sample(StatusSample(status, (space,)), now=100.0)
    print_status(status, (space,), console)
    for text in (render(history, width=160), console.export_text()):
        assert all(line.isprintable() for line in text.splitlines())
        assert text.count(repr(name)[1:-1]) >= 2
