"""Blocks that the tiers write: which ones, held how long, and written once."""

from __future__ import annotations

import pytest

from kvferry.daemon.core.actions import Action, BlockSet, PublishKVEvents
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
    ROOM,
    NamespacesFixture,
    each,
    load,
    store,
)

QUOTA = 4 * ROOM  # 16 blocks: four may be written at a time


def new_fixture(letters: bytes = b"", policy: str = "lru", min_uses: int = 1) -> NamespacesFixture:
    tiers = (TierDescription("disk", min_uses=min_uses),)
    fixture = NamespacesFixture("a", quota=QUOTA, policy=policy, tiers=tiers)
    for letter in each(letters):
        fixture.stored("a", letter)
    return fixture


def take(
    fixture: NamespacesFixture,
    limit: int = 16,
    coldest: float = 1.0,
    tier: int = 0,
) -> list[WriteJob]:
    return fixture.core.writes.take_writes(tier, limit, coldest)


def end(fixture: NamespacesFixture, job: WriteJob, done: list[bool]) -> list[Action]:
    return fixture.report(BlocksWritten(job.number, tuple(done)))


def letters_of(jobs: list[WriteJob]) -> bytes:
    return b"".join(key for job in jobs for key in job.keys)


def write_all(fixture: NamespacesFixture, tier: int = 0) -> bytes:
    letters = b""
    while jobs := take(fixture, tier=tier):
        letters += letters_of(jobs)
        for job in jobs:
            end(fixture, job, [True] * len(job.keys))
    return letters


def test_stored_keys_are_written_once_the_coldest_first() -> None:
    fixture = new_fixture(b"abc")
    (job,) = take(fixture, limit=2)
    assert letters_of([job]) == b"ab"
    assert job.offsets.tolist() == (job.blocks * PAGE).tolist()
    assert (job.block_bytes, job.store.partition("-")[0]) == (PAGE, job.owner.name)
    end(fixture, job, [True, False])
    assert write_all(fixture) == b"bc"
    assert take(fixture) == []


@pytest.mark.parametrize("policy", ["lru", "arc", "s3fifo"])
def test_only_the_coldest_share_is_written(policy: str) -> None:
    fixture = new_fixture(b"abcdefgh", policy)
    assert letters_of(take(fixture, coldest=0.25)) == b"ab"
    assert take(fixture, coldest=0.25) == []


def test_keys_are_written_from_the_given_use_on() -> None:
    fixture = new_fixture(b"abcd", min_uses=2)
    assert take(fixture) == []
    fixture.send("a", wire.Touch(each(b"b")))
    fixture.end(fixture.start("a", load(b"d")))
    assert write_all(fixture) in (b"bd", b"db")


def test_keys_are_written_once_they_have_a_checksum() -> None:
    fixture = new_fixture()
    fixture.commits = False
    fixture.stored("a", b"ab")
    owner, blocks, keys = (
        getattr(fixture.stored_last, name) for name in ("owner", "blocks", "keys")
    )
    assert take(fixture) == []
    fixture.commit(BlockSet(owner, blocks, keys[::-1]))
    assert take(fixture) == []  # they are in other blocks
    fixture.commit(BlockSet(owner, blocks[:1], keys[:1]))
    assert write_all(fixture) == keys[0]


def test_keys_that_were_used_since_they_were_written_are_named_in_turn() -> None:
    """And written again if the tier has lost them."""
    fixture = new_fixture(b"abcdef")
    fixture.open_sessions("b")
    fixture.open_namespace("b", OTHER, QUOTA)
    fixture.register("b")
    fixture.stored("b", b"uv")
    assert sorted(write_all(fixture)) == sorted(b"abcdefuv")
    assert fixture.core.writes.next_written(0, 16) is None
    fixture.send("a", wire.Touch(each(b"bcd")))
    fixture.send("b", wire.Touch(each(b"v")))
    named = []
    while (written := fixture.core.writes.next_written(0, 2)) is not None:
        named.append(written)
    assert sorted(map(len, (each.keys for each in named))) == [1, 1, 2]
    assert sorted(b"".join(key for each in named for key in each.keys)) == sorted(b"bcdv")
    for each_written in named:
        fixture.core.writes.reopen_writes(each_written, [key == b"c" for key in each_written.keys])
    assert write_all(fixture) == b"c"
    assert fixture.core.writes.next_written(1, 16) is None


def test_keys_that_are_written_or_evicted_meanwhile_are_not_written_again() -> None:
    fixture = new_fixture(b"ab")
    write_all(fixture)
    fixture.send("a", wire.Touch(each(b"ab")))
    written = fixture.core.writes.next_written(0, 16)
    assert written is not None
    fixture.core.writes.reopen_writes(written, [True, True])
    (job,) = take(fixture, limit=1)
    fixture.core.writes.reopen_writes(written, [True, True])
    assert len(letters_of(take(fixture, limit=2))) == 1
    end(fixture, job, [True])
    fixture.send("a", wire.Reset(5))
    fixture.core.writes.reopen_writes(written, [True, True])
    assert take(fixture) == []


@pytest.mark.parametrize(("min_uses", "dropped"), [(0, 0), (1, 14), (2, 2)])
def test_keys_that_are_evicted_before_they_were_written_are_counted(
    min_uses: int, dropped: int
) -> None:
    """If they should have been written."""
    fixture = new_fixture(b"abcdefghijklmnop", min_uses=min_uses)
    fixture.send("a", wire.Touch(each(b"abcd")))
    for job in take(fixture, limit=2):
        end(fixture, job, [True, True])
    fixture.stored("a", b"0123456789ABCDEF")
    counters = fixture.core.tier_counters()
    assert counters == {"disk": {"skipped": 0, "dropped_writes": dropped}}
    fixture.close_sessions("a")  # and its region goes to another
    fixture.open_sessions("b")
    fixture.open_namespace("b", OTHER, POOL)
    assert fixture.core.tier_counters() == counters


def test_pending_keys_are_written_once_they_are_stored() -> None:
    fixture = new_fixture()
    plan = fixture.start("a", store(b"a"))
    assert take(fixture) == []
    fixture.end(plan)
    assert write_all(fixture) == b"a"


def test_a_quarter_of_the_blocks_is_written_at_a_time() -> None:
    fixture = new_fixture(b"abcdef")
    (job,) = take(fixture)
    assert letters_of([job]) == b"abcd"
    assert take(fixture) == []
    end(fixture, job, [True] * 4)
    assert letters_of(take(fixture)) == b"ef"


def test_a_key_that_is_stored_again_in_another_block_is_written_again() -> None:
    fixture = new_fixture(b"a")
    assert write_all(fixture) == b"a"
    fixture.stored("a", b"bcdefghijklmnopq")
    fixture.stored("a", b"a")
    assert sorted(write_all(fixture)) == sorted(b"abcdefghijklmnop")


def test_each_tier_is_written() -> None:
    fixture = NamespacesFixture("a", quota=QUOTA, tiers=("disk", "store"))
    for letter in each(b"ab"):
        fixture.stored("a", letter)
    (job,) = take(fixture, tier=0)
    (other,) = take(fixture, tier=1)
    assert letters_of([job]) == letters_of([other]) == b"ab"
    assert job.number != other.number
    end(fixture, job, [True, False])
    assert take(fixture, tier=1) == []
    end(fixture, other, [False, True])
    assert write_all(fixture, tier=0) == b"b"
    assert write_all(fixture, tier=1) == b"a"


@pytest.mark.parametrize(
    ("tier", "faster_ones_take_it", "written"),
    [
        (0, False, (b"", b"a", b"a")),
        (2, False, (b"", b"", b"")),
        (2, True, (b"a", b"", b"")),
        (1, False, (b"", b"", b"a")),
    ],
)
def test_promoted_keys_are_not_written_back(
    tier: int, faster_ones_take_it: bool, written: tuple[bytes, ...]
) -> None:
    """Nor into faster tiers, unless that is their policy."""
    tiers = TierDescription("fast", faster_ones_take_it), "middle", "slow"
    fixture = NamespacesFixture("a", quota=QUOTA, tiers=tiers)
    fixture.send("a", wire.FindInTiers(1, each(b"a")))
    (fetch, _) = fixture.report(KeysFound(1, (tier,), (1e9,) * 3, (0.0,) * 3, (True,) * 3))[-2:]
    assert isinstance(fetch, FetchBlocks)
    fixture.report(BlocksFetched(fetch.fetch, (True,)))
    fixture.report(FetchReleased(fetch.fetch))
    assert fixture.loadable("a", b"a") == b"a"
    assert tuple(write_all(fixture, tier=number) for number in range(3)) == written


def test_a_block_that_is_being_written_is_not_used_for_another_key() -> None:
    fixture = new_fixture(b"abcdefghijklmnop")
    (job,) = take(fixture, limit=1)
    fixture.stored("a", b"q")
    assert fixture.loadable("a", b"abc") == b"ac"
    fixture.send("a", wire.Reset(5))
    assert fixture.usage("free", "orphaned") == (15, 1)
    end(fixture, job, [True])
    end(fixture, job, [True])
    assert fixture.usage("free", "orphaned") == (16, 0)


def test_what_was_written_is_published_with_the_place_of_the_tier() -> None:
    tiers = TierDescription("disk", locality="LOCAL"), "store"
    fixture = NamespacesFixture("a", quota=QUOTA, tiers=tiers)
    for letter in each(b"abc"):
        fixture.stored("a", letter)
    (job,), (other,) = take(fixture, tier=0), take(fixture, tier=1)
    events = wire.KeyEvents(0, (wire.KeyEvent(EventKind.STORED, each(b"ac")),), 1)
    place = Place("STORAGE", "LOCAL", "disk")
    expected = PublishKVEvents(FINGERPRINT.name, FINGERPRINT.block_size, events, place)
    assert end(fixture, job, [True, False, True]) == [expected]
    (published,) = end(fixture, other, [True] * 3)
    assert isinstance(published, PublishKVEvents)
    assert published.place == Place("STORAGE", None, "store")
    (job,) = take(fixture)
    assert end(fixture, job, [False]) == []


def test_the_end_of_a_write_from_before_a_reset_marks_no_key_of_today() -> None:
    """Nor is it published: it was dropped."""
    fixture = new_fixture(b"a")
    (job,) = take(fixture)
    fixture.send("a", wire.Reset(5))
    fixture.stored("a", b"a")
    assert end(fixture, job, [True]) == []
    assert write_all(fixture) == b"a"


def test_a_region_that_is_being_written_is_not_given_away() -> None:
    fixture = new_fixture(b"ab")
    fixture.close_sessions("a")
    (job,) = take(fixture)
    fixture.open_sessions("b")
    other = wire.OpenNamespace(7, OTHER, POOL, "lru", 1)
    assert fixture.error("b", other)[0] == Code.POOL_FULL
    end(fixture, job, [True, True])
    assert fixture.open_namespace("b", OTHER, POOL).num_blocks == POOL // PAGE


def test_namespaces_take_turns() -> None:
    fixture = new_fixture(b"ab")
    fixture.open_sessions("b")
    fixture.open_namespace("b", OTHER, QUOTA)
    fixture.register("b")
    fixture.stored("b", b"cd")
    jobs = [take(fixture, limit=1)[0] for _ in range(4)]
    stores = [job.store for job in jobs]
    assert stores[0] != stores[1]
    assert stores[:2] == stores[2:]
