"""The conformance suite over all tiers, in this process and through their own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.testing.mooncake_store import MooncakeStore, is_installed
from kvferry.testing.tier_conformance import *  # noqa: F403
from kvferry.testing.tier_subjects import PoolMemory, TierSetup, open_subject

from .disk_fixtures import disk_setup
from .encryption_keys import new_key

SIZE = 4 << 20
SEGMENT = 32 << 20
MEMORY = "kvferry.testing.memory_tier"
TIERS = "roomy", "shared", "disk", "encrypted", "disk-process", "mooncake"


@pytest.fixture(params=TIERS)
def tier_setup(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TierSetup]:
    match request.param:
        case "roomy":
            yield TierSetup(MEMORY, {"size": 64 << 20}, capacity=0, in_process=True)
        case "shared":
            yield TierSetup(MEMORY, {"size": SIZE, "shared": True}, SIZE, True, shared=True)
        case "disk" | "disk-process" as name:
            yield disk_setup(tmp_path / "tier", SIZE, in_process=name == "disk")
        case "encrypted":
            yield disk_setup(tmp_path / "tier", SIZE, in_process=True, key_file=new_key(tmp_path))
        case _:
            if not is_installed():
                pytest.skip("MOONCAKE IS NOT TESTED: install mooncake-transfer-engine-non-cuda")
            with MooncakeStore(segment_bytes=SEGMENT) as store:
                options = {"master": store.address, "key_file": new_key(tmp_path)}
                yield TierSetup("kvferry.daemon.tiers.mooncake", options, SEGMENT, shared=True)


def test_a_tier_that_cannot_be_opened_is_explained(pool: PoolMemory) -> None:
    with (
        pytest.raises(
            RuntimeError, match="tier no_tier not opened: No module named 'no_tier'; install"
        ),
        open_subject(TierSetup("no_tier", {}), pool),
    ):
        pass


OWN_TIER = """
from kvferry.testing.memory_tier import MemoryTier

def open_tier(options, memory):
    return MemoryTier(options["size"])
"""
OWN_TESTS = """
import pytest
from kvferry.testing.tier_conformance import *
from kvferry.testing.tier_conformance import TierSetup

@pytest.fixture
def tier_setup(tmp_path):
    return TierSetup("own_tier", {"size": 4 << 20}, 4 << 20)
"""


def test_a_tier_may_be_in_the_current_directory(tmp_path: Path) -> None:
    (tmp_path / "own_tier.py").write_text(OWN_TIER)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_own_tier.py").write_text(OWN_TESTS)
    pytest_command = [sys.executable, "-P", "-m", "pytest"]  # -P: as `pytest` finds modules
    command = [*pytest_command, "-q", "-k", "found_and_fetched", "tests"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert "2 passed" in ran.stdout
