"""SIGKILL, SIGSTOP, resets and restarts of siblings amid loads from them.

Every other daemon keeps its pool over restarts, and loses it at some. A model has the keys that
any engine has stored since the last reset. A loaded block has the bytes of its key; nothing is
found that the model does not have; every call ends in time; and in the end nothing is pinned or
held.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvferry.client import Lookup
from kvferry.testing.engine import until
from kvferry.testing.mooncake_store import INSTALL, MooncakeStore, is_installed
from support.restarting_daemons import RestartingDaemons
from support.sibling_daemons import SiblingDaemons
from support.tiered_engine import TieredEngine, keys
from support.time_limits import PROMPTLY

pytestmark = pytest.mark.timeout(7200)
# Blocks of one prompt, different prompts, and bytes of a pool, which has no room for all prompts.
PROMPT, PROMPTS, POOL_BYTES = 16, 12, 1 << 19
# Of one daemon, while another resets the namespace.
STATES = "running", "stopped", "down"


class SiblingFaults:
    """Random steps against a group of daemons. options: of each."""

    def __init__(
        self, count: int, rng: random.Random, folder: Path, stack: ExitStack, **options: Any
    ) -> None:
        kept = range(1, count, 2)
        self.siblings = SiblingDaemons(
            count, folder, stack, kept=kept, pool_bytes=POOL_BYTES, **options
        )
        self.rng = rng
        # Numbers of keys that were stored since the last reset.
        self.stored = set[int]()
        self.loads = self.direct = self.kills = self.resets = 0
        # The keys of the prompt that was stored last.
        self.last = self.prompt()

    def prompt(self) -> range:
        """The keys of a prompt. After a reset they are others."""
        first = (self.resets * PROMPTS + self.rng.randrange(PROMPTS)) * PROMPT
        return range(first, first + PROMPT)

    def load_from_sibling(self) -> None:
        one, other, *_ = self.siblings.engines
        self.stored |= set(self.last)
        one.store(self.last)
        until(lambda: other.find(self.last).prefix == PROMPT and other.load_resident(self.last))

    def step(self) -> None:
        begun = time.monotonic()
        engine = self.rng.choice(self.siblings.engines)
        numbers = self.prompt()
        if self.rng.random() < 0.4:
            self.stored |= set(numbers)
            engine.store(numbers)
            self.last = numbers
        else:
            numbers = self.rng.choice((numbers, self.last))
            found = engine.find(numbers).prefix
            assert set(numbers[:found]) <= self.stored
            wanted = keys(numbers[:found])
            until(lambda: Lookup.HIT_PENDING not in map(engine.manager.lookup, wanted))
            self.loads += found > 0 and engine.load_resident(numbers[:found])
        assert time.monotonic() - begun < PROMPTLY

    def kill(self) -> None:
        number = self.rng.randrange(len(self.siblings.daemons))
        self.siblings.kill(number)
        self._step_at_others(number)
        self._restart(number)
        self.kills += 1

    def stop_for_a_moment(self) -> None:
        number = self.rng.randrange(len(self.siblings.daemons))
        pid = self.siblings.daemons[number].pid
        os.kill(pid, signal.SIGSTOP)
        try:
            self._step_at_others(number)
        finally:
            os.kill(pid, signal.SIGCONT)

    def reset(self) -> None:
        """After it is done, no engine finds a key of before, even if a daemon did not run."""
        old = range(self.resets * PROMPTS * PROMPT, (self.resets + 1) * PROMPTS * PROMPT)
        number = self.rng.randrange(len(self.siblings.daemons))
        others = [each for place, each in enumerate(self.siblings.engines) if place != number]
        pid, state = self.siblings.daemons[number].pid, self.rng.choice(STATES)
        if state == "stopped":
            os.kill(pid, signal.SIGSTOP)
        elif state == "down":
            self.siblings.kill(number)
        try:
            self.rng.choice(others).client.reset(timeout=PROMPTLY)
            self._check_absent(others, old)
        finally:
            if state == "stopped":
                os.kill(pid, signal.SIGCONT)
        if state == "down":
            self._restart(number)
        self._check_absent(self.siblings.engines, old)
        self.resets += 1
        self.stored.clear()
        self.last = self.prompt()

    def _restart(self, number: int) -> None:
        daemon = self.siblings.daemons[number]
        if isinstance(daemon, RestartingDaemons) and self.rng.random() < 0.3:
            daemon.lose_pool()
        self.siblings.restart(number)
        lookup, wanted = self.siblings.engines[number].manager.lookup, keys(self.prompt())
        until(lambda: {lookup(each) for each in wanted} <= {Lookup.HIT, Lookup.MISS})

    def _check_absent(self, engines: Sequence[TieredEngine], numbers: range) -> None:
        for engine in engines:
            for first in numbers[::PROMPT]:
                assert engine.find(range(first, first + PROMPT)).prefix == 0

    def check_released(self) -> None:
        for engine in self.siblings.engines:

            def released(engine=engine) -> bool:  # type: ignore[no-untyped-def]
                (status,) = engine.client.namespaces()
                return (status.pinned, status.pending, status.orphaned) == (0, 0, 0)

            until(released)
        count = len(self.siblings.engines)
        statuses = [each for number in range(count) for each in self.siblings.statuses(number)]
        self.direct = sum(status.loaded for status in statuses)

    def _step_at_others(self, number: int) -> None:
        others = self.siblings.engines[:number] + self.siblings.engines[number + 1 :]
        for engine in others:
            numbers = self.rng.choice((self.prompt(), self.last))
            begun = time.monotonic()
            found = engine.find(numbers).prefix
            assert set(numbers[:found]) <= self.stored
            until(
                lambda engine=engine, found=found, numbers=numbers: (  # type: ignore[misc]
                    Lookup.HIT_PENDING not in map(engine.manager.lookup, keys(numbers[:found]))
                )
            )
            self.loads += found > 0 and engine.load_resident(numbers[:found])
            assert time.monotonic() - begun < PROMPTLY


@pytest.mark.parametrize("count", [2, 8])
def test_no_wrong_bytes(count: int, short_path: Path, rng: random.Random, long: bool) -> None:
    """200 faults (6 with two daemons in the short form, 4 with eight)."""
    with ExitStack() as stack:
        faults = SiblingFaults(count, rng, short_path, stack)
        inject_faults(faults, 200 if long else {2: 6, 8: 4}[count])


@pytest.mark.skipif(not is_installed(), reason=INSTALL)
def test_no_wrong_bytes_with_a_mooncake_store(
    short_path: Path, rng: random.Random, long: bool
) -> None:
    """120 faults of three daemons that share a store (3 in the short form)."""
    with ExitStack() as stack:
        store = stack.enter_context(MooncakeStore(segment_bytes=64 << 20))
        options = {
            "tiers_mooncake_master": store.address,
            "tiers_mooncake_write": "write_through",
            "tiers_mooncake_admit_after": 1,
        }
        faults = SiblingFaults(3, rng, short_path, stack, **options)
        inject_faults(faults, 120 if long else 3)


def inject_faults(faults: SiblingFaults, rounds: int) -> None:
    count = len(faults.siblings.daemons)
    faults.siblings.wait_linked()
    faults.load_from_sibling()
    for number in range(rounds):
        for _ in range(faults.rng.randrange(2, 6) * count):
            faults.step()
        # Each kind in turn, so that a short form has all.
        (faults.kill, faults.reset, faults.stop_for_a_moment)[number % 3]()
    faults.siblings.wait_linked()
    faults.check_released()
    print(
        f"{count} daemons, {faults.kills} kills, {faults.resets} resets, {faults.loads} loads, "
        f"{faults.direct} blocks of siblings loaded since the last starts"
    )
    for daemon in faults.siblings.daemons:
        assert "Traceback" not in daemon.log()
