"""The conformance suite over all tiers, in this process and through their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.testing.mooncake_store import MooncakeStore, is_installed
from kvferry.testing.tier_conformance import *  # noqa: F403
from kvferry.testing.tier_subjects import TierSetup

from .setups import MEMORY, MOONCAKE, disk_setup, memory_setup

SIZE = 4 << 20
SEGMENT = 32 << 20


@pytest.fixture(params=["memory", "roomy", "disk", "memory-process", "disk-process", "mooncake"])
def tier_setup(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TierSetup]:
    in_process = "-" not in request.param
    match request.param.partition("-")[0]:
        case "memory":
            yield memory_setup(SIZE, in_process=in_process)
        case "roomy":
            yield TierSetup(MEMORY, {"size": 64 << 20}, capacity=0, in_process=True)
        case "disk":
            yield disk_setup(tmp_path / "tier", SIZE, in_process=in_process)
        case _:
            if not is_installed():
                pytest.skip("MOONCAKE IS NOT TESTED: install mooncake-transfer-engine-non-cuda")
            with MooncakeStore(segment_bytes=SEGMENT) as store:
                yield TierSetup(MOONCAKE, {"master": store.address}, SEGMENT)
