"""The doctor on tiers: why blocks are not written."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvferry.client import OffloadClient
from kvferry.client.doctor import CheckContext, Verdict, run_checks
from kvferry.client.doctor.tiers import siblings, tiers
from kvferry.proto.status import SiblingStatus, TierStatus
from kvferry.testing.engine import until
from kvferry.testing.plugin import StartKvferryd
from support.command_line import kvferry
from support.status_reports import STATUS


@pytest.mark.parametrize(
    ("fields", "found", "change"),
    [
        ({}, "on, 3 MiB used", ""),
        (
            {"read_only": "room for 7 bytes more; free disk space", "dropped_writes": 1200},
            "nothing can be written: room for 7 bytes more; 1,200 blocks left the pool before",
            "free disk space",
        ),
        ({"read_only": "[Errno 30] Read-only file system"}, "Read-only file system", "log"),
        ({"dropped_writes": 5, "openings": 2}, "full, slower than the stores, or off (2", "rate"),
        ({"state": "off", "failure": "/a is in use; give a path"}, "off: /a is in use", "give a"),
        ({"state": "off"}, "off: too many errors", "log"),
        ({"state": "starting"}, "starting", ""),
    ],
)
def test_a_tier_that_does_not_write(fields: dict[str, Any], found: str, change: str) -> None:
    tier = msgspec.structs.replace(TierStatus("disk", "on", used_bytes=3 << 20), **fields)
    context = CheckContext(None, 1.0, status=msgspec.structs.replace(STATUS, tiers=(tier,)))
    (finding,) = tiers(context)
    assert (finding.check, finding.verdict) == ("tier disk", Verdict.WARN if change else Verdict.OK)
    assert found in finding.found
    assert change in finding.change


def test_a_directory_that_cannot_be_used(start_kvferryd: StartKvferryd) -> None:
    daemon = start_kvferryd(tiers_disk_path="/proc/none", tiers_disk_size="16MiB")
    with OffloadClient(daemon.directory) as client:
        until(lambda: bool(client.status().tiers[0].failure))
    (finding,) = [each for each in run_checks(daemon.directory) if each.check == "tier disk"]
    assert finding.verdict is Verdict.WARN
    assert "/proc/none" in finding.found
    assert kvferry("status", "--check", "-d", daemon.directory) == 1
    assert daemon.log().count("/proc/none") == 1


@pytest.mark.parametrize(
    ("state", "found", "change"),
    [
        ("on", "on, 7 keys", ""),
        ("[forbidden] lends no blocks; set siblings.enabled", "lends no blocks", "set siblings"),
        ("connecting", "its blocks are not loaded: connecting", "see Siblings"),
    ],
)
def test_a_sibling_that_is_not_used(state: str, found: str, change: str) -> None:
    given = (SiblingStatus("/run/kvferry/GPU-1", state, 7),)
    context = CheckContext(None, 1.0, status=msgspec.structs.replace(STATUS, siblings=given))
    (finding,) = siblings(context)
    assert finding.check == "sibling /run/kvferry/GPU-1"
    assert finding.verdict is (Verdict.WARN if change else Verdict.OK)
    assert found in finding.found
    assert change in finding.change
