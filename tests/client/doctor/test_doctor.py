"""`kvferry doctor`: all checks together."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from kvferry.client import LocalDaemon, OffloadClient
from kvferry.client.doctor import CHECKS, Finding, Verdict, run_checks
from kvferry.testing.engine import until
from kvferry.testing.plugin import StartKvferryd
from support.command_line import kvferry


def by_check(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.check: finding for finding in findings}


def test_all_checks_of_a_healthy_daemon(
    start_kvferryd: StartKvferryd, device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    running = start_kvferryd("0" if device.startswith("cuda") else device)
    findings = run_checks(running.directory, 20.0)
    by_name = by_check(findings)
    assert {finding.verdict for finding in findings} <= {Verdict.OK, Verdict.WARN}
    wanted = [
        "directory",
        "sockets",
        "kernel",
        "connection",
        "version",
        "status",
        "processes",
        "device",
        "pool",
    ]
    assert all(by_name[check].verdict is Verdict.OK for check in [*wanted, "round trip"])
    assert f"pid {running.pid}" in by_name["connection"].found
    assert (
        run_checks(running.runtime_dir, 20.0)[-1].verdict is Verdict.OK
    )  # the block of the first run is free again
    assert kvferry("doctor", "-d", running.directory) == 0
    assert "round trip" in capsys.readouterr().out


def test_the_doctor_leaves_no_session_and_no_region(
    kvferryd: LocalDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_checks(kvferryd.directory, math.inf)[-1].verdict is Verdict.OK
    assert kvferry("doctor", "--json", "-d", kvferryd.directory) == 0
    findings = json.loads(capsys.readouterr().out)
    assert set(findings[0]) == {"check", "verdict", "found", "change"}
    with OffloadClient(kvferryd.directory) as client:
        until(lambda: client.status().sessions == 1)
        until(lambda: client.status().engines == ())
        assert client.status().pool.reserved_bytes == 0
    kvferryd.kill()
    assert kvferry("doctor", "--json", "-d", kvferryd.directory) == 1
    assert "fail" in {finding["verdict"] for finding in json.loads(capsys.readouterr().out)}


def test_every_failed_check_states_what_to_change() -> None:
    """Only findings that are OK have no change. The functions of the checks have unique names."""
    assert len({check.__name__ for check in CHECKS}) == len(CHECKS)
    for finding in run_checks(Path("/nowhere")):
        assert (finding.verdict is Verdict.OK) == (not finding.change)
