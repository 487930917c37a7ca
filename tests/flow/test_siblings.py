"""Daemons of one host load each other's blocks, whatever happens to one of them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from kvferry.client import Lookup
from kvferry.testing.engine import until
from support.restarting_daemons import RestartingDaemons
from support.sibling_daemons import SiblingDaemons, find_keys
from support.tiered_engine import PAGE, keys
from support.time_limits import PROMPTLY, TIMEOUT

from .block_tables import await_committed

Start = Callable[..., SiblingDaemons]
STORED, LATER = range(16), range(100, 104)


@pytest.fixture
def start(short_path: Path) -> Iterator[Start]:
    """start(count, **options) -> daemons that are siblings."""
    with ExitStack() as stack:
        yield partial(SiblingDaemons, folder=short_path, stack=stack)


def lend(start: Start, **options: object) -> SiblingDaemons:
    """Two daemons. The second one has found the keys that the first one has stored."""
    siblings = start(2, **options)
    one, two = siblings.engines
    one.store(STORED)
    siblings.wait_linked()
    assert two.find(STORED).prefix == len(STORED)
    return siblings


def await_kept(siblings: SiblingDaemons, number: int) -> None:
    """Wait until a daemon has its blocks with a checksum, so that they outlive it."""
    daemon = siblings.daemons[number]
    assert isinstance(daemon, RestartingDaemons)
    assert daemon.manager is not None
    await_committed(daemon.manager, len(STORED))


def store_and_borrow(siblings: SiblingDaemons) -> None:
    """Store other keys at the first one, and load them at the second one."""
    one, two = siblings.engines
    one.store(LATER)
    find_keys(two, LATER)
    two.load(LATER)


def pool_mappings(pid: int) -> list[tuple[str, str]]:
    """(access, inode) of the mapped chunks of pools."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    fields = [line.split() for line in lines if "memfd:kvferry-pool" in line]
    return [(each[1], each[4]) for each in fields]


def test_what_one_stores_the_others_load(start: Start) -> None:
    """They take no block of the own pool, and other daemons are not told that it has them."""
    siblings = start(3)
    one, two, three = siblings.engines
    assert one.opened.tiers == ("siblings",)
    siblings.wait_linked()
    one.store(range(16))
    two.store(range(16, 32))
    find_keys(three, range(32))
    three.load(range(32))
    numbers = [(each.loaded, each.loaded_bytes) for each in siblings.statuses(2)]
    assert numbers == [(16, 16 * PAGE)] * 2
    (namespace,) = three.client.namespaces()
    assert namespace.free == three.num_blocks
    assert three.client.status().tiers == ()
    until(lambda: one.client.status().lent >= 16)
    until(lambda: [each.keys for each in siblings.statuses(2)] == [16, 16])
    until(lambda: [each.keys for each in siblings.statuses(0)] == [16, 0])


def test_with_store_all_both_store(start: Start) -> None:
    one, two = lend(start, siblings_store_all="true").engines
    two.store(STORED)
    for engine in one, two:
        (namespace,) = engine.client.namespaces()
        assert namespace.free == engine.num_blocks - len(STORED)


def test_a_sibling_that_is_stopped_holds_up_nobody(start: Start) -> None:
    """Its memory stays as it is, so its blocks are loaded all the same."""
    siblings = lend(start)
    two = siblings.engines[1]
    os.kill(siblings.daemons[0].pid, signal.SIGSTOP)
    begun = time.monotonic()
    assert two.find(STORED).prefix == len(STORED)
    two.load(STORED)
    two.store(LATER)
    assert time.monotonic() - begun < PROMPTLY
    (status,) = siblings.statuses(1)
    assert status.is_on
    os.kill(siblings.daemons[0].pid, signal.SIGCONT)
    until(lambda: siblings.engines[0].client.status().lent >= len(STORED))


def test_a_sibling_that_dies_is_a_miss_and_is_used_again(start: Start) -> None:
    """Its memory can only be read, and is freed."""
    siblings = lend(start)
    one, two = siblings.engines
    owner, daemon = siblings.daemons[0].pid, siblings.daemons[1].pid
    pool = {inode for access, inode in pool_mappings(owner) if access == "rw-s"}
    assert {access for access, inode in pool_mappings(daemon) if inode in pool} == {"r--s"}
    siblings.kill(0)
    two.load_resident(STORED)
    until(lambda: [(s.is_on, s.mapped_bytes) for s in siblings.statuses(1)] == [(False, 0)])
    until(lambda: not pool & {inode for _, inode in pool_mappings(daemon)})
    assert not two.load_resident(STORED)
    until(lambda: two.find(STORED).prefix == 0)
    siblings.restart(0)
    until(lambda: one.manager.lookup(keys([0])[0]) is Lookup.MISS)
    store_and_borrow(siblings)


def test_a_sibling_that_restarts_with_its_memory_keeps_its_window(start: Start) -> None:
    """Its blocks are loaded meanwhile, and afterwards once they are verified."""
    siblings = lend(start, kept=[0])
    one, two = siblings.engines
    until(lambda: one.client.namespaces()[0].ready == len(STORED))
    mapped = siblings.statuses(1)[0].mapped_bytes
    before = pool_mappings(siblings.daemons[1].pid)
    await_kept(siblings, 0)
    siblings.kill(0)
    assert two.find(STORED).prefix == len(STORED)
    two.load(STORED)
    until(lambda: not siblings.statuses(1)[0].is_on)
    assert siblings.statuses(1)[0].mapped_bytes == mapped
    two.load(STORED)
    siblings.restart(0)
    siblings.wait_linked()
    until(lambda: two.find(STORED).prefix == len(STORED))
    two.load(STORED)
    assert pool_mappings(siblings.daemons[1].pid) == before


# Resets


def check_empty(siblings: SiblingDaemons, number: int) -> None:
    """A daemon returns nothing of before the reset."""
    engine = siblings.engines[number]
    assert engine.find(STORED).prefix == 0
    assert not engine.load_resident(STORED)


def test_a_reset_while_the_sibling_is_stopped(start: Start) -> None:
    """Its memory has the old blocks, and can still be read."""
    siblings = lend(start)
    os.kill(siblings.daemons[0].pid, signal.SIGSTOP)
    siblings.engines[1].client.reset(timeout=TIMEOUT)
    check_empty(siblings, 1)
    os.kill(siblings.daemons[0].pid, signal.SIGCONT)
    check_empty(siblings, 0)
    check_empty(siblings, 1)
    store_and_borrow(siblings)


@pytest.mark.parametrize("by", ["the sibling", "the daemon itself"])
def test_a_reset_of_a_daemon_that_is_down_holds_when_it_restarts(start: Start, by: str) -> None:
    """It has its pool with all of its blocks."""
    siblings = lend(start, kept=[0])
    await_kept(siblings, 0)
    if by == "the daemon itself":
        siblings.engines[0].client.reset(timeout=TIMEOUT)
    siblings.kill(0)
    if by == "the sibling":
        siblings.engines[1].client.reset(timeout=TIMEOUT)
    check_empty(siblings, 1)
    siblings.restart(0)
    check_empty(siblings, 0)
    check_empty(siblings, 1)
    store_and_borrow(siblings)
