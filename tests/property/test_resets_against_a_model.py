"""Resets of a namespace at several daemons of a host, which share its epochs.

Any of them is reset, restarted with its pool, or late: it adopts epochs in any order with the
others. The model is one number: how often the namespace was reset. A block may be loaded only if
its store was submitted after the last of these resets, at whichever daemon.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import count
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from kvferry.daemon.core.actions import BlocksVerified, CopyPlan, SendMessage, StartTransfer
from kvferry.daemon.core.namespaces import ADOPT_EVERY, LOOK_EVERY
from kvferry.daemon.core.tier_actions import EpochsSynced, SyncEpochs
from kvferry.proto import messages as wire
from kvferry.proto.errors import Code
from kvferry.proto.specs import KeyLoadStoreSpec
from support.cached_keys import entries_of
from support.namespaces_fixture import FINGERPRINT, NamespacesFixture, blocks, load, offsets
from support.own_epochs import OwnEpochs
from support.region_records_model import RegionRecordsModel

NAME, ENGINE = FINGERPRINT.name, "a"
KEYS = st.sampled_from([b"a", b"b"])
# Fewer stores in flight than a daemon has blocks and refuses.
MAX_STORING = 8
# Loads that were not refused.
LOADS = Counter[str]()


class Daemon:
    """A core with the namespace, and what its pool has."""

    def __init__(self, epochs: OwnEpochs) -> None:
        self.epochs = epochs
        self.fixture = NamespacesFixture(ENGINE, epochs=epochs)
        # How often the namespace was reset when the store of each block was submitted, by offset.
        self.stored_after: dict[int, int] = {}
        self.storing: list[tuple[CopyPlan, int]] = []
        # The epochs that resets without a Done have drawn, by request id.
        self.resets: dict[int, int] = {}
        self.syncing = self.is_restarted = False

    def restart(self) -> None:
        """Transfers and requests in flight are lost."""
        (found,) = self.fixture.region_records.found()
        self.fixture, records = NamespacesFixture(epochs=self.epochs), RegionRecordsModel()
        region = self.fixture.core.restore_region(found)
        records.regions[region.owner] = found.record, region
        self.fixture.region_records = records
        self.storing, self.resets, self.syncing, self.is_restarted = [], {}, False, True
        self.fixture.open_sessions(ENGINE)
        self.fixture.open_namespace(ENGINE)
        self.fixture.register(ENGINE)
        (namespace,) = self.fixture.core._namespaces
        restored = np.array([block for _, block in entries_of(namespace.cache)], np.int64)
        self.fixture.report(BlocksVerified(region.owner, restored))

    def perform(self, actions: Iterable[Any]) -> StartTransfer | str | None:
        """Returns the transfer that starts, or the code with which it is refused."""
        started: StartTransfer | str | None = None
        for action in actions:
            match action:
                case SyncEpochs():
                    assert not self.syncing
                    self.syncing = True
                case StartTransfer():
                    started = action
                case SendMessage(message=wire.Finished((result,))) if result.error is not None:
                    started = result.error.code
                case SendMessage(message=wire.Done(request_id, epoch)):
                    assert self.resets.pop(request_id) <= epoch <= self.epochs.current(NAME)
        return started


class ResetsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.epochs, self.now = OwnEpochs(), 1000.0
        self.daemons = [Daemon(self.epochs) for _ in range(2)]
        self.numbers, self.resets = count(1), 0

    def send(self, daemon: Daemon, message: wire.ClientMessage) -> StartTransfer | str | None:
        fixture = daemon.fixture
        fixture.now, fixture.step, fixture.syncs = self.now, 0.0, False
        return daemon.perform(fixture.send(ENGINE, message))

    @rule(data=st.data())
    def run_step(self, data: st.DataObject) -> None:
        self.draw: Any = data.draw
        daemon = self.draw(st.sampled_from(self.daemons))
        steps = [self.load] * 10 + [self.wait] * 3 + [self.reset, self.restart, self.advance]
        steps += [self.store] * 8 if len(daemon.storing) < MAX_STORING else []
        steps += [self.end_store] * 3 if daemon.storing else []
        steps += [self.sync] * 2 if daemon.syncing else []
        self.draw(st.sampled_from(steps))(daemon)

    def store(self, daemon: Daemon) -> None:
        current = self.epochs.current(NAME)
        epoch = self.draw(st.sampled_from([None, current, current, max(0, current - 1)]))
        spec = blocks([0]), KeyLoadStoreSpec((self.draw(KEYS),), epoch)
        found = self.send(daemon, wire.Submit(next(self.numbers), *spec))
        if epoch not in (None, current):
            assert found == Code.STALE
        elif isinstance(found, StartTransfer):
            daemon.storing.append((found.plan, self.resets))
            if self.draw(st.booleans()):
                self.end_store(daemon)
        else:
            assert found in (None, Code.STALE, Code.CACHE_FULL)

    def end_store(self, daemon: Daemon) -> None:
        """The oldest one."""
        plan, resets = daemon.storing.pop(0)
        daemon.stored_after.update(dict.fromkeys(offsets(plan), resets))
        daemon.perform(daemon.fixture.end(plan))

    def load(self, daemon: Daemon) -> None:
        found = self.send(daemon, wire.Submit(next(self.numbers), *load(self.draw(KEYS))))
        if isinstance(found, StartTransfer):
            LOADS["after a restart" if daemon.is_restarted else "before"] += 1
            (offset,) = offsets(found.plan)
            assert daemon.stored_after[offset] == self.resets
            daemon.perform(daemon.fixture.end(found.plan))
        else:
            assert found == Code.KEY_ABSENT

    def reset(self, daemon: Daemon) -> None:
        number = next(self.numbers)
        self.resets += 1
        daemon.resets[number] = self.resets
        self.send(daemon, wire.Reset(number))
        assert self.epochs.current(NAME) == self.resets

    def sync(self, daemon: Daemon) -> None:
        daemon.syncing = False
        daemon.perform(daemon.fixture.report(EpochsSynced(now=self.now)))

    def wait(self, daemon: Daemon) -> None:
        self.now += self.draw(st.sampled_from([ADOPT_EVERY / 4, ADOPT_EVERY, LOOK_EVERY]))

    def advance(self, daemon: Daemon) -> None:
        daemon.perform(daemon.fixture.core.advance(self.now))

    def restart(self, daemon: Daemon) -> None:
        daemon.restart()

    def teardown(self) -> None:
        """All resets are done once the epochs are synced and adopted, without any message."""
        self.now += ADOPT_EVERY
        for daemon in self.daemons:
            self.advance(daemon)
            while daemon.syncing:
                self.sync(daemon)
            assert daemon.resets == {}
            (namespace,) = daemon.fixture.core._namespaces
            assert (namespace.epoch, namespace.is_behind) == (self.resets, False)
            namespace.cache.check_integrity()


def test_no_load_returns_a_block_that_was_stored_before_a_reset() -> None:
    run_state_machine_as_test(
        ResetsMachine, settings=settings(max_examples=100, stateful_step_count=60)
    )
    assert min(LOADS["before"], LOADS["after a restart"]) > 50, LOADS
