"""The Mooncake tier against a real master and store process. Two tiers stand for two hosts."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib import metadata
from typing import Any

import numpy as np
import pytest

from kvferry.daemon.tier_config import MooncakeTierConfig
from kvferry.daemon.tiers.base import Result
from kvferry.daemon.tiers.messages import UsageRequest
from kvferry.daemon.tiers.mooncake import store_client
from kvferry.daemon.tiers.tier_process import TierTimes
from kvferry.proto.errors import Refused
from kvferry.testing.mooncake_store import MooncakeStore, is_installed
from kvferry.testing.tier_subjects import (
    NAMESPACE,
    PoolMemory,
    ProcessSubject,
    TierSetup,
    content_of,
    key_of,
    open_subject,
)
from support.time_limits import TIMEOUT

from .setups import MOONCAKE

BLOCK = 64 << 10
SOON_BACK = TierTimes(last_restart=0.5, longest_off=1.0)
OK, MISS, LATE, FULL, ERROR = Result.OK, Result.MISS, Result.LATE, Result.FULL, Result.ERROR

pytestmark = pytest.mark.skipif(
    not is_installed(), reason="MOONCAKE IS NOT TESTED: install mooncake-transfer-engine-non-cuda"
)


@pytest.fixture(scope="module")
def shared_store() -> Iterator[MooncakeStore]:
    with MooncakeStore(segment_bytes=64 << 20) as store:
        yield store


@pytest.fixture
def own_store() -> Iterator[MooncakeStore]:
    """A store that the test may kill."""
    with MooncakeStore(segment_bytes=64 << 20) as store:
        yield store


class Host:
    """A tier with a pool of its own."""

    def __init__(self, store: MooncakeStore, stack: ExitStack) -> None:
        self.pool = PoolMemory(BLOCK)
        stack.callback(self.pool.files.close)
        setup = TierSetup(MOONCAKE, {"master": store.address}, times=SOON_BACK)
        made = stack.enter_context(open_subject(setup, self.pool))
        assert isinstance(made, ProcessSubject)
        self.tier = made


class ForeignWriter:
    """A client of the store that writes what it wants, as another program might."""

    def __init__(self, store: MooncakeStore) -> None:
        from mooncake.store import MooncakeDistributedStore

        self.store: Any = MooncakeDistributedStore()
        arguments = ("127.0.0.1", "P2PHANDSHAKE", 0, 1 << 20, "tcp", "", store.address)
        assert self.store.setup(*arguments) == 0

    def epoch(self, namespace: str) -> int:
        return int(self.store.get(f"kvferry/{namespace}/epoch"))

    def object(self, number: int, namespace: str) -> str:
        return f"kvferry/{namespace}/{self.epoch(namespace)}/{key_of(number).hex()}"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def until(condition: Callable[[], bool]) -> None:
    """Ask again and again: a tier that is off is tried again, a key that was absent is asked for
    again after a moment.
    """
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_what_one_host_puts_the_other_fetches(
    shared_store: MooncakeStore, stack: ExitStack
) -> None:
    here, there = Host(shared_store, stack), Host(shared_store, stack)
    space = "a1" * 8
    assert there.tier.contains([1], space) == [False]
    assert here.tier.put([1, 2], space) == [OK, OK]
    until(lambda: there.tier.contains([1, 2, 3], space) == [True, True, False])
    assert there.tier.fetch([1, 2, 3], space) == [OK, OK, MISS]


def test_a_drop_on_one_host_is_seen_on_the_other_and_frees_memory(
    shared_store: MooncakeStore, stack: ExitStack
) -> None:
    here, there = Host(shared_store, stack), Host(shared_store, stack)
    space, part = "a2" * 8, "a2" * 8 + "-part"
    here.tier.put([1, 2], part)
    assert there.tier.contains([1, 2], part) == [True, True]
    before = shared_store.key_count()
    here.tier.drop(namespace=space)
    assert shared_store.key_count() == before - 2  # pointer and marker are replaced
    # `there` knows the old epoch until it looks.
    assert there.tier.contains([1, 2], part) == [False, False]
    assert there.tier.put([1], part) == [OK]
    assert here.tier.fetch([1, 2], part) == [OK, MISS]
    there.tier.drop(namespace=space)
    assert here.tier.contains([1], part) == [False]


def follow(host: Host, space: str) -> list[str]:
    """Let a host have a namespace in its pool, of which it knows the epoch. Returns a list that
    gets the namespace when it is dropped elsewhere."""
    client, dropped = host.tier.client, list[str]()
    client.dropped_elsewhere = dropped.append
    client.usage_request = lambda: UsageRequest({space: ""})
    host.tier.wait_until(lambda: client._generations.get(space) > 0)
    return dropped


@pytest.mark.parametrize("process", ["same", "new"])
def test_blocks_from_before_a_drop_on_another_host_are_not_found_again(
    shared_store: MooncakeStore, stack: ExitStack, process: str
) -> None:
    here, there = Host(shared_store, stack), Host(shared_store, stack)
    space = {"same": "b1", "new": "b2"}[process] * 8
    part, client = f"{space}-part", there.tier.client
    dropped = follow(there, space)
    assert here.tier.put([1], part) == [OK]
    here.tier.drop(namespace=space)
    if process == "new":
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        there.tier.wait_until(lambda: client.counts["deaths"] and client.is_on)
    # The process may know of the drop before the daemon does: a new one does.
    assert there.tier.put([1], part) in ([OK], [FULL])
    assert dropped or here.tier.contains([1], part) == [False]
    there.tier.wait_until(lambda: dropped)
    # FULL while the other host writes the new epoch.
    until(lambda: there.tier.put([2], part) == [OK])
    until(lambda: here.tier.fetch([2], part) == [OK])
    there.tier.drop(namespace=space)
    assert there.tier.contains([1, 2], part) == [False, False]
    assert dropped == [space]


def test_a_drop_on_another_host_right_after_the_first_put_is_noticed(
    shared_store: MooncakeStore, stack: ExitStack
) -> None:
    """Also if the daemon has not asked yet for the usage of this namespace."""
    here, there = Host(shared_store, stack), Host(shared_store, stack)
    space, dropped = "b9" * 8, list[str]()
    there.tier.client.dropped_elsewhere = dropped.append
    assert there.tier.put([1], f"{space}-part") == [OK]
    here.tier.drop(namespace=space)
    # A lookup that the master does not answer in time finds nothing, either.
    until(lambda: there.tier.contains([1], f"{space}-part") == [False] and bool(dropped))
    assert dropped == [space]


def test_a_drop_on_another_host_is_noticed_without_a_lookup(
    shared_store: MooncakeStore, stack: ExitStack
) -> None:
    here, there = Host(shared_store, stack), Host(shared_store, stack)
    space = "b3" * 8
    dropped = follow(there, space)
    assert there.tier.put([1], f"{space}-part") == [OK]
    here.tier.drop(namespace=space)
    there.tier.wait_until(lambda: dropped)
    assert dropped == [space]


def test_after_a_restart_of_the_master_old_blocks_are_not_found_again(
    own_store: MooncakeStore, stack: ExitStack
) -> None:
    """A namespace counts as dropped. There is no epoch until the stores have connected again."""
    here, there, space = Host(own_store, stack), Host(own_store, stack), "b4" * 8
    follow(here, space)
    dropped = follow(there, space)
    raw = ForeignWriter(own_store)
    before = raw.epoch(space)
    assert here.tier.put([1], space) == [OK]
    own_store.kill_master()
    own_store.start_master()
    until(lambda: raw.store.is_exist(f"kvferry/{space}/epoch") == 1)
    assert raw.epoch(space) != before
    here.tier.drop(namespace=space)
    there.tier.wait_until(lambda: dropped)
    # `there` may not have seen the drop yet, only the restart: a put into an old epoch is lost.
    until(lambda: there.tier.put([1], space) == here.tier.fetch([1], space) == [OK])
    raw.store.close()


def test_a_drop_frees_old_blocks_and_markers(shared_store: MooncakeStore, stack: ExitStack) -> None:
    here, space = Host(shared_store, stack), "a3" * 8
    raw = ForeignWriter(shared_store)
    old = [f"kvferry/{space}/{each}" for each in ("7/00", "epoch/7", "epoch/8")]
    old.append(f"kvferry/{space}-part/7/00")
    other = f"kvferry/{'a5' * 8}/7/00"
    for name in (*old, other):
        assert raw.store.put(name, b"x") == 0
    here.tier.drop(namespace=space)
    assert raw.store.batch_is_exist([*old, other]) == [0, 0, 0, 0, 1]
    kept = [f"kvferry/{space}/epoch", f"kvferry/{space}/epoch/{raw.epoch(space)}"]
    assert raw.store.batch_is_exist(kept) == [1, 1]
    raw.store.close()


def test_small_host_blocks_are_warned_of_once(
    shared_store: MooncakeStore, stack: ExitStack, capsys: pytest.CaptureFixture[str]
) -> None:
    here = Host(shared_store, stack)
    for number in (1, 2):
        assert here.tier.put([number], "a6" * 8) == [OK]
    here.tier.usage()  # sent after the log
    assert capsys.readouterr().out.count("small host blocks in the Mooncake tier") == 1


def test_an_epoch_that_has_lost_its_marker_is_not_valid_again(
    shared_store: MooncakeStore, stack: ExitStack
) -> None:
    here, space = Host(shared_store, stack), "a4" * 8
    dropped = follow(here, space)
    here.tier.put([1], space)
    raw = ForeignWriter(shared_store)
    epoch = raw.epoch(space)
    assert raw.store.remove(f"kvferry/{space}/epoch/{epoch}", True) == 0
    assert here.tier.contains([1], space) == [False]
    assert dropped == [space]
    assert Host(shared_store, stack).tier.fetch([1], space) == [MISS]
    assert raw.epoch(space) != epoch
    raw.store.close()


@pytest.mark.parametrize("wrong", ["short", "long", "other block", "no trailer", "flipped"])
def test_an_object_with_other_contents_is_a_miss_and_can_be_put_again(
    shared_store: MooncakeStore, stack: ExitStack, wrong: str
) -> None:
    here, space = Host(shared_store, stack), f"{len(wrong):016x}"
    here.tier.put([1, 2], space)
    raw = ForeignWriter(shared_store)
    name = raw.object(1, space)
    good = raw.store.get(name)
    flipped = bytes([good[0] ^ 1])
    contents = {
        "short": good[:-1],
        "long": good + b"x",
        "other block": raw.store.get(raw.object(2, space)),
        "no trailer": good[:BLOCK] + bytes(64),
        "flipped": flipped + good[1:],
    }[wrong]
    assert raw.store.remove(name, True) == 0
    assert raw.store.put(name, contents) == 0
    assert here.tier.contains([1], space) == [True]
    (result,) = here.tier.fetch([1], space)
    assert result is (Result.CORRUPT if wrong == "flipped" else MISS)
    assert here.tier.contains([1], space) == [False]
    assert here.tier.put([1], space) == [OK]
    assert here.tier.fetch([1, 2], space) == [OK, OK]
    raw.store.close()


def test_a_master_that_cannot_be_reached_is_named_and_tried_again(
    own_store: MooncakeStore,
    capsys: pytest.CaptureFixture[str],
    stack: ExitStack,
) -> None:
    own_store.kill_master()
    pool = PoolMemory(BLOCK)
    stack.callback(pool.files.close)
    subject = ProcessSubject(pool, MooncakeTierConfig(own_store.address), SOON_BACK)
    stack.callback(subject.close)
    subject.wait_until(lambda: subject.client.counts["deaths"])
    assert f"master {own_store.address} cannot be reached" in capsys.readouterr().out
    own_store.start_master()
    own_store.wait_until_mounted()
    subject.wait_until(lambda: subject.client.is_on)
    until(lambda: subject.put([1]) == [OK])
    assert subject.fetch([1]) == [OK]


@pytest.mark.parametrize("what", ["master", "store", "store in transfer"])
def test_a_store_that_does_not_answer_costs_a_miss_within_the_deadline(
    own_store: MooncakeStore, stack: ExitStack, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    here = Host(own_store, stack)
    numbers, places = range(1, 25), range(40, 64)
    assert here.tier.put(numbers) == [OK] * 24
    pause = getattr(own_store, f"pause_{what.split()[0]}")
    if "transfer" not in what:
        pause()
    for place in places:
        here.pool.block(place)[:] = 0
    begin = time.monotonic()
    blocks = here.tier.blocks(NAMESPACE, [key_of(number) for number in numbers], places)
    fetch = here.tier.begin_fetch(blocks, 0.5)
    if "transfer" in what:
        while time.monotonic() < begin + 0.3 and not here.pool.block(places[0]).any():
            pass
        pause()
    here.tier.wait_until(lambda: fetch.results)
    assert time.monotonic() - begin < 10, "the call has passed its deadline"
    results, arrived = fetch.results or [], OK if "transfer" in what else LATE
    assert set(results) <= {arrived, LATE, ERROR}
    for number, place, result in zip(numbers, places, results, strict=True):
        if result is OK:
            assert np.array_equal(here.pool.block(place), content_of(number, BLOCK)), number
    here.tier.wait_until(lambda: fetch.released is not None)
    assert what != "master" or "check that mooncake_master runs" in capsys.readouterr().out
    for place in places:
        here.pool.block(place)[:] = 7
    # The store sends the rest.
    getattr(own_store, f"resume_{what.split()[0]}")()
    until(lambda: here.tier.fetch([1, 2]) == [OK, OK])
    written = [place for place in places if np.any(here.pool.block(place) != 7)]
    assert not written, "blocks were written after their release"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"master": "nowhere"}, "tiers.mooncake.master is 'nowhere'; give HOST:PORT"),
        ({"master": "127.0.0.1:1"}, "start mooncake_master"),
    ],
)
def test_a_tier_that_cannot_be_opened_says_why(options: dict[str, Any], message: str) -> None:
    from kvferry.daemon.tiers.mooncake import open_tier
    from kvferry.proto.errors import KVFerryError

    pool = PoolMemory(BLOCK)
    try:
        with pytest.raises((KVFerryError, OSError), match=message):
            open_tier(options, pool.files)
    finally:
        pool.files.close()


@pytest.mark.parametrize(
    ("installed", "advice"),
    [
        ((), r"pip install '\.\[mooncake\]' in a checkout"),
        (("mooncake-transfer-engine",), "apt-get install libcurl4 libibverbs1 libnuma1"),
        (
            ("mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda"),
            "uninstall mooncake-transfer-engine and mooncake-transfer-engine-non-cuda",
        ),
    ],
)
def test_a_library_that_cannot_be_imported_is_explained(
    installed: tuple[str, ...], advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return "0.3.13"

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setitem(sys.modules, "mooncake", None)
    with pytest.raises(Refused, match=f"Mooncake cannot be imported: .*; .*{advice}"):
        store_client._import_library()
