"""How `kvferry status` and `kvferry top` show tiers."""

from __future__ import annotations

import msgspec

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


def test_status_shows_what_a_tier_holds_and_has_moved() -> None:
    assert lines(TIER) == [
        "disk     on, 50 GiB of 200 GiB",
        "         93% hits, read 1 GiB in 90 keys (mean 12.5 ms), written 2 GiB in 1,000,",
        "         25,600 keys, 4 skipped, 12 evicted, queue 250.0 ms",
    ]


def test_top_shows_a_tier_in_one_line() -> None:
    assert tier_row(TIER).plain == "disk     on · 50 GiB of 200 GiB · hits 93% · queue 250.0 ms"


def test_an_unknown_usage_is_not_shown_as_zero() -> None:
    shared = TierStatus("mooncake", "on", promoted=1, read_bytes=GIB)
    assert lines(shared) == [
        "mooncake on",
        "         read 1 GiB in 1 keys, written 0 B in 0",
    ]
    assert tier_row(shared).plain == "mooncake on"


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


def test_a_tier_with_an_unknown_capacity_shows_the_used_bytes() -> None:
    store = msgspec.structs.replace(TIER, name="mooncake", capacity_bytes=0)
    assert lines(store)[0] == "mooncake on, 50 GiB used"
    assert tier_row(store).plain.startswith("mooncake on · 50 GiB used · ")


def test_an_idle_tier_has_no_rates() -> None:
    idle = TierStatus("disk", "starting", capacity_bytes=GIB)
    assert lines(idle)[1].strip() == "read 0 B in 0 keys, written 0 B in 0"
    assert tier_row(idle).plain == "disk     starting · 0 B of 1 GiB"


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
