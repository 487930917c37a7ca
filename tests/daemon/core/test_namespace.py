"""One namespace: stores and loads by key."""

from __future__ import annotations

import msgspec
import pytest

from kvferry.daemon.core.actions import PublishKVEvents
from kvferry.proto import messages as wire
from kvferry.proto.errors import Code
from kvferry.proto.results import Outcome
from kvferry.proto.specs import (
    GPULoadStoreSpec,
    KeyLoadStoreSpec,
    KVLayout,
    TensorLayout,
    TensorRef,
    TransferSpec,
)
from support.counted_key import CountedKey
from support.namespaces_fixture import (
    CANCELLED,
    DONE,
    FAILED,
    FINGERPRINT,
    FINGERPRINT_OF_THREE,
    HYBRID,
    NOT_DONE,
    OTHER,
    PAGE,
    REGION_BYTES,
    WIDE,
    NamespacesFixture,
    blocks,
    copies,
    each,
    gpu_blocks,
    key_events_of,
    load,
    offsets,
    store,
)

# Stores


def test_a_store_gets_blocks_of_the_region_and_its_keys_load_after_it_is_done() -> None:
    # The region of "n" is first, so that of "a" does not begin at 0.
    fixture = NamespacesFixture("n", fingerprint=OTHER)
    fixture.open_namespace("a")
    fixture.register("a")
    plan = fixture.start("a", store(b"abc", blocks([5, 0, 9])))
    assert [(group, block) for group, block, _ in copies(plan)] == [(0, 5), (0, 0), (0, 9)]
    assert len(set(offsets(plan))) == 3
    assert set(offsets(plan)) <= set(range(REGION_BYTES, 2 * REGION_BYTES, PAGE))
    assert (plan.nbytes, plan.host_end) == (3 * PAGE, max(offsets(plan)) + PAGE)
    assert fixture.loadable("a") == b""
    fixture.end(plan)
    assert fixture.loadable("a") == b"abc"
    assert offsets(fixture.start("a", load(b"cab"))) == [offsets(plan)[at] for at in (2, 0, 1)]


@NOT_DONE
def test_a_store_that_was_not_done_leaves_no_key(outcome: Outcome) -> None:
    fixture = NamespacesFixture("a")
    fixture.end(fixture.start("a", store(b"abcd")), outcome)
    assert fixture.usage("free", "pending", "ready") == (4, 0, 0)
    assert fixture.loadable("a") == b""
    fixture.stored("a", b"abcd")
    assert fixture.loadable("a") == b"abcd"


def test_resident_and_pending_keys_are_left_out_with_their_blocks() -> None:
    fixture = NamespacesFixture("a", "b")
    first = fixture.stored("a", b"b")
    second = fixture.start("b", store(b"d"))
    plan = fixture.start("a", store(b"abcd", blocks([3, 4, 5, 6])))
    assert gpu_blocks(plan) == [3, 5]
    assert not set(offsets(plan)) & {*offsets(first), *offsets(second)}
    assert plan.nbytes == 2 * PAGE
    fixture.end(plan)
    assert fixture.loadable("a") == b"abc"
    fixture.end(second)
    assert fixture.loadable("a") == b"abcd"


def test_a_store_of_resident_keys_copies_nothing_and_is_done() -> None:
    fixture = NamespacesFixture("a")
    fixture.stored("a", b"ab")
    plan = fixture.start("a", store(b"ba"))
    assert (plan.extents, plan.nbytes, plan.host_end) == ((), 0, 0)
    (action,) = fixture.end(plan)
    assert isinstance(action.message, wire.Finished)
    assert action.message.results[0].outcome is DONE
    assert fixture.loadable("a") == b"ab"


def test_a_load_does_not_wait_for_a_store_that_left_its_key_out() -> None:
    fixture = NamespacesFixture("a")
    stored = fixture.stored("a", b"abcd")
    fixture.start("a", store(b"ad"))
    for letter in each(b"abcd"):
        assert fixture.start("a", load(letter)).after == stored.serial


def test_a_key_twice_in_one_store_is_stored_once_from_its_first_block() -> None:
    fixture = NamespacesFixture("a")
    plan = fixture.start("a", store(b"abab", blocks([3, 4, 5, 6])))
    assert gpu_blocks(plan) == [3, 4]
    assert fixture.usage("free", "pending") == (2, 2)
    fixture.end(plan)
    assert fixture.loadable("a") == b"ab"
    assert fixture.usage("free", "ready") == (2, 2)


def test_left_out_host_blocks_leave_out_their_gpu_blocks() -> None:
    """Seven GPU blocks from index 1 on, three per host block: a has two, b three, and c two."""
    fixture = NamespacesFixture("a", fingerprint=FINGERPRINT_OF_THREE, layout=WIDE, quota=12 * PAGE)
    spec = store(b"abc", blocks([9, 8, 7, 6, 5, 4, 3], (7, 1)))
    fixture.stored("a", b"b", blocks([0, 1, 2]))
    plan = fixture.start("a", spec)
    a, c = (offsets(plan)[at] // (3 * PAGE) * 3 * PAGE for at in (0, -1))
    assert a != c
    assert copies(plan) == [(0, 9, a + PAGE), (0, 8, a + 2 * PAGE), (0, 4, c), (0, 3, c + PAGE)]
    fixture.end(plan, FAILED)
    fixture.send("a", wire.Reset(1))
    fixture.stored("a", b"a", blocks([0, 1, 2]))
    fixture.stored("a", b"c", blocks([0, 1, 2]))
    assert gpu_blocks(fixture.start("a", spec)) == [7, 6, 5]


def test_every_group_has_its_own_keys() -> None:
    """Group 0: blocks 1 to 4 from index 2 on, in a and b. Group 1: blocks 5 to 9, in c and d."""
    fixture = NamespacesFixture(
        "a", fingerprint=FINGERPRINT_OF_THREE, layout=HYBRID, quota=12 * PAGE
    )
    spec = store(b"abcd", blocks(range(1, 10), (4, 2), (5, 4)))
    plan = fixture.start("a", spec)
    at = [offset - offset % (3 * PAGE) for offset in offsets(plan)]
    a, b, c, d = dict.fromkeys(at)
    half = PAGE // 2
    assert copies(plan) == [
        *((0, 1, a + 2 * PAGE), (0, 2, b), (0, 3, b + PAGE), (0, 4, b + 2 * PAGE)),
        *((1, 5, c + half), (1, 6, c + PAGE), (1, 7, d), (1, 8, d + half), (1, 9, d + PAGE)),
    ]
    assert plan.nbytes == 4 * PAGE + 5 * half
    fixture.end(plan, CANCELLED)
    fixture.stored("a", b"bc", blocks([1, 2, 3, 4, 5, 6], (3, 0), (3, 0)))
    plan = fixture.start("a", spec)
    assert [(group, block) for group, block, _ in copies(plan)] == [(0, 1), (1, 7), (1, 8), (1, 9)]
    fixture.end(plan, CANCELLED)
    fixture.stored("a", b"a", blocks([1, 2, 3], (3, 0), (0, 0)))
    plan = fixture.start("a", spec)
    assert [group for group, _, _ in copies(plan)] == [1, 1, 1]


@pytest.mark.parametrize(
    ("spec", "code"),
    [
        (store(b"ab", blocks([0])), Code.SIZE_MISMATCH),
        (store(b"a", blocks([0], (1, 0), (0, 0))), Code.UNKNOWN_GROUP),
        (store(b"a", blocks([16])), Code.BLOCK_OUT_OF_RANGE),
        ((GPULoadStoreSpec([0, 1]), KeyLoadStoreSpec((b"a", b"bc"))), Code.BAD_KEY),
        ((KeyLoadStoreSpec((b"d", b"")), GPULoadStoreSpec([0, 1])), Code.BAD_KEY),
        (load(b"d", blocks([16])), Code.BLOCK_OUT_OF_RANGE),
        (load(b"dd", blocks([1, 1])), Code.DUPLICATE_BLOCK),
    ],
)
def test_a_bad_transfer_reserves_nothing_and_pins_nothing(spec: TransferSpec, code: Code) -> None:
    fixture = NamespacesFixture("a", quota=2 * PAGE)
    fixture.stored("a", b"d")
    before = fixture.namespaces()
    assert fixture.refused("a", spec) == code
    assert fixture.namespaces() == before
    assert not fixture.core.busy
    fixture.stored("a", b"ef")


# Loads


@pytest.mark.parametrize("outcome", [DONE, FAILED, CANCELLED])
def test_a_load_pins_its_blocks_until_it_ends(outcome: Outcome) -> None:
    fixture = NamespacesFixture("a", "b")
    fixture.stored("a", b"abcd")
    plans = [fixture.start("a", load(b"abc")), fixture.start("b", load(b"cd"))]
    assert fixture.usage("pinned") == (4,)
    assert fixture.refused("b", store(b"e")) == Code.CACHE_FULL
    fixture.end(plans[0], outcome)
    assert fixture.usage("pinned") == (2,)
    assert fixture.refused("b", store(b"efg")) == Code.CACHE_FULL
    fixture.stored("b", b"ef")
    assert fixture.loadable("b") == b"cdef"
    fixture.end(plans[1], outcome)
    fixture.stored("b", b"gh")
    assert fixture.usage("pinned", "ready") == (0, 4)


@pytest.mark.parametrize(
    ("letters", "size", "index", "fits"),
    [
        (b"a", 2, 1, True),
        (b"a", 1, 2, True),
        (b"a", 1, 0, False),
        (b"b", 3, 0, True),
        (b"c", 2, 0, True),
        (b"c", 1, 1, True),
        (b"c", 1, 2, False),
        (b"c", 2, 1, False),
        (b"d", 1, 1, True),
        (b"d", 1, 0, False),
        (b"abc", 7, 1, True),
        (b"abc", 8, 1, False),
        (b"ab", 5, 4, True),
        (b"bc", 5, 0, True),
        (b"cb", 6, 0, False),
    ],
)
def test_a_block_stored_in_part_loads_as_far_as_it_was_stored(
    fixture_with_parts: NamespacesFixture, letters: bytes, size: int, index: int, fits: bool
) -> None:
    spec = load(letters, blocks(range(size), (size, index)))
    if fits:
        assert gpu_blocks(fixture_with_parts.start("a", spec)) == list(range(size))
    else:
        assert fixture_with_parts.refused("a", spec) == Code.KEY_ABSENT
        assert fixture_with_parts.usage("pinned") == (0,)


def test_a_key_stored_in_part_is_a_miss_to_mirrors_until_a_store_covers_more(
    fixture_with_parts: NamespacesFixture,
) -> None:
    all_parts = blocks([0, 1, 2])
    assert fixture_with_parts.snapshot("a") == (b"b", b"")
    # This store covers no additional part.
    assert fixture_with_parts.stored("a", b"a", blocks([0], (1, 2))).extents == ()
    plan = fixture_with_parts.start("a", store(b"a", all_parts))
    assert gpu_blocks(plan) == [0, 1, 2]
    assert fixture_with_parts.refused("a", load(b"a", blocks([0], (1, 2)))) == Code.KEY_ABSENT
    assert fixture_with_parts.snapshot("a") == (b"b", b"a")
    fixture_with_parts.end(plan)
    assert fixture_with_parts.snapshot("a") == (b"ab", b"")
    fixture_with_parts.start("a", load(b"a", all_parts))


def test_a_key_stored_in_part_is_not_replaced_while_it_is_loaded(
    fixture_with_parts: NamespacesFixture,
) -> None:
    part = fixture_with_parts.start("a", load(b"a", blocks([0], (1, 2))))
    assert fixture_with_parts.stored("a", b"a", blocks([0, 1, 2])).extents == ()
    fixture_with_parts.end(part)
    assert gpu_blocks(fixture_with_parts.stored("a", b"a", blocks([0, 1, 2]))) == [0, 1, 2]


def test_a_key_stored_in_part_is_abandoned_for_subscribers() -> None:
    fixture = NamespacesFixture("a", fingerprint=FINGERPRINT_OF_THREE, layout=WIDE, quota=12 * PAGE)
    plan = fixture.start("a", store(b"ab", blocks([0, 1, 2, 3])))
    assert key_events_of(fixture.end(plan), PublishKVEvents) == [
        ("stored", b"a"),
        ("abandoned", b"b"),
    ]
    for letter in each(b"cdef"):
        fixture.stored("a", letter, blocks([0, 1, 2]))
    assert fixture.usage("evictions") == (2,)
    assert fixture.snapshot("a") == (b"cdef", b"")


def test_a_store_does_not_evict_resident_keys_of_its_offer() -> None:
    """The engine offers b, c, d and e. The client stores c, d and e, and names b as resident."""
    fixture = NamespacesFixture("a")
    fixture.stored("a", b"a")
    fixture.stored("a", b"b")
    fixture.send("a", wire.Touch(each(b"a")))
    spec = blocks([0, 1, 2]), KeyLoadStoreSpec(each(b"cde"), 0, each(b"b"))
    fixture.end(fixture.start("a", spec))
    assert fixture.loadable("a") == b"bcde"
    spec = blocks([0]), KeyLoadStoreSpec(each(b"f"), 0, each(b"bcde"))
    assert fixture.refused("a", spec) == Code.CACHE_FULL


def test_resident_keys_of_an_offer_are_validated() -> None:
    fixture = NamespacesFixture("a")
    spec = blocks([0]), KeyLoadStoreSpec(each(b"a"), 0, (b"long",))
    assert fixture.refused("a", spec) == Code.BAD_KEY


def test_stored_parts_survive_the_engine_and_a_change_of_policy(
    fixture_with_parts: NamespacesFixture,
) -> None:
    fixture_with_parts.close_sessions("a")
    assert fixture_with_parts.open_namespace("b", FINGERPRINT_OF_THREE, 12 * PAGE, "arc").reattached
    fixture_with_parts.register("b", WIDE)
    assert fixture_with_parts.refused("b", load(b"a", blocks([0, 1, 2]))) == Code.KEY_ABSENT
    fixture_with_parts.start("b", load(b"a", blocks([0, 1], (2, 1))))


def test_parts_of_many_groups_are_found_without_a_search_for_each() -> None:
    groups, size = 16, 16
    layout = KVLayout((TensorLayout(32, 1, 1),), ((TensorRef(0, 1),),) * groups, 2)
    fingerprint = msgspec.structs.replace(FINGERPRINT, host_block_bytes=2)
    fixture = NamespacesFixture("a", fingerprint=fingerprint, layout=layout)
    keys = [CountedKey([number]) for number in range(groups * size)]
    gpu = blocks([*range(2 * size - 2)] * groups, *[(2 * size - 2, 1)] * groups)
    CountedKey.times = 0
    plan = fixture.start("a", (gpu, KeyLoadStoreSpec(keys)))
    assert len(copies(plan)) == gpu.block_ids.size
    assert CountedKey.times < 4 * len(keys)
