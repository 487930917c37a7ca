"""The Mooncake tier against a real master and store process. Two tiers stand for two hosts."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from importlib import metadata
from typing import Any

import numpy as np
import pytest

from kvferry.daemon.tier_config import MooncakeTierConfig
from kvferry.daemon.tiers.base import Result
from kvferry.daemon.tiers.mooncake import store_client
from kvferry.daemon.tiers.tier_process import TierTimes
from kvferry.proto.errors import Refused
from kvferry.testing.mooncake_store import MooncakeStore, is_installed
from kvferry.testing.tier_subjects import (
    NAMESPACE,
    PoolMemory,
    ProcessSubject,
    content_of,
    key_of,
)
from support.time_limits import TIMEOUT

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
    """A tier with a pool of its own, once it is on."""

    def __init__(self, store: MooncakeStore, stack: ExitStack) -> None:
        self.pool = PoolMemory(BLOCK)
        stack.callback(self.pool.files.close)
        self.tier = ProcessSubject(self.pool, MooncakeTierConfig(store.address), SOON_BACK)
        stack.callback(self.tier.close)
        self.tier.wait_until(lambda: self.tier.client.is_on)

    def settle(self, namespace: str, epoch: int = 0) -> int:
        """Returns the epoch that the store has, -1 if it is not known."""
        found = self.tier.runner.run(self.tier.client.settle({namespace: epoch}))
        return found.get(namespace, -1)


class ForeignWriter:
    """A client of the store that writes what it wants, as another program might."""

    def __init__(self, store: MooncakeStore) -> None:
        from mooncake.store import MooncakeDistributedStore

        self.store: Any = MooncakeDistributedStore()
        arguments = ("127.0.0.1", "P2PHANDSHAKE", 0, 1 << 20, "tcp", "", store.address)
        assert self.store.setup(*arguments) == 0

    def pointer(self, namespace: str) -> tuple[int, int]:
        epoch, incarnation = self.store.get(f"kvferry/{namespace}/epoch").split()
        return int(epoch), int(incarnation)


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


def test_after_a_restart_of_the_master_blocks_are_shared_again(
    own_store: MooncakeStore, stack: ExitStack
) -> None:
    """The epoch stays. No pointer can be put until the stores have connected again."""
    here, there, space = Host(own_store, stack), Host(own_store, stack), "b4" * 8
    name, raw = f"{space}--5", ForeignWriter(own_store)
    assert (here.settle(space, 5), there.settle(space, 5)) == (5, 5)
    before = raw.pointer(space)
    assert here.tier.put([1], name) == [OK]
    own_store.kill_master()
    own_store.start_master()
    for host in (here, there):
        until(partial(lambda host: host.settle(space, 5) == 5, host))
    until(lambda: raw.store.is_exist(f"kvferry/{space}/epoch") == 1)
    assert raw.pointer(space)[0] == 5
    assert raw.pointer(space)[1] != before[1]
    until(lambda: there.tier.put([2], name) == here.tier.fetch([2], name) == [OK])
    assert here.tier.fetch([1], name) == [MISS]
    raw.store.close()


def test_a_reset_frees_old_blocks_and_markers(
    shared_store: MooncakeStore, stack: ExitStack
) -> None:
    here, space = Host(shared_store, stack), "a3" * 8
    raw = ForeignWriter(shared_store)
    assert here.settle(space) == 0
    old = [f"kvferry/{space}/{each}" for each in ("7/00", "epoch/7", "epoch/8")]
    old.append(f"kvferry/{space}-part/7/00")
    other = f"kvferry/{'a5' * 8}/7/00"
    for name in (*old, other):
        assert raw.store.put(name, b"x") == 0
    assert here.settle(space, 3) == 3
    until(lambda: raw.store.batch_is_exist([*old, other]) == [0, 0, 0, 0, 1])
    epoch, incarnation = raw.pointer(space)
    kept = [f"kvferry/{space}/epoch", f"kvferry/{space}/epoch/{incarnation}"]
    assert (epoch, raw.store.batch_is_exist(kept)) == (3, [1, 1])
    raw.store.close()


def test_small_host_blocks_are_warned_of_once(
    shared_store: MooncakeStore, stack: ExitStack, capsys: pytest.CaptureFixture[str]
) -> None:
    here = Host(shared_store, stack)
    here.settle("a6" * 8)
    for number in (1, 2):
        assert here.tier.put([number], "a6" * 8) == [OK]
    here.tier.usage()  # sent after the log
    assert capsys.readouterr().out.count("small host blocks in the Mooncake tier") == 1


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
    until(lambda: bool(subject.runner.run(subject.client.settle({NAMESPACE: 0}))))
    assert subject.put([1]) == [OK]
    assert subject.fetch([1]) == [OK]


@pytest.mark.parametrize("what", ["master", "store", "store in transfer"])
def test_a_store_that_does_not_answer_costs_a_miss_within_the_deadline(
    own_store: MooncakeStore, stack: ExitStack, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    here = Host(own_store, stack)
    assert here.settle(NAMESPACE) == 0
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
    until(lambda: here.settle(NAMESPACE) == 0 and here.tier.fetch([1, 2]) == [OK, OK])
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
