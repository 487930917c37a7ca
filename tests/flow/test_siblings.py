"""Daemons of one host load each other's blocks."""

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
from support.child_processes import children_of
from support.restarting_daemons import RestartingDaemons
from support.sibling_daemons import SiblingDaemons, find_keys
from support.tiered_engine import PAGE, keys
from support.time_limits import PROMPTLY

from .block_tables import await_committed

Start = Callable[..., SiblingDaemons]
Daemon = LocalDaemon | RestartingDaemons


@pytest.fixture
def start(short_path: Path) -> Iterator[Start]:
    """start(count, **options) -> daemons that are siblings."""
    with ExitStack() as stack:
        yield partial(SiblingDaemons, folder=short_path, stack=stack)


def lend(start: Start, numbers: range, **options: object) -> SiblingDaemons:
    """Two daemons. The second one has found the keys that the first one has stored."""
    siblings = start(2, **options)
    one, two = siblings.engines
    one.store(numbers)
    siblings.wait_linked()
    assert two.find(numbers).prefix == len(numbers)
    return siblings


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


def test_a_block_is_loadable_at_siblings_as_soon_as_it_is_stored(start: Start) -> None:
    """Also before it has a checksum."""
    siblings = start(2)
    one, two = siblings.engines
    siblings.wait_linked()
    for number in range(8):
        one.store([number])
        assert two.find([number]).prefix == 1
        two.load([number])


def test_no_process_runs_for_siblings(start: Start) -> None:
    siblings = start(2)
    siblings.wait_linked()
    for daemon in siblings.daemons:
        titles = partial(children_of, daemon.pid, b"kvferryd: ")
        until(lambda titles=titles: len(titles()) == 1)  # type: ignore[misc]  # checksums


def test_own_blocks_and_those_of_siblings_in_one_load(start: Start) -> None:
    siblings = start(3)
    one, two, three = siblings.engines
    siblings.wait_linked()
    one.store(range(8))
    two.store(range(8, 16))
    three.store(range(16, 24))
    assert three.find(range(24)).prefix == 24
    three.load([*range(20), 7, 23])
    numbers = [(each.loaded, each.loaded_bytes) for each in siblings.statuses(2)]
    assert numbers == [(9, 9 * PAGE), (8, 8 * PAGE)]


def test_a_load_of_what_the_sibling_has_evicted_fails(start: Start) -> None:
    """The key was found before. Its next lookup is a miss."""
    one, two = lend(start, range(8)).engines
    before = one.client.status().lent
    assert two.load_resident(range(8))
    # Later it would make these blocks more recent than some of those that are stored next.
    until(lambda: one.client.status().lent >= before + 8)
    one.store(range(1000, 1000 + one.num_blocks))
    assert not two.load_resident(range(8))
    until(lambda: two.manager.lookup(keys([0])[0]) is Lookup.MISS)
    assert two.find(range(8)).prefix == 0


def test_what_a_sibling_loads_stays_at_its_owner(start: Start) -> None:
    siblings = lend(start, range(8))
    one, two = siblings.engines
    one.store(range(8, one.num_blocks))
    before = one.client.status().lent
    two.load(range(8))
    until(lambda: one.client.status().lent >= before + 8)
    one.store(range(1000, 1000 + one.num_blocks - 8))
    two.load(range(8))


def test_what_a_sibling_has_is_not_stored_again(start: Start) -> None:
    one, two = lend(start, range(8)).engines
    two.store(range(12))
    until(lambda: {two.manager.lookup(each) for each in keys(range(8, 12))} == {Lookup.HIT})
    (namespace,) = two.client.namespaces()
    assert namespace.free == two.num_blocks - 4
    two.load(range(12))
    assert one.find(range(12)).prefix == 12


def test_with_store_all_both_store(start: Start) -> None:
    one, two = lend(start, range(8), siblings_store_all="true").engines
    two.store(range(8))
    for engine in one, two:
        (namespace,) = engine.client.namespaces()
        assert namespace.free == engine.num_blocks - 8


def test_blocks_of_another_epoch_are_not_found(start: Start) -> None:
    siblings = lend(start, range(8))
    one, two = siblings.engines
    one.client.reset()
    assert two.find(range(8)).prefix == 0
    assert one.find(range(8)).prefix == 0


# States of a sibling: it runs, above; it is stopped; it has died; it restarts with its memory


def test_a_sibling_that_is_stopped_holds_up_nobody(start: Start) -> None:
    """Its memory stays as it is, so its blocks are loaded all the same."""
    siblings = lend(start, range(16))
    two = siblings.engines[1]
    os.kill(siblings.daemons[0].pid, signal.SIGSTOP)
    end = time.monotonic() + 8.0  # longer than a request waits for an answer
    while time.monotonic() < end:
        begun = time.monotonic()
        assert two.find(range(16)).prefix == 16
        two.load(range(16))
        two.store(range(30, 34))
        assert time.monotonic() - begun < PROMPTLY
    (status,) = siblings.statuses(1)
    assert status.is_on
    os.kill(siblings.daemons[0].pid, signal.SIGCONT)
    until(lambda: siblings.engines[0].client.status().lent >= 16)
    assert "Traceback" not in siblings.daemons[1].log()


def test_a_sibling_that_is_stopped_before_it_was_asked_lends_nothing(start: Start) -> None:
    siblings = start(2, siblings_enabled={0: "true", 1: "true"})
    os.kill(siblings.daemons[0].pid, signal.SIGSTOP)
    siblings.kill(1)
    siblings.restart(1)
    two = siblings.engines[1]
    begun = time.monotonic()
    two.store(range(4))
    assert two.find(range(4)).prefix == 4
    assert time.monotonic() - begun < PROMPTLY
    until(lambda: any("no reply" in status.state for status in siblings.statuses(1)))
    (finding,) = sibling_findings(siblings.daemons[1])
    assert finding.verdict is Verdict.WARN
    os.kill(siblings.daemons[0].pid, signal.SIGCONT)
    siblings.wait_linked()


def test_a_sibling_that_dies_is_a_miss_and_is_used_again(start: Start) -> None:
    siblings = lend(start, range(16))
    one, two = siblings.engines
    siblings.kill(0)
    two.load_resident(range(16))
    until(lambda: [(s.is_on, s.mapped_bytes) for s in siblings.statuses(1)] == [(False, 0)])
    assert not two.load_resident(range(16))
    until(lambda: two.find(range(16)).prefix == 0)
    siblings.restart(0)
    until(lambda: one.manager.lookup(keys([0])[0]) is Lookup.MISS)
    one.store(range(50, 54))
    find_keys(two, range(50, 54))
    two.load(range(50, 54))


def test_a_sibling_that_restarts_with_its_memory_keeps_its_window(start: Start) -> None:
    """Its blocks are loaded meanwhile, and afterwards once they are verified."""
    siblings = lend(start, range(16), kept=[0])
    one, two = siblings.engines
    until(lambda: one.client.namespaces()[0].ready == 16)
    mapped = siblings.statuses(1)[0].mapped_bytes
    before = pool_mappings(siblings.daemons[1].pid)
    kept = siblings.daemons[0]
    assert isinstance(kept, RestartingDaemons)
    assert kept.manager is not None
    await_committed(kept.manager, 16)
    siblings.kill(0)
    assert two.find(range(16)).prefix == 16
    two.load(range(16))
    until(lambda: not siblings.statuses(1)[0].is_on)
    assert siblings.statuses(1)[0].mapped_bytes == mapped
    two.load(range(16))
    siblings.restart(0)
    siblings.wait_linked()
    until(lambda: two.find(range(16)).prefix == 16)
    two.load(range(16))
    assert pool_mappings(siblings.daemons[1].pid) == before


def test_a_sibling_that_restarts_without_its_memory_lends_the_new_one(start: Start) -> None:
    siblings = lend(start, range(16), kept=[0])
    one, two = siblings.engines
    siblings.kill(0)
    daemon = siblings.daemons[0]
    assert isinstance(daemon, RestartingDaemons)
    daemon.lose_pool()
    siblings.restart(0)
    until(lambda: one.manager.lookup(keys([0])[0]) is Lookup.MISS)
    one.store(range(50, 54))
    find_keys(two, range(50, 54))
    two.load(range(50, 54))
    siblings.wait_linked()
    assert two.find(range(16)).prefix == 0


def sibling_findings(daemon: Daemon) -> list[Finding]:
    return [each for each in run_checks(daemon.directory) if each.check.startswith("sibling ")]


def test_a_daemon_that_lends_nothing_is_named_by_the_doctor(start: Start) -> None:
    siblings = start(2, siblings_enabled={1: "false"})
    until(lambda: any("lends no blocks" in s.state for s in siblings.statuses(0)))
    (finding,) = sibling_findings(siblings.daemons[0])
    assert finding.verdict is Verdict.WARN
    assert "siblings.enabled" in finding.change
    assert siblings.statuses(1) == ()


def test_a_daemon_with_other_chunks_is_named_by_the_doctor(start: Start) -> None:
    siblings = start(2, pool_chunk={0: 1 << 19, 1: 1 << 20})
    until(lambda: any("pool.chunk is" in s.state for s in siblings.statuses(0)))
    (finding,) = sibling_findings(siblings.daemons[0])
    assert finding.verdict is Verdict.WARN
    assert finding.change.startswith("make them equal")


def test_lent_memory_can_only_be_read_and_is_freed_when_its_owner_dies(start: Start) -> None:
    siblings = lend(start, range(4))
    owner, daemon = siblings.daemons[0].pid, siblings.daemons[1].pid
    pool = {inode for access, inode in pool_mappings(owner) if access == "rw-s"}
    assert {access for access, inode in pool_mappings(daemon) if inode in pool} == {"r--s"}
    siblings.kill(0)
    until(lambda: not pool & {inode for _, inode in pool_mappings(daemon)})


def pool_mappings(pid: int) -> list[tuple[str, str]]:
    """(access, inode) of the mapped chunks of pools."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    fields = [line.split() for line in lines if "memfd:kvferry-pool" in line]
    return [(each[1], each[4]) for each in fields]
