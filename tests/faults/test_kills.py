"""kill -9 at random moments, of daemons and of engines, while all of them have their hands full.

The engines (support.traffic) keep account themselves: each job has one outcome in time,
and what is loaded is what was stored. Here the daemon's books are looked into, and what it holds.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvferry.client import LocalDaemon, OffloadClient
from kvferry.daemon.memory import fd_closer
from kvferry.testing.engine import until
from support.daemon_invariants import broken_invariants, check_all_gone
from support.process_usage import ProcessUsage, device_bytes
from support.restarting_daemons import RestartingDaemons
from support.traffic_processes import TrafficProcesses, mixed_engines
from support.traffic_statistics import TrafficOptions, summary

pytestmark = pytest.mark.timeout(1200)

STALLS = {"reference_stall": 0.002}
"""On the CPU pieces take their time, so that kills meet some under way."""
MAX_GROWTH = 16 << 20
PATIENCE = 5.0
POOL_BYTES = 32 << 20


def moment(dice: random.Random) -> float:
    """Seconds until something happens: some right behind the last, some in the middle of work."""
    return dice.choice((0.0, 0.02, 0.1, 0.5, 1.0)) * dice.random()


def opened(crew: TrafficProcesses) -> dict[str, int]:
    return {name: member.report().counts["opened"] for name, member in crew.members.items()}


def all_come_back(crew: TrafficProcesses, before: dict[str, int]) -> None:
    until(lambda: all(now > before[name] for name, now in opened(crew).items()), 30)


@pytest.mark.parametrize("kept", [False, True], ids=["empty", "kept"])
def test_daemons(
    start_crew: Callable[[Path], TrafficProcesses],
    short_path: Path,
    device: str,
    dice: random.Random,
    long: bool,
    kept: bool,
) -> None:
    """A daemon is killed and another one started, which is empty, or has what that one stored.

    Engines lose their jobs and come back; some of them leave that to their client.
    """
    with RestartingDaemons(
        device, short_path, kept=kept, pool_bytes=POOL_BYTES, **STALLS
    ) as daemons:
        crew = start_crew(daemons.directory)
        crew.start(*mixed_engines(device, dice, patience=PATIENCE))
        until(lambda: all(opened(crew).values()), 60)
        for _ in range(200 if long else 15):
            time.sleep(moment(dice))
            before = opened(crew) if dice.random() < 0.3 else None
            daemons.replace()
            if before is not None:
                all_come_back(crew, before)
        before = opened(crew)
        daemons.replace()
        all_come_back(crew, before)
        total = crew.dismiss()
        print(summary(total))
        assert not total.complaints, "\n".join(total.complaints)
        assert total.counts["lost"] > 0
        assert total.counts["compared"] > 0
        assert not kept or total.counts["reattached"] > 0
        check_all_gone(daemons.directory)


def test_engines(
    start_daemon: Callable[..., LocalDaemon],
    start_crew: Callable[[Path], TrafficProcesses],
    device: str,
    dice: random.Random,
    long: bool,
) -> None:
    """Engines are killed, stopped for a while, and replaced; the daemon holds no more for it."""
    daemon = start_daemon(**STALLS)
    crew = start_crew(daemon.directory)
    engines = mixed_engines(device, dice, patience=PATIENCE)
    before = at_rest(daemon, crew, engines, dice)
    on_device = device_bytes(device)
    crew.start(*engines)
    with OffloadClient(daemon.directory, engine="observer") as observer:
        done = 0
        for _ in range(200 if long else 15):
            time.sleep(moment(dice))
            done += kill_one(crew, dice)
            assert not broken_invariants(observer)
        print(f"{done} jobs done by those who were killed")
        assert done > 0
    total = crew.dismiss()
    print(summary(total))
    assert not total.complaints, "\n".join(total.complaints)
    assert total.counts["compared"] > 0
    check_all_gone(daemon.directory)
    check_flat(daemon, before)
    assert device_bytes(device) <= on_device + MAX_GROWTH


def test_an_engine_that_stands_still(
    start_daemon: Callable[..., LocalDaemon],
    start_crew: Callable[[Path], TrafficProcesses],
    device: str,
    dice: random.Random,
) -> None:
    """SIGSTOP, while the others do hundreds of jobs; then it goes on as if nothing was."""
    daemon = start_daemon(**STALLS)
    crew = start_crew(daemon.directory)
    engines = mixed_engines(device, dice, patience=PATIENCE)
    before = at_rest(daemon, crew, engines, dice)
    crew.start(*engines)
    until(lambda: all(opened(crew).values()), 60)
    frozen = [crew.members["engine-1"], crew.members["engine-4"]]
    for member in frozen:
        member.freeze()
    others = [member for member in crew.members.values() if member not in frozen]
    done = [member.report().counts["done"] for member in others]
    until(
        lambda: all(
            member.report().counts["done"] > had + 300
            for member, had in zip(others, done, strict=True)
        ),
        60,
    )
    for member in frozen:
        member.thaw()
    total = crew.dismiss()
    print(summary(total))
    assert not total.complaints, "\n".join(total.complaints)
    check_all_gone(daemon.directory)
    check_flat(daemon, before)


def at_rest(
    daemon: LocalDaemon, crew: TrafficProcesses, engines: list[TrafficOptions], dice: random.Random
) -> ProcessUsage:
    """What a daemon holds that has seen these engines, when they have gone again."""
    crew.start(*engines)
    until(lambda: all(opened(crew).values()), 60)
    until(lambda: crew.report().counts["done"] > 500, 60)
    kill_one(crew, dice)
    total = crew.dismiss()
    assert not total.complaints, "\n".join(total.complaints)
    check_all_gone(daemon.directory)
    time.sleep(1.5 * fd_closer.IDLE_SECONDS)
    return ProcessUsage.of(daemon.pid)


def check_flat(daemon: LocalDaemon, before: ProcessUsage) -> None:
    """Raise AssertionError where the daemon holds more than it did.

    It may still be letting go of the session that asked it last.
    """
    until(lambda: _holds_no_more(ProcessUsage.of(daemon.pid).since(before)), 10)
    more = ProcessUsage.of(daemon.pid).since(before)
    print(more)
    assert more.mappings <= 30
    assert more.private <= MAX_GROWTH
    assert more.shared <= MAX_GROWTH


def _holds_no_more(more: ProcessUsage) -> bool:
    return more.descriptors <= 0 and more.threads <= 0


def kill_one(crew: TrafficProcesses, dice: random.Random) -> int:
    """Most are killed at work, some while they begin; returns how many jobs it had done."""
    name = dice.choice(list(crew.members))
    member, done = crew.members[name], 0
    if dice.random() < 0.8:
        until(lambda: member.report().counts["done"] > 20, 60)
        done = member.report().counts["done"]
    crew.kill(name)
    crew.start(replace(member.options, seed=dice.getrandbits(32)))
    return done
