"""Resets of a namespace that two daemons of one host share, in every state of the other one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from kvferry.client import Lookup
from kvferry.testing.engine import until
from support.restarting_daemons import RestartingDaemons
from support.sibling_daemons import SiblingDaemons
from support.tiered_engine import TieredEngine, keys
from support.time_limits import TIMEOUT

from .block_tables import await_committed

STORED, LATER = range(8), range(100, 108)


class TwoDaemons(SiblingDaemons):
    """Two siblings with kept pools, and an engine of each."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        super().__init__(2, folder, stack, kept=(0, 1))

    def signal(self, number: int, which: signal.Signals) -> None:
        os.kill(self.daemons[number].pid, which)

    def kept_daemon(self, number: int) -> RestartingDaemons:
        daemon = self.daemons[number]
        assert isinstance(daemon, RestartingDaemons)
        return daemon

    def wait_committed(self, number: int, blocks: int) -> None:
        """Wait until a daemon has so many blocks with a checksum, which outlive it."""
        manager = self.kept_daemon(number).manager
        assert manager is not None
        await_committed(manager, blocks)

    def wait_borrowed(self, owner: int, numbers: range) -> None:
        """Store at one daemon, until the other one has loaded the blocks from there."""
        reader = self.engines[1 - owner]
        self.engines[owner].store(numbers)
        until(lambda: reader.find(numbers).prefix == len(numbers))
        until(lambda: {reader.manager.lookup(key) for key in keys(numbers)} == {Lookup.HIT})
        reader.load(numbers)

    def check_empty(self, number: int) -> None:
        """A daemon returns nothing of before the reset."""
        engine = self.engines[number]
        assert engine.find(STORED).prefix == 0
        assert not engine.load_resident(STORED)


@pytest.fixture
def two(short_path: Path) -> Iterator[TwoDaemons]:
    """Each has loaded blocks of the other one."""
    with ExitStack() as stack:
        made = TwoDaemons(short_path, stack)
        made.wait_borrowed(0, STORED)
        yield made


def test_a_reset_while_the_sibling_runs(two: TwoDaemons) -> None:
    two.engines[1].client.reset(timeout=TIMEOUT)
    for number in (0, 1):
        two.check_empty(number)
    two.wait_borrowed(0, LATER)


def test_a_reset_while_the_sibling_is_stopped(two: TwoDaemons) -> None:
    """Its memory has the old blocks, and can still be read."""
    two.signal(0, signal.SIGSTOP)
    two.engines[1].client.reset(timeout=TIMEOUT)
    two.check_empty(1)
    two.signal(0, signal.SIGCONT)
    two.check_empty(0)
    two.check_empty(1)
    two.wait_borrowed(0, LATER)


def test_a_reset_while_the_sibling_is_down(two: TwoDaemons) -> None:
    """It is restarted with its pool and all of its blocks."""
    two.wait_committed(0, len(STORED))
    two.kill(0)
    two.engines[1].client.reset(timeout=TIMEOUT)
    two.check_empty(1)
    two.restart(0)
    two.check_empty(0)
    two.check_empty(1)
    two.wait_borrowed(0, LATER)


def test_a_reset_before_the_sibling_restarts_without_its_pool(two: TwoDaemons) -> None:
    two.kill(0)
    two.kept_daemon(0).lose_pool()
    two.engines[1].client.reset(timeout=TIMEOUT)
    two.restart(0)
    two.check_empty(0)
    two.check_empty(1)
    two.wait_borrowed(0, LATER)


def test_a_reset_of_a_daemon_that_is_killed_then(two: TwoDaemons) -> None:
    """The reset outlives it, and the pool, too."""
    two.engines[0].client.reset(timeout=TIMEOUT)
    two.kill(0)
    two.check_empty(1)
    two.restart(0)
    two.check_empty(0)
    two.wait_borrowed(1, LATER)
    two.wait_borrowed(0, range(200, 208))


def test_a_restart_without_a_reset_keeps_the_blocks(two: TwoDaemons) -> None:
    """They are loaded by both daemons again, when they are verified."""
    two.wait_committed(0, len(STORED))
    two.kill(0)
    two.engines[1].load(STORED)
    two.restart(0)
    for engine in two.engines:
        until(partial(finds_and_loads, engine))


def finds_and_loads(engine: TieredEngine) -> bool:
    return engine.find(STORED).prefix == len(STORED) and engine.load_resident(STORED)
