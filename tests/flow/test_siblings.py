"""Daemons of one host lend each other blocks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from kvferry.client import LocalDaemon, Lookup
from kvferry.client.doctor import Finding, Verdict, run_checks
from kvferry.testing.engine import until
from support.sibling_daemons import SiblingDaemons, copy_keys
from support.tier_processes import tier_process_of
from support.tiered_engine import PAGE, keys
from support.time_limits import PROMPTLY, TIMEOUT

Start = Callable[..., SiblingDaemons]


@pytest.fixture
def start(short_path: Path) -> Iterator[Start]:
    """start(count, **options) -> daemons that are siblings."""
    with ExitStack() as stack:
        yield partial(SiblingDaemons, folder=short_path, stack=stack)


def test_what_one_stores_the_others_load(start: Start) -> None:
    siblings = start(3)
    one, two, three = siblings.engines
    assert one.opened.tiers == ("siblings",)
    one.store(range(16))
    two.store(range(16, 32))
    copy_keys(three, range(32))
    three.load(range(32))
    until(lambda: [s.copied for s in siblings.statuses(2)] == [16, 16])
    assert one.client.status().located >= 16
    (tier,) = three.client.status().tiers
    assert (tier.name, tier.errors, tier.checksum_failures) == ("siblings", 0, 0)


def lend(start: Start, numbers: range) -> SiblingDaemons:
    """Two daemons. The second one has found the keys that the first one has stored."""
    siblings = start(2)
    one, two = siblings.engines
    one.store(numbers)
    siblings.wait_mapped()
    until(lambda: two.find(numbers).prefix == len(numbers))
    return siblings


def test_blocks_are_loaded_directly_from_the_sibling(start: Start) -> None:
    """They take no block of the own pool, and other daemons are not told that it has them."""
    siblings = lend(start, range(16))
    one, two = siblings.engines
    until(lambda: {two.manager.lookup(each) for each in keys(range(16))} == {Lookup.HIT})
    assert two.find(range(16)).promoted == 0
    two.load(range(16))
    (status,) = siblings.statuses(1)
    assert (status.loaded, status.loaded_bytes, status.copied) == (16, 16 * PAGE, 0)
    (namespace,) = two.client.namespaces()
    assert namespace.free == two.num_blocks
    assert [each.keys for each in siblings.statuses(0)] == [0]
    one.client.reset()
    assert two.find(range(16)).prefix == 0
    until(lambda: {two.manager.lookup(each) for each in keys(range(16))} == {Lookup.MISS})


def test_own_blocks_and_those_of_siblings_in_one_load(start: Start) -> None:
    siblings = start(3)
    one, two, three = siblings.engines
    one.store(range(8))
    two.store(range(8, 16))
    three.store(range(16, 24))
    siblings.wait_mapped()
    until(lambda: three.find(range(24)).prefix == 24)
    three.load([*range(20), 7, 23])
    numbers = [(each.loaded, each.loaded_bytes) for each in siblings.statuses(2)]
    assert numbers == [(9, 9 * PAGE), (8, 8 * PAGE)]


def test_a_load_of_what_the_sibling_has_evicted_fails(start: Start) -> None:
    """The key was found before. Its next lookup is a miss."""
    one, two = lend(start, range(8)).engines
    assert two.load_resident(range(8))
    one.store(range(1000, 1000 + one.num_blocks))
    assert not two.load_resident(range(8))
    until(lambda: two.manager.lookup(keys([0])[0]) is Lookup.MISS)


def test_a_load_from_a_sibling_that_has_just_died_is_right_or_fails(start: Start) -> None:
    siblings = lend(start, range(8))
    two = siblings.engines[1]
    siblings.kill(0)
    two.load_resident(range(8))
    until(lambda: siblings.statuses(1)[0].mapped_bytes == 0)
    assert not two.load_resident(range(8))


def test_what_a_sibling_has_is_not_stored_again(start: Start) -> None:
    one, two = start(2).engines
    one.store(range(8))
    copy_keys(two, [7])
    two.store(range(12))
    until(lambda: {two.manager.lookup(each) for each in keys(range(8, 12))} == {Lookup.HIT})
    assert {two.manager.lookup(each) for each in keys(range(7))} == {Lookup.MISS}
    copy_keys(two, range(12))
    two.load(range(12))


def test_with_store_all_both_store(start: Start) -> None:
    one, two = start(2, siblings_store_all="true").engines
    one.store(range(8))
    copy_keys(two, [7])
    two.store(range(8))
    until(lambda: {two.manager.lookup(each) for each in keys(range(8))} == {Lookup.HIT})


def test_a_reset_holds_at_all_siblings_before_it_is_done(start: Start) -> None:
    siblings = start(3)
    one, two, three = siblings.engines
    for number, engine in enumerate(siblings.engines):
        engine.store(range(8 * number, 8 * number + 8))
    copy_keys(three, range(24))
    siblings.wait_linked()
    two.client.reset()
    for engine in siblings.engines:
        assert engine.find(range(24)).prefix == 0
        assert not engine.load_resident(range(4))
    siblings.wait_linked()
    one.store(range(100, 104))
    copy_keys(three, range(100, 104))
    three.load(range(100, 104))


def test_a_sibling_that_missed_a_reset_is_reset_before_it_lends(start: Start) -> None:
    """It is stopped during the reset."""
    siblings = start(2)
    one, two = siblings.engines
    one.store(range(8))
    copy_keys(two, range(8))
    siblings.wait_linked()
    os.kill(siblings.daemons[1].pid, signal.SIGSTOP)
    begun = time.monotonic()
    one.client.reset(timeout=TIMEOUT)
    assert time.monotonic() - begun < PROMPTLY
    assert one.find(range(8)).prefix == 0
    os.kill(siblings.daemons[1].pid, signal.SIGCONT)
    until(lambda: {two.manager.lookup(each) for each in keys(range(8))} == {Lookup.MISS})
    siblings.wait_linked()
    assert one.find(range(8)).prefix == 0


def test_a_sibling_that_stops_is_a_miss_and_returns(start: Start) -> None:
    siblings = start(2)
    one, two = siblings.engines
    one.store(range(16))
    copy_keys(two, range(4))
    os.kill(siblings.daemons[0].pid, signal.SIGSTOP)
    begun = time.monotonic()
    until(lambda: two.find(range(16)).prefix == 4)
    two.store(range(30, 34))
    until(lambda: two.load_resident([*range(4), *range(30, 34)]))
    assert time.monotonic() - begun < PROMPTLY
    until(lambda: [s.is_on for s in siblings.statuses(1)] == [False])
    (finding,) = sibling_findings(siblings.daemons[1])
    assert finding.verdict is Verdict.WARN
    os.kill(siblings.daemons[0].pid, signal.SIGCONT)
    copy_keys(two, range(16))
    two.load(range(16))


def test_a_sibling_that_dies_is_a_miss_and_is_used_again(start: Start) -> None:
    siblings = start(2)
    one, two = siblings.engines
    one.store(range(16))
    copy_keys(two, range(4))
    siblings.kill(0)
    until(lambda: two.find(range(16)).prefix == 4)
    two.load(range(4))
    until(lambda: [s.is_on for s in siblings.statuses(1)] == [False])
    siblings.restart(0)
    until(lambda: one.manager.lookup(keys([0])[0]) is Lookup.MISS)
    one.store(range(50, 54))
    copy_keys(two, range(50, 54))
    two.load(range(50, 54))


def sibling_findings(daemon: LocalDaemon) -> list[Finding]:
    return [each for each in run_checks(daemon.directory) if each.check.startswith("sibling ")]


def test_what_the_sibling_evicts_is_a_miss(start: Start) -> None:
    one, two = start(2).engines
    one.store(range(16))
    copy_keys(two, range(4))
    one.store(range(1000, 1000 + one.num_blocks))
    until(lambda: two.find(range(4, 16)).prefix == 0)


def test_a_daemon_that_lends_nothing_is_named_by_the_doctor(start: Start) -> None:
    siblings = start(2, siblings_enabled={1: "false"})
    until(lambda: any("lends no blocks" in s.state for s in siblings.statuses(0)))
    (finding,) = sibling_findings(siblings.daemons[0])
    assert finding.verdict is Verdict.WARN
    assert "siblings.enabled" in finding.change
    assert siblings.statuses(1) == ()


def test_lent_memory_can_only_be_read_and_is_freed_when_its_owner_dies(start: Start) -> None:
    siblings = start(2)
    one, two = siblings.engines
    one.store(range(4))
    copy_keys(two, range(4))
    siblings.wait_mapped()
    owner, daemon = siblings.daemons[0].pid, siblings.daemons[1].pid
    process = tier_process_of(daemon)
    assert process is not None
    pool = {inode for access, inode in pool_mappings(owner) if access == "rw-s"}
    for pid in (daemon, process):
        assert {access for access, inode in pool_mappings(pid) if inode in pool} == {"r--s"}
    siblings.kill(0)
    for pid in (daemon, process):
        until(partial(maps_none, pid, pool))


def maps_none(pid: int, pool: set[str]) -> bool:
    return not pool & {inode for _, inode in pool_mappings(pid)}


def pool_mappings(pid: int) -> list[tuple[str, str]]:
    """(access, inode) of the mapped chunks of pools."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    fields = [line.split() for line in lines if "memfd:kvferry-pool" in line]
    return [(each[1], each[4]) for each in fields]
