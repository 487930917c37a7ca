"""How `kvferry status` and `kvferry top` show tiers."""

from __future__ import annotations

import msgspec
import pytest

from kvferry.client.cli.tier_rows import sibling_lines, sibling_row, tier_lines, tier_row
from kvferry.proto.status import SiblingStatus, TierStatus

GIB = 1 << 30
TIER = TierStatus(
    "disk",
    "on",
    capacity_bytes=200 * GIB,
    used_bytes=50 * GIB,
    keys=25600,
    hits=93,
    misses=7,
    skipped=4,
    promoted=90,
    promotion_seconds=0.0125,
    read_bytes=GIB,
    written=1000,
    written_bytes=2 * GIB,
    evictions=12,
    queue_seconds=0.25,
)


def lines(tier: TierStatus) -> list[str]:
    return [line.plain for line in tier_lines((tier,), 80)]


@pytest.mark.parametrize(
    ("tier", "in_status", "in_top"),
    [
        (
            TIER,
            [
                "disk     on, 50 GiB of 200 GiB",
                "         93% hits, read 1 GiB in 90 keys (mean 12.5 ms), written 2 GiB in 1,000,",
                "         25,600 keys, 4 skipped, 12 evicted, queue 250.0 ms",
            ],
            "disk     on · 50 GiB of 200 GiB · hits 93% · queue 250.0 ms",
        ),
        (  # an unknown usage
            TierStatus("mooncake", "on", promoted=1, read_bytes=GIB),
            ["mooncake on", "         read 1 GiB in 1 keys, written 0 B in 0"],
            "mooncake on",
        ),
        (  # an unknown capacity
            TierStatus("mooncake", "on", used_bytes=50 * GIB),
            ["mooncake on, 50 GiB used", "         read 0 B in 0 keys, written 0 B in 0"],
            "mooncake on · 50 GiB used",
        ),
        (
            TierStatus("disk", "starting", capacity_bytes=GIB),
            ["disk     starting, 0 B of 1 GiB", "         read 0 B in 0 keys, written 0 B in 0"],
            "disk     starting · 0 B of 1 GiB",
        ),
    ],
)
def test_what_a_tier_holds_and_has_moved(
    tier: TierStatus, in_status: list[str], in_top: str
) -> None:
    assert lines(tier) == in_status
    assert tier_row(tier).plain == in_top


def test_why_a_tier_fails_is_shown() -> None:
    failing = msgspec.structs.replace(
        TIER, state="off", read_only="no space", deaths=5, failure="its directory is in use"
    )
    head, *_, numbers, reason = lines(failing)
    assert head.startswith("disk     off, ")
    assert head.endswith("read-only: no space")
    assert numbers.endswith("5 process deaths")
    assert reason.strip() == "its directory is in use"
    assert tier_row(failing).plain.endswith("read-only · queue 250.0 ms · 5 process deaths")


def test_status_shows_each_sibling_and_why_it_is_not_used() -> None:
    on = SiblingStatus("/run/kvferry/GPU-1", "on", 1200, 200, 2 * GIB, 4 * GIB)
    off = SiblingStatus("/run/kvferry/GPU-2", "no daemon runs there")
    assert [line.plain for line in sibling_lines((on, off), 80)] == [
        "sibling  /run/kvferry/GPU-1, on",
        "         1,200 keys, 4 GiB mapped, loaded 2 GiB in 200 blocks",
        "sibling  /run/kvferry/GPU-2, no daemon runs there",
        "         0 keys, not mapped, loaded 0 B in 0 blocks",
    ]
    assert sibling_row((on, off)).plain == "siblings 1 of 2 on · loaded 2 GiB"
