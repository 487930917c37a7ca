"""Regions of the host pool: which bytes an engine gets, when it keeps them, when they are freed."""

from __future__ import annotations

from copy import deepcopy
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.daemon.core.actions import RegionFreed
from kvferry.daemon.core.pool_ranges import ALIGNMENT
from kvferry.daemon.core.records import RecoveredRegion, RegionRecord, engine_owner
from kvferry.daemon.core.region import Region
from kvferry.daemon.core.regions import Regions
from kvferry.proto.errors import Code, Refused
from kvferry.proto.layout import LayoutArrays
from kvferry.proto.specs import KVLayout, TensorLayout, TensorRef

PROFILE = settings(max_examples=150)


def layout(block_bytes: int) -> LayoutArrays:
    tensor, ref = TensorLayout(4, block_bytes, block_bytes), TensorRef(0, block_bytes)
    return LayoutArrays.from_layout(KVLayout((tensor,), ((ref,),)))


PAGE, SMALL = layout(ALIGNMENT), layout(1000)


def engines(regions: Regions) -> dict[str, tuple[int, int]]:
    """Engine -> (first page, number of pages)."""
    return {r.owner.name: (r.start // ALIGNMENT, r.nbytes // ALIGNMENT) for r in regions}


def new_regions(pages: int, **claims: int) -> Regions:
    regions = Regions(pages * ALIGNMENT)
    for name, size in claims.items():
        regions.assign_region(engine_owner(name), PAGE, size * ALIGNMENT)
    return regions


def assign(regions: Regions, name: str, pages: int | None) -> int:
    """Assign a region to an engine. Returns its first page."""
    region, _ = regions.assign_region(
        engine_owner(name), PAGE, None if pages is None else pages * ALIGNMENT
    )
    return region.start // ALIGNMENT


def test_without_a_size_an_engine_gets_all_that_no_present_engine_has() -> None:
    """Deserted regions count as free, whether they lie beside each other or not."""
    regions = new_regions(16, a=15)
    regions.mark_deserted(engine_owner("a"))
    assert assign(regions, "b", None) == 0
    assert engines(regions) == {"b": (0, 16)}
    regions = new_regions(16, a=2, b=5, c=3, d=2)
    for name in "bd":
        regions.mark_deserted(engine_owner(name))
    assert assign(regions, "e", None) == 10
    assert engines(regions) == {"a": (0, 2), "b": (2, 5), "c": (7, 3), "e": (10, 6)}


def test_a_region_lies_in_the_smallest_range_that_is_large_enough() -> None:
    """Large ranges stay free for large regions."""
    regions = new_regions(12, a=4, b=1, c=2, d=1)
    for name in "ac":
        regions.free_region(engine_owner(name))
    assert assign(regions, "e", 2) == 5
    assert assign(regions, "f", 4) == 0


# Texts for users


def test_a_refusal_names_the_region_between_two_free_parts() -> None:
    regions = new_regions(65, a=16, b=16, c=16, d=16, z=1)
    for name in "ac":
        regions.mark_deserted(engine_owner(name))
    with pytest.raises(Refused) as caught:
        assign(regions, "e", 24)
    assert caught.value.message == (
        "the host pool of 260 KiB has no 98304 contiguous bytes (96 KiB) that are not in use; the "
        "largest part has 64 KiB, one host block 4 KiB. engine 'b' (64 KiB) lies between two free "
        "parts: stop its engines, start this one, and then start them again; or request less host "
        "memory, or raise pool.size of the daemon"
    )
    regions.mark_deserted(engine_owner("b"))
    assert assign(regions, "e", 24) == 0
    assert assign(regions, "b", 16) == 24


def test_a_refusal_lists_the_largest_regions_in_use() -> None:
    regions = new_regions(16, a=1, b=2, c=3, d=4, e=5, f=1)
    with pytest.raises(Refused) as caught:
        assign(regions, "g", 1)
    listed = (
        "'e' (20 KiB), engine 'd' (16 KiB), engine 'c' (12 KiB), engine 'b' (8 KiB), and 2 more"
    )
    assert f". In use: engine {listed}. Stop an engine, request" in caught.value.message
    with pytest.raises(Refused, match="one host block 4 KiB; request less host memory, or raise"):
        assign(regions, "g", 17)


def test_an_engine_learns_why_it_has_less_than_the_pool() -> None:
    regions = new_regions(16, a=15)
    assign(regions, "b", None)
    a, b = (regions.get(engine_owner(name)) for name in "ab")
    assert a is not None
    assert b is not None
    assert regions.shortfall(b) == (
        "it is the largest part of the host pool of 64 KiB that is not in use; in use: engine 'a' "
        "(60 KiB)"
    )
    regions.mark_deserted(a.owner)
    assert regions.shortfall(b) == (
        "it is the region that engine 'b' (4 KiB) had before, with its blocks; 64 KiB are not in "
        "use: set cpu_bytes_to_use, or free the region while no engine uses it (kvferry release b)"
    )
    regions.mark_deserted(b.owner)
    assign(regions, "c", None)
    whole = regions.get(engine_owner("c"))
    assert whole is not None
    assert regions.shortfall(whole) == ""


# Deserted regions


def test_a_region_of_another_size_replaces_that_of_its_owner() -> None:
    regions = new_regions(8, a=2, b=1)
    regions.mark_deserted(engine_owner("a"))
    assert assign(regions, "a", 1) == 0
    assert assign(regions, "c", 5) == 3


def test_the_region_unused_longest_is_freed_first() -> None:
    regions = new_regions(4, a=1, b=1, c=1, d=1)
    for name in "cab":
        regions.mark_deserted(engine_owner(name))
    assign(regions, "a", 1)
    regions.mark_deserted(engine_owner("a"))  # the order is c, b, a
    assert [assign(regions, name, 1) for name in "efg"] == [2, 1, 0]
    assert set(engines(regions)) == set("defg")


def test_less_than_one_host_block_is_refused_with_the_size_of_one() -> None:
    with pytest.raises(Refused, match="at least 4096") as caught:
        Regions(1 << 20).assign_region(engine_owner("a"), PAGE, ALIGNMENT - 1)
    assert (caught.value.code, caught.value.value) == (Code.POOL_FULL, "4095")


def test_the_first_region_starts_at_a_page_behind_the_daemons_own_blocks() -> None:
    regions = Regions(4 * ALIGNMENT, own_bytes=1000)
    assert assign(regions, "a", None) == 1
    assert engines(regions) == {"a": (1, 3)}


# Regions of an earlier daemon


@pytest.mark.parametrize(
    ("start", "nbytes", "code"),
    [
        (ALIGNMENT, 2 * ALIGNMENT, None),
        (6 * ALIGNMENT, 2 * ALIGNMENT, None),
        (0, 2 * ALIGNMENT, Code.POOL_FULL),
        (7 * ALIGNMENT, 2 * ALIGNMENT, Code.POOL_FULL),
        (ALIGNMENT + 1000, ALIGNMENT, Code.POOL_FULL),
        (2 * ALIGNMENT, 2 * ALIGNMENT, Code.POOL_FULL),
        (4 * ALIGNMENT, ALIGNMENT, Code.POOL_FULL),
        (ALIGNMENT, 0, Code.POOL_FULL),
        (ALIGNMENT, ALIGNMENT - 1, Code.BAD_LAYOUT),
    ],
    ids=["fits", "last", "own", "behind", "unaligned", "overlaps", "inside", "empty", "small"],
)
def test_a_region_is_restored_at_its_offset_if_those_bytes_are_free(
    start: int, nbytes: int, code: Code | None
) -> None:
    regions = Regions(8 * ALIGNMENT, own_bytes=1000)
    regions.restore_region(
        RecoveredRegion(RegionRecord("first", 3 * ALIGNMENT, 3 * ALIGNMENT, PAGE))
    )
    found = RecoveredRegion(RegionRecord("second", start, nbytes, PAGE))
    if code is None:
        assert (regions.restore_region(found).start, len(engines(regions))) == (start, 2)
        return
    with pytest.raises(Refused) as refused:
        regions.restore_region(found)
    assert refused.value.code == code
    assert engines(regions) == {"first": (3, 3)}


def test_the_least_recently_used_region_of_an_earlier_daemon_is_freed_first() -> None:
    earlier = new_regions(4, a=1, b=1, c=1)
    found = []
    for region in earlier:
        record = RegionRecord(region.owner.name, region.start, region.nbytes, PAGE)
        found.append(RecoveredRegion(record, region.table.lines.memory))
    for name in "bca":
        used = earlier.get(engine_owner(name))
        assert used is not None
        used.table.lines.touch(np.array([0]))
    regions = Regions(4 * ALIGNMENT)
    for each in found:
        regions.restore_region(each)
    assert [assign(regions, name, 1) for name in "defg"] == [3, 1, 2, 0]


@pytest.mark.parametrize("block", [1, 64, 383])
def test_the_number_of_small_blocks_is_limited(block: int) -> None:
    """The ledger needs more memory than blocks of this size."""
    regions = Regions(1 << 40)
    with pytest.raises(Refused, match="larger block_size_factor") as caught:
        regions.assign_region(engine_owner("a"), layout(block), block * ((1 << 20) + 1))
    assert (caught.value.code, caught.value.value) == (Code.BAD_LAYOUT, str((1 << 20) + 1))
    assert list(regions) == []
    regions.assign_region(engine_owner("a"), layout(block), block << 20)
    regions.assign_region(engine_owner("b"), layout(384), 384 << 24)


# Random histories


claims = st.tuples(
    st.sampled_from("abcdef"),
    st.sampled_from([PAGE, SMALL, layout(3 * ALIGNMENT)]),
    st.none() | st.integers(1, 9 * ALIGNMENT) | st.integers(1, 9).map(lambda n: n * ALIGNMENT),
)


def largest_gap(pool: int, held: list[Region]) -> int:
    """Most contiguous free bytes from the start of a page, if only the regions in `held` exist."""
    taken = {page for r in held for page in range(r.start // ALIGNMENT, -(-r.end // ALIGNMENT))}
    best = row = 0
    for page in range(-(-pool // ALIGNMENT)):
        row = 0 if page in taken else row + min(ALIGNMENT, pool - page * ALIGNMENT)
        best = max(best, row)
    return best


@settings(PROFILE)
@given(st.integers(4, 12), st.lists(claims, max_size=25))
def test_regions_never_overlap_and_regions_in_use_stay(
    pages: int, history: list[tuple[str, LayoutArrays, int | None]]
) -> None:
    pool = pages * ALIGNMENT
    regions = Regions(pool)
    for name, shape, nbytes in history:
        before = {r.owner.name: deepcopy(r) for r in regions}
        if name in before and before[name].present:
            regions.mark_deserted(engine_owner(name))
            continue
        in_use = [r for r in before.values() if r.present]
        try:
            region, reattached = regions.assign_region(engine_owner(name), shape, nbytes)
        except Refused as error:
            assert error.code == Code.POOL_FULL  # noqa: PT017
            assert {r.owner.name: r for r in regions} == before
            block = shape.host_block_bytes
            too_small = nbytes is not None and nbytes < block
            assert too_small or largest_gap(pool, in_use) < (nbytes or block)
            continue
        others = [r for r in in_use if r.owner.name != name]
        old = before.get(name)
        same = old is not None and old.contents == shape and nbytes in (None, old.nbytes)
        assert reattached == same
        assert not same or (old is not None and old.start == region.start)
        assert region.num_blocks >= 1
        wanted = largest_gap(pool, others) if nbytes is None and not same else nbytes
        assert wanted in (None, region.nbytes)
        after = {r.owner.name: r for r in regions}
        assert all(after[r.owner.name] == r for r in in_use)
        freed = [before[name] for name in set(before) - set(after)]
        assert all(r.start < region.end and region.start < r.end for r in freed)
        kept = [r for r in before.values() if r.owner.name != name]
        if nbytes is not None and largest_gap(pool, kept) >= nbytes:
            assert freed == []
        placed = sorted(regions, key=lambda r: r.start)
        assert all(a.end <= b.start for a, b in pairwise(placed))
        assert placed[-1].end <= pool
        assert all(r.start % ALIGNMENT == 0 for r in placed)
        assert regions.reserved_bytes == sum(r.nbytes for r in placed) <= pool


def test_the_number_of_regions_is_bounded() -> None:
    """A new engine replaces the region that is unused for the longest time. Regions in use stay."""
    regions = Regions(1 << 20, most=2)
    a, b, c, d = (engine_owner(name) for name in "abcd")
    for owner in (a, b):
        regions.assign_region(owner, PAGE, ALIGNMENT)
    with pytest.raises(Refused) as refused:
        regions.assign_region(c, PAGE, ALIGNMENT)
    assert (refused.value.code, refused.value.value) == (Code.POOL_FULL, "2")
    regions.mark_deserted(b)
    regions.mark_deserted(a)
    freed = list[Region]()
    regions.on_freed = freed.append
    regions.assign_region(c, PAGE, ALIGNMENT)
    assert {region.owner for region in regions} == {a, c}
    assert regions.take_changes() == [RegionFreed(b)]
    assert [region.owner for region in freed] == [b]
    regions.assign_region(a, PAGE, ALIGNMENT)  # it has a region
    with pytest.raises(Refused):
        regions.assign_region(d, PAGE, ALIGNMENT)


def test_a_refused_registration_frees_no_region() -> None:
    regions = Regions(1 << 30, most=1)
    regions.assign_region(engine_owner("a"), PAGE, ALIGNMENT)
    regions.mark_deserted(engine_owner("a"))
    tiny = layout(1)
    with pytest.raises(Refused) as refused:
        regions.assign_region(engine_owner("b"), tiny, None)
    assert refused.value.code == Code.BAD_LAYOUT
    assert [region.owner.name for region in regions] == ["a"]
