"""Opening namespaces, and their status."""

from __future__ import annotations

import msgspec
import pytest

from kvferry.daemon.core.actions import (
    SendMessage,
    TensorsUnmapped,
)
from kvferry.proto import memory
from kvferry.proto import messages as wire
from kvferry.proto import status as proto_status
from kvferry.proto.errors import Code
from kvferry.proto.fingerprint import Fingerprint
from support.namespaces_fixture import (
    FINGERPRINT,
    OTHER,
    PAGE,
    POOL,
    REGION_BYTES,
    NamespacesFixture,
    each,
    load,
    offsets,
    store,
)

# Opening


def test_opening_creates_a_namespace() -> None:
    fixture = NamespacesFixture()
    opened = fixture.open_namespace("a", quota=REGION_BYTES + 100, policy="arc", threshold=2)
    assert opened == wire.Opened(7, FINGERPRINT.name, 4, PAGE, False, "arc", 2, ())
    assert fixture.core.reserved_bytes == REGION_BYTES + 100


def test_a_namespace_without_a_quota_gets_the_memory_of_deserted_ones() -> None:
    fixture = NamespacesFixture("a", quota=15 * REGION_BYTES)
    fixture.stored("a", b"abc")
    beside = fixture.open_namespace("n", OTHER, quota=None)
    assert beside.num_blocks == REGION_BYTES // PAGE
    in_use = f"in use: namespace {FINGERPRINT.name} of 'llama' (60 KiB)"
    assert beside.shortfall.endswith(in_use)
    assert fixture.open_namespace("m", OTHER, quota=None).shortfall == beside.shortfall
    fixture.close_sessions("a", "m", "n")
    again = fixture.open_namespace("n", OTHER, quota=None)
    assert (again.reattached, again.num_blocks) == (True, REGION_BYTES // PAGE)
    assert f"kvferry release {OTHER.name}" in again.shortfall
    third = Fingerprint("third", PAGE, key_bytes=1)
    whole = fixture.open_namespace("w", third, quota=None)
    assert (whole.num_blocks, whole.shortfall.split(";")[0]) == (
        15 * REGION_BYTES // PAGE,
        "it is the largest part of the host pool of 64 KiB that is not in use",
    )
    assert {one.name for one in fixture.namespaces()} == {OTHER.name, third.name}


def test_an_engine_with_an_equal_fingerprint_shares_the_namespace() -> None:
    fixture = NamespacesFixture("a")
    plan = fixture.stored("a", b"ab")
    assert fixture.open_namespace("b") == wire.Opened(
        7, FINGERPRINT.name, 4, PAGE, True, "lru", 1, ()
    )
    assert fixture.register("b") == memory.HostRegion(4, PAGE, False)
    assert offsets(fixture.start("b", load(b"ba"))) == offsets(plan)[::-1]
    assert fixture.core.reserved_bytes == REGION_BYTES


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("host_block_bytes", 2 * PAGE),
        ("revision", "b00b5"),
        ("dtype", "bfloat16"),
        ("kv_dtype", "fp8"),
        ("kv_layout", "HND"),
        ("block_size", 32),
        ("rank", 1),
        ("world_size", 2),
        ("hash_algorithm", "sha256"),
        ("hash_seed", "42"),
        ("key_bytes", 2),
    ],
)
def test_a_fingerprint_that_differs_in_one_field_is_another_namespace(
    field: str, value: object
) -> None:
    fixture = NamespacesFixture("a")
    fixture.stored("a", b"a")
    opened = fixture.open_namespace("b", msgspec.structs.replace(FINGERPRINT, **{field: value}))
    original = getattr(FINGERPRINT, field)
    difference = f"{FINGERPRINT.name}: {field}: {value!r} here, {original!r} there"
    assert (opened.reattached, opened.unlike) == (False, (difference,))
    assert opened.name != FINGERPRINT.name
    assert [(n.name, n.engines, n.ready) for n in fixture.namespaces()] == [
        (FINGERPRINT.name, ("a",), 1),
        (opened.name, ("b",), 0),
    ]


def test_differences_are_listed_for_namespaces_of_the_same_model() -> None:
    fixture = NamespacesFixture()
    fixture.open_namespace("a", OTHER)
    first = fixture.open_namespace(
        "b", msgspec.structs.replace(FINGERPRINT, extra=(("rope", "yarn"),))
    )
    assert first.unlike == ()
    (unlike,) = fixture.open_namespace("c").unlike
    assert unlike == f"{first.name}: rope: None here, 'yarn' there"


def test_differences_to_other_namespaces_are_bounded() -> None:
    fixture = NamespacesFixture(pool_bytes=64 * REGION_BYTES)
    names = [f"e{n}" for n in range(40)]
    for name in names:
        extra = tuple((f"{field:02}", name * 20) for field in range(20))
        fixture.open_namespace(name, msgspec.structs.replace(FINGERPRINT, extra=extra))
    unlike = fixture.open_namespace("a").unlike
    assert [len(text) for text in unlike] == [512] * 16
    assert "00: None here, 'e0e0" in unlike[0]


def test_a_too_long_fingerprint_is_refused() -> None:
    """One message reports the fingerprints of all namespaces."""
    fixture = NamespacesFixture()
    for texts, fits in ((15, True), (16, False)):
        extra = tuple((f"{n:02}", 253 * "x") for n in range(texts))
        fingerprint = msgspec.structs.replace(FINGERPRINT, extra=extra)
        assert (fingerprint.nbytes <= 4096) == fits
        if fits:
            fixture.open_namespace("a", fingerprint)
            fixture.close_sessions("a")
        else:
            error = fixture.error("a", wire.OpenNamespace(5, fingerprint, REGION_BYTES))
            assert error == (Code.BAD_SPEC, str(fingerprint.nbytes))


@pytest.mark.parametrize("second", ["a/worker", "a/scheduler"])
def test_the_sessions_of_an_engine_are_in_one_namespace(second: str) -> None:
    fixture = NamespacesFixture("a/worker")
    other = msgspec.structs.replace(FINGERPRINT, kv_dtype="fp8", rank=3)
    before = fixture.namespaces()
    assert fixture.error(second, wire.OpenNamespace(5, other, REGION_BYTES)) == (
        Code.NAMESPACE_MISMATCH,
        "kv_dtype: 'fp8' here, '' there, rank: 3 here, 0 there",
    )
    assert fixture.namespaces() == before
    assert fixture.open_namespace(second).reattached


def test_the_order_of_extra_fields_is_ignored() -> None:
    fixture = NamespacesFixture()
    extra = (("rope", "yarn"), ("tokenizer", "v2"))
    fixture.open_namespace("a", msgspec.structs.replace(FINGERPRINT, extra=extra))
    again = msgspec.structs.replace(FINGERPRINT, extra=extra[::-1])
    fixture.send("a", wire.OpenNamespace(5, again, REGION_BYTES))  # refused, or the same namespace
    fixture.close_sessions("a")
    assert [status.engines for status in fixture.namespaces()] == [()]


def test_fingerprints_with_duplicate_extra_fields_are_compared_in_full() -> None:
    fixture = NamespacesFixture()
    fixture.open_namespace(
        "a/worker", msgspec.structs.replace(FINGERPRINT, extra=(("b", "1"), ("b", "2")))
    )
    other = msgspec.structs.replace(FINGERPRINT, extra=(("b", "2"),))
    error = fixture.error("a/scheduler", wire.OpenNamespace(5, other, REGION_BYTES))
    assert error[0] == Code.NAMESPACE_MISMATCH


def test_an_engine_may_change_its_fingerprint_after_its_last_session() -> None:
    fixture = NamespacesFixture("a/worker", "a/scheduler")
    fixture.close_sessions("a/worker")
    assert fixture.error("a/new", wire.OpenNamespace(5, OTHER))[0] == Code.NAMESPACE_MISMATCH
    fixture.close_sessions("a/scheduler")
    fixture.open_namespace("a/new", OTHER)


@pytest.mark.parametrize("quota", [0, 1, PAGE - 1, POOL + 1])
def test_a_quota_below_one_block_or_above_the_pool_is_refused(quota: int) -> None:
    fixture = NamespacesFixture()
    assert fixture.error("a", wire.OpenNamespace(5, FINGERPRINT, quota)) == (
        "pool_full",
        str(quota),
    )
    assert fixture.namespaces() == ()
    assert fixture.core.reserved_bytes == 0
    assert fixture.error("a", wire.Touch(()))[0] == Code.UNKNOWN_NAMESPACE


def test_a_refused_quota_keeps_the_namespace() -> None:
    fixture = NamespacesFixture("a", policy="arc")
    fixture.stored("a", b"abc")
    fixture.close_sessions("a")
    before = fixture.namespaces()
    assert fixture.error("b", wire.OpenNamespace(5, FINGERPRINT, POOL + 1))[0] == Code.POOL_FULL
    assert fixture.namespaces() == before
    assert fixture.open_namespace("b").reattached


def test_an_unknown_policy_is_refused() -> None:
    fixture = NamespacesFixture()
    error = fixture.error("a", wire.OpenNamespace(5, FINGERPRINT, REGION_BYTES, "fifo"))
    assert error == (Code.BAD_SPEC, "fifo")
    assert fixture.namespaces() == ()


def test_opening_twice_changes_nothing() -> None:
    fixture = NamespacesFixture("a")
    fixture.stored("a", b"ab")
    fixture.send("a", wire.Pin(each(b"a")))
    before = fixture.namespaces()
    assert fixture.open_namespace("a").reattached
    assert fixture.namespaces() == before
    fixture.send("a", wire.Unpin(each(b"a")))
    fixture.close_sessions("a")
    assert fixture.usage("engines", "pinned") == ((), 0)


def test_opening_a_used_namespace_with_other_settings_keeps_its_settings() -> None:
    fixture = NamespacesFixture("a")
    fixture.stored("a", b"ab")
    opened = fixture.open_namespace("b", quota=2 * REGION_BYTES, policy="arc", threshold=3)
    reason = (
        "8 KiB were asked for, but the namespace is in use with 4 KiB; another size applies when "
        "all of its engines have stopped"
    )
    reply = wire.Opened(7, FINGERPRINT.name, 4, PAGE, True, "lru", 1, shortfall=reason)
    assert opened == reply
    assert fixture.usage("host_bytes", "shortfall") == (4 * PAGE, reason)
    assert fixture.loadable("a") == b"ab"
    fixture.close_sessions("a", "b")
    assert fixture.usage("shortfall") == ("",)


def test_opening_while_an_engine_is_being_unmapped_keeps_the_settings() -> None:
    """Its session is closed, but its tensors are mapped and its jobs are in flight."""
    fixture = NamespacesFixture("a")
    plan = fixture.start("a", store(b"a"))
    fixture.core.close_session("a")
    assert fixture.open_namespace("b", quota=2 * REGION_BYTES, policy="arc").policy == "lru"
    fixture.end(plan)
    fixture.report(TensorsUnmapped(1))
    fixture.register("b")
    assert fixture.loadable("b") == b"a"


def test_opening_an_unused_namespace_changes_its_policy_and_keeps_the_keys() -> None:
    fixture = NamespacesFixture("a")
    plan = fixture.stored("a", b"abcd")
    fixture.close_sessions("a")
    opened = fixture.open_namespace("b", policy="arc", threshold=2)
    assert (opened.reattached, opened.policy, opened.store_threshold) == (True, "arc", 2)
    (found,) = fixture.region_records.found()
    assert (found.record.policy, found.record.threshold) == ("arc", 2)
    fixture.register("b")
    assert offsets(fixture.start("b", load(b"abcd"))) == offsets(plan)
    assert fixture.submit("b", store(b"e"))[0].plan.extents == ()


def test_a_change_of_policy_sends_no_events_and_keeps_the_counters() -> None:
    """Events for a million keys have 34 MB and block the event loop for seconds."""
    fixture = NamespacesFixture("a")
    fixture.send("a", wire.Touch((), 3, 4))
    fixture.stored("a", b"abcd")
    fixture.stored("a", b"e")
    fixture.close_sessions("a")
    (before,) = fixture.namespaces()
    actions = fixture.send("b", wire.OpenNamespace(7, FINGERPRINT, REGION_BYTES, "arc", 2))
    assert [type(action) for action in actions] == [SendMessage]
    (after,) = fixture.namespaces()
    assert after == msgspec.structs.replace(before, policy="arc", engines=("b",))


def test_reopening_with_the_same_policy_keeps_its_state() -> None:
    fixture = NamespacesFixture("a", policy="arc", threshold=2)
    for _ in range(2):
        fixture.stored("a", b"ab")
    fixture.send("a", wire.Touch(each(b"a"), 3, 4))
    fixture.stored("a", b"c")  # its first offer
    fixture.close_sessions("a")
    before = fixture.namespaces()
    fixture.open_namespace("b", policy="arc", threshold=2)
    fixture.register("b")
    assert [msgspec.structs.replace(n, engines=()) for n in fixture.namespaces()] == list(before)
    fixture.stored("b", b"c")
    assert fixture.loadable("b") == b"abc"


def test_another_quota_recreates_a_namespace_without_engines() -> None:
    fixture = NamespacesFixture("a")
    fixture.stored("a", b"abcd")
    fixture.close_sessions("a")
    opened = fixture.open_namespace("b", quota=2 * REGION_BYTES)
    assert (opened.reattached, opened.num_blocks) == (False, 8)
    assert fixture.usage("blocks", "ready", "free") == (8, 0, 8)
    assert fixture.core.reserved_bytes == 2 * REGION_BYTES


# Status


def test_namespace_status_has_all_counters() -> None:
    fixture = NamespacesFixture("b", "a/worker", "a/scheduler", policy="arc", threshold=2)
    for _ in range(2):
        fixture.stored("b", b"abc")
    fixture.stored("b", b"z")  # offered once: skipped
    for _ in range(2):
        plan = fixture.start("b", store(b"d"))
    fixture.end(plan)
    fixture.start("b", load(b"ab"))
    for _ in range(2):
        fixture.submit("b", store(b"e"))
    fixture.send("a/scheduler", wire.Pin(each(b"b")))
    fixture.send("a/scheduler", wire.Touch(each(b"ab"), 5, 6))
    fixture.open_namespace("n", OTHER, 2 * PAGE)
    fixture.close_sessions("n")
    assert fixture.namespaces() == (
        proto_status.NamespaceStatus(
            name=FINGERPRINT.name,
            fingerprint=FINGERPRINT,
            policy="arc",
            engines=("a", "b"),
            blocks=4,
            block_bytes=PAGE,
            free=0,
            pending=1,
            ready=3,
            unverified=0,
            orphaned=0,
            pinned=2,
            hits=5,
            misses=6,
            stored=4,
            stores_skipped=6,
            evictions=1,
        ),
        proto_status.NamespaceStatus(OTHER.name, OTHER, "lru", (), 2, PAGE, 2, *(0,) * 10),
    )


def test_spare_keys_are_evicted_first_while_one_engine_is_in_the_namespace() -> None:
    """Sessions "a" and "b" are of engines of their names. The namespace has four blocks."""
    fixture = NamespacesFixture("a")
    fixture.stored("a", b"abcd")
    fixture.send("a", wire.Spare(each(b"a")))
    fixture.stored("a", b"x")
    assert fixture.loadable("a") == b"bcd"
    fixture.send("a", wire.Spare(each(b"b")))
    fixture.open_namespace("b")  # forgets it
    fixture.send("a", wire.Spare(each(b"c")))  # is ignored
    fixture.stored("a", b"y")
    assert fixture.loadable("a") == b"bc"
    fixture.close_sessions("a")
    fixture.register("b")
    fixture.send("b", wire.Spare(each(b"b")))
    fixture.stored("b", b"z")
    assert fixture.loadable("b") == b"c"
