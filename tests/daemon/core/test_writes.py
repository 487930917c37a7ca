"""Writes to the tiers: which blocks are written, once each, and how long they are held."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from kvferry.daemon.core.actions import Action, PublishKVEvents, SendMessage
from kvferry.daemon.core.block_table import STORED
from kvferry.daemon.core.tier_actions import (
    BlocksFetched,
    BlocksWritten,
    FetchBlocks,
    FetchReleased,
    KeysFound,
    TierDescription,
    WriteJob,
)
from kvferry.proto import messages as wire
from kvferry.proto.errors import Code
from kvferry.proto.events import Place
from kvferry.proto.keys import EventKind
from support.namespaces_fixture import (
    FINGERPRINT,
    OTHER,
    PAGE,
    POOL,
    REGION_BYTES,
    NamespacesFixture,
    each,
    load,
)

# 16 blocks: four may be written at a time.
QUOTA = 4 * REGION_BYTES


def new_fixture(letters: bytes = b"", policy: str = "lru", min_uses: int = 1) -> NamespacesFixture:
    tiers = (TierDescription("disk", min_uses=min_uses),)
    fixture = NamespacesFixture("a", quota=QUOTA, policy=policy, tiers=tiers)
    for letter in each(letters):
        fixture.stored("a", letter)
    return fixture


def open_second(fixture: NamespacesFixture) -> None:
    """Engine b, in another namespace."""
    fixture.open_namespace("b", OTHER, QUOTA)
    fixture.register("b")


def take_writes(
    fixture: NamespacesFixture,
    limit: int = 16,
    coldest: float = 1.0,
    tier: int = 0,
) -> list[WriteJob]:
    return fixture.core.writes.take_writes(tier, limit, coldest)


def end_write(fixture: NamespacesFixture, job: WriteJob, done: list[bool]) -> list[Action]:
    return fixture.report(BlocksWritten(job.number, tuple(done)))


def keys_of(jobs: list[WriteJob]) -> bytes:
    return b"".join(key for job in jobs for key in job.keys)


def write_all(fixture: NamespacesFixture, tier: int = 0) -> bytes:
    letters = b""
    while jobs := take_writes(fixture, tier=tier):
        letters += keys_of(jobs)
        for job in jobs:
            end_write(fixture, job, [True] * len(job.keys))
    return letters


def test_each_stored_key_is_written_once_and_the_oldest_first() -> None:
    fixture = new_fixture(b"abc")
    (job,) = take_writes(fixture, limit=2)
    assert keys_of([job]) == b"ab"
    assert job.offsets.tolist() == [0, PAGE]
    assert (job.block_bytes, job.store.partition("-")[0]) == (PAGE, FINGERPRINT.name)
    end_write(fixture, job, [True, False])
    assert write_all(fixture) == b"bc"
    assert take_writes(fixture) == []


@pytest.mark.parametrize("policy", ["lru", "arc", "s3fifo"])
def test_only_the_coldest_fraction_is_written(policy: str) -> None:
    fixture = new_fixture(b"abcdefgh", policy)
    assert keys_of(take_writes(fixture, coldest=0.25)) == b"ab"
    assert take_writes(fixture, coldest=0.25) == []


@pytest.mark.parametrize("policy", ["lru", "arc", "s3fifo"])
def test_a_prompt_is_written_from_its_head_on(policy: str) -> None:
    """Its tail is the coldest, and cannot be used without the head."""
    fixture = new_fixture(policy=policy)
    fixture.stored("a", b"abcdefgh")
    assert keys_of(take_writes(fixture, coldest=0.25)) == b"abcd"  # a quarter of the cache
    fixture = new_fixture(policy=policy)
    fixture.stored("a", b"abcd")
    fixture.stored("a", b"efgh")
    fixture.send("a", wire.Touch(each(b"abcd")))
    assert keys_of(take_writes(fixture, coldest=0.25))[:1] == b"a"


def test_keys_are_written_after_min_uses() -> None:
    fixture = new_fixture(b"abcd", min_uses=2)
    assert take_writes(fixture) == []
    fixture.send("a", wire.Touch(each(b"b")))
    fixture.end(fixture.start("a", load(b"d")))
    assert write_all(fixture) in (b"bd", b"db")


def test_keys_are_written_after_they_have_a_checksum() -> None:
    fixture = new_fixture()
    fixture.commits = False
    fixture.stored("a", b"ab")
    assert take_writes(fixture) == []
    table = fixture.core._namespaces.find_namespace(FINGERPRINT.name).region.table  # type: ignore[union-attr]
    first = table.find(STORED)[:1]
    table.commit(first, table.lines.versions(first), np.array([77], np.uint64))
    (job,) = take_writes(fixture)
    assert (job.keys, job.checksums.tolist()) == ((b"a",), [77])


def test_each_written_key_that_was_used_is_returned_once() -> None:
    """If the tier has lost a key, it is written again."""
    fixture = new_fixture(b"abcdef")
    open_second(fixture)
    fixture.stored("b", b"uv")
    assert sorted(write_all(fixture)) == sorted(b"abcdefuv")
    assert fixture.core.writes.next_written(0, 16) is None
    fixture.send("a", wire.Touch(each(b"bcd")))
    fixture.send("b", wire.Touch(each(b"v")))
    returned = []
    while (written := fixture.core.writes.next_written(0, 2)) is not None:
        returned.append(written)
    assert sorted(len(written.keys) for written in returned) == [1, 1, 2]
    assert sorted(b"".join(key for written in returned for key in written.keys)) == sorted(b"bcdv")
    for written in returned:
        fixture.core.writes.reopen_writes(written, [key == b"c" for key in written.keys])
    assert write_all(fixture) == b"c"
    assert fixture.core.writes.next_written(1, 16) is None


def test_reopening_ignores_keys_in_flight_and_evicted_keys() -> None:
    fixture = new_fixture(b"ab")
    write_all(fixture)
    fixture.send("a", wire.Touch(each(b"ab")))
    written = fixture.core.writes.next_written(0, 16)
    assert written is not None
    fixture.core.writes.reopen_writes(written, [True, True])
    (job,) = take_writes(fixture, limit=1)
    fixture.core.writes.reopen_writes(written, [True, True])
    assert len(keys_of(take_writes(fixture, limit=2))) == 1
    end_write(fixture, job, [True])
    fixture.send("a", wire.Reset(5))
    fixture.core.writes.reopen_writes(written, [True, True])
    assert take_writes(fixture) == []


@pytest.mark.parametrize(("min_uses", "dropped", "lost"), [(0, 0, 0), (1, 14, 16), (2, 2, 1)])
def test_keys_that_are_evicted_before_they_were_written_are_counted(
    min_uses: int, dropped: int, lost: int
) -> None:
    """Only keys with min_uses uses count. With min_uses 0 nothing is written."""
    fixture = new_fixture(b"abcdefghijklmnop", min_uses=min_uses)
    fixture.send("a", wire.Touch(each(b"abcd")))
    for job in take_writes(fixture, limit=2):
        end_write(fixture, job, [True, True])
    fixture.stored("a", b"0123456789ABCDEF")
    counters = fixture.core.tier_counters()
    assert counters == {"disk": {"skipped": 0, "dropped_writes": dropped}}
    fixture.send("a", wire.Touch(each(b"0")))
    fixture.close_sessions("a")  # then another namespace gets its region
    fixture.open_namespace("b", OTHER, POOL)
    assert fixture.core.tier_counters()["disk"]["dropped_writes"] == dropped + lost


def promote(fixture: NamespacesFixture, key: bytes, tier: int) -> None:
    """Promote a key from one of three tiers."""
    fixture.send("a", wire.FindInTiers(1, each(key)))
    (fetch, _) = fixture.report(KeysFound(1, (tier,), (1e9,) * 3, (0.0,) * 3, (True,) * 3))[-2:]
    assert isinstance(fetch, FetchBlocks)
    fixture.report(BlocksFetched(fetch.fetch, (True,)))
    fixture.report(FetchReleased(fetch.fetch))
    assert fixture.loadable("a", key) == key


@pytest.mark.parametrize(
    ("tier", "writes_promoted", "written"),
    [
        (0, False, (b"", b"a", b"a")),
        (2, False, (b"", b"", b"")),
        (2, True, (b"a", b"", b"")),
        (1, False, (b"", b"", b"a")),
    ],
)
def test_promoted_keys_are_not_written_back(
    tier: int, writes_promoted: bool, written: tuple[bytes, ...]
) -> None:
    """They are not written to faster tiers either, except with writes_promoted."""
    tiers = TierDescription("fast", writes_promoted), "middle", "slow"
    fixture = NamespacesFixture("a", quota=QUOTA, tiers=tiers)
    promote(fixture, b"a", tier)
    assert tuple(write_all(fixture, tier=number) for number in range(3)) == written


def test_a_block_that_is_being_written_is_not_reused() -> None:
    fixture = new_fixture(b"abcdefghijklmnop")
    (job,) = take_writes(fixture, limit=1)
    fixture.stored("a", b"q")
    assert fixture.loadable("a", b"abc") == b"ac"
    fixture.send("a", wire.Reset(5))
    assert fixture.usage("free", "orphaned") == (15, 1)
    end_write(fixture, job, [True])
    end_write(fixture, job, [True])
    assert fixture.usage("free", "orphaned") == (16, 0)


def test_written_keys_are_published_with_the_place_of_the_tier() -> None:
    tiers = TierDescription("disk", locality="LOCAL"), "store"
    fixture = NamespacesFixture("a", quota=QUOTA, tiers=tiers)
    for letter in each(b"abc"):
        fixture.stored("a", letter)
    (job,), (other,) = take_writes(fixture, tier=0), take_writes(fixture, tier=1)
    events = wire.KeyEvents(0, (wire.KeyEvent(EventKind.STORED, each(b"ac")),), 0)
    place = Place("STORAGE", "LOCAL", "disk")
    expected = PublishKVEvents(FINGERPRINT.name, FINGERPRINT.block_size, events, place)
    assert end_write(fixture, job, [True, False, True]) == [expected]
    (published,) = end_write(fixture, other, [True] * 3)
    assert isinstance(published, PublishKVEvents)
    assert published.place == Place("STORAGE", None, "store")
    (job,) = take_writes(fixture)
    assert end_write(fixture, job, [False]) == []


def test_the_end_of_a_write_from_before_a_reset_marks_no_key() -> None:
    """It is not published, because the key is of an older epoch."""
    fixture = new_fixture(b"a")
    (job,) = take_writes(fixture)
    fixture.send("a", wire.Reset(5))
    fixture.stored("a", b"a")
    assert end_write(fixture, job, [True]) == []
    assert write_all(fixture) == b"a"


@pytest.mark.parametrize("quota", [POOL, None])
def test_a_request_for_a_region_that_is_being_written_waits_for_the_end_of_the_write(
    quota: int | None,
) -> None:
    """A store of many blocks would keep a new engine out as long as it is written."""
    fixture = new_fixture(b"abcd")
    fixture.close_sessions("a")
    jobs = [take_writes(fixture, limit=1)[0] for _ in range(2)]
    assert fixture.send("b", wire.OpenNamespace(7, OTHER, quota, "lru", 1)) == []
    assert take_writes(fixture) == []
    end_write(fixture, jobs[0], [True])
    assert take_writes(fixture) == []
    (opened,) = [
        each for each in end_write(fixture, jobs[1], [True]) if isinstance(each, SendMessage)
    ]
    assert isinstance(opened.message, wire.Opened)
    assert opened.message.num_blocks == POOL // PAGE


def test_a_request_that_waited_for_a_write_in_vain_is_refused() -> None:
    fixture = new_fixture(b"a")
    fixture.close_sessions("a")
    (job,) = take_writes(fixture)
    assert fixture.send("b", wire.OpenNamespace(7, OTHER, POOL + 1, "lru", 1)) == []
    (refused,) = [each for each in end_write(fixture, job, [True]) if isinstance(each, SendMessage)]
    assert isinstance(refused.message, wire.Error)
    assert refused.message.error.code == Code.POOL_FULL


def test_namespaces_in_use_are_written_while_a_request_waits() -> None:
    fixture = new_fixture(b"ab")
    fixture.close_sessions("a")
    open_second(fixture)
    assert keys_of(take_writes(fixture, limit=1)) == b"a"
    third = msgspec.structs.replace(OTHER, model="third")
    assert fixture.send("c", wire.OpenNamespace(7, third, POOL, "lru", 1)) == []
    fixture.stored("b", b"c")
    assert keys_of(take_writes(fixture)) == b"c"
    fixture.close_sessions("c")
    assert keys_of(take_writes(fixture)) == b"b"


def test_writes_alternate_between_namespaces() -> None:
    fixture = new_fixture(b"ab")
    open_second(fixture)
    fixture.stored("b", b"cd")
    jobs = [take_writes(fixture, limit=1)[0] for _ in range(4)]
    stores = [job.store for job in jobs]
    assert stores[0] != stores[1]
    assert stores[:2] == stores[2:]


def test_blocks_of_a_second_namespace_are_written_from_its_region() -> None:
    fixture = new_fixture()
    open_second(fixture)
    fixture.stored("b", b"cd")
    (job,) = take_writes(fixture)
    assert job.offsets.tolist() == [QUOTA, QUOTA + PAGE]


def test_a_store_is_in_use_while_its_namespace_has_a_session() -> None:
    fixture = new_fixture(b"a")
    (job,) = take_writes(fixture)
    assert fixture.core.writes.stores_in_use() == [job.store]
    fixture.close_sessions("a")
    assert fixture.core.writes.stores_in_use() == []
