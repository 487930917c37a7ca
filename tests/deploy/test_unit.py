"""The unit files: their exposure level as systemd computes it, and their timeouts."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from support.time_limits import TIMEOUT

DEPLOY = Path(__file__).parents[2] / "deploy"
UNIT = DEPLOY / "kvferryd@.service"
# Limits in tenths of systemd's scale from 0 to 10. A service without hardening has 96.
EXPOSURES = {"kvferryd@": 21, "mooncake-master": 13, "mooncake-store": 15}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is missing")
@pytest.mark.parametrize("unit", EXPOSURES)
def test_exposure(unit: str) -> None:
    command = ["systemd-analyze", "security", "--offline=yes", f"--threshold={EXPOSURES[unit]}"]
    path = DEPLOY / f"{unit}.service"
    done = subprocess.run([*command, str(path)], capture_output=True, text=True, timeout=TIMEOUT)
    if "nrecognized option" in done.stderr:
        pytest.skip("systemd-analyze has no --offline, which systemd 250 added")
    assert "Overall exposure level" in done.stdout, done.stderr
    assert done.returncode == 0, done.stdout


def test_the_stop_timeout_is_twice_the_drain() -> None:
    """The daemon needs the default of stop.drain_seconds, and then time to free its memory."""
    (seconds,) = re.findall(r"(?m)^TimeoutStopSec=(\d+)$", UNIT.read_text())
    configuration = (DEPLOY / "kvferryd.toml").read_text()
    (drain,) = re.findall(r"(?m)^# drain_seconds = ([\d.]+)$", configuration)
    assert int(seconds) > 2 * float(drain)


def test_the_instructions_name_every_installed_file() -> None:
    text = "".join((DEPLOY / page).read_text() for page in ("README.md", "mooncake.md"))
    for path in DEPLOY.iterdir():
        assert path.suffix == ".md" or path.name in text
