"""The units as texts: how much they let their processes do, by systemd's own reckoning."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

DEPLOY = Path(__file__).parents[2] / "deploy"
UNIT = DEPLOY / "kvferryd@.service"
# Tenths of systemd's scale from 0 to 10; a service without hardening has 96.
EXPOSURES = {"kvferryd@": 21, "mooncake-master": 13, "mooncake-store": 15}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze: not here")
@pytest.mark.parametrize("unit", EXPOSURES)
def test_exposure(unit: str) -> None:
    command = ["systemd-analyze", "security", "--offline=yes", f"--threshold={EXPOSURES[unit]}"]
    path = DEPLOY / f"{unit}.service"
    done = subprocess.run([*command, str(path)], capture_output=True, text=True, timeout=50)
    if "nrecognized option" in done.stderr:
        pytest.skip("systemd-analyze knows no --offline: it is from before systemd 250")
    assert "Overall exposure level" in done.stdout, done.stderr
    assert done.returncode == 0, done.stdout


def test_a_stop_has_longer_than_the_drain() -> None:
    """What stop.drain_seconds is by default, and then as long again for the memory."""
    (seconds,) = re.findall(r"(?m)^TimeoutStopSec=(\d+)$", UNIT.read_text())
    configuration = (DEPLOY / "kvferryd.toml").read_text()
    (drain,) = re.findall(r"(?m)^# drain_seconds = ([\d.]+)$", configuration)
    assert int(seconds) > 2 * float(drain)


def test_the_instructions_name_every_file_that_is_installed() -> None:
    text = "".join((DEPLOY / page).read_text() for page in ("README.md", "mooncake.md"))
    for path in DEPLOY.iterdir():
        assert path.suffix == ".md" or path.name in text
