"""Resets of namespaces, from the request to its Done.

    Reset      the epoch is drawn: every daemon of this host and user has it at once
    adopted    this daemon's namespace is empty, and its key events are sent
    SyncEpochs ... EpochsSynced       the epoch is durable
    SettleEpochs ... EpochsSettled    stores that other hosts share have the epoch; if one cannot be
                                      reached, Done names it after PUBLISH_SECONDS
    Done

Resets that arrive during a sync share the next one. Called by the core, on the event loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvferry.daemon.core.actions import Action, SendMessage
from kvferry.daemon.core.dispatch import MessageTable, ReportTable
from kvferry.daemon.core.epochs import Epochs
from kvferry.daemon.core.namespace import Namespace
from kvferry.daemon.core.namespaces import Namespaces
from kvferry.daemon.core.store_name import StoreName
from kvferry.daemon.core.tier_actions import (
    DropStore,
    EpochsSettled,
    EpochsSynced,
    SettleEpochs,
    StoresFound,
    SyncEpochs,
    TierDescription,
)
from kvferry.proto.errors import Code, Refused
from kvferry.proto.messages import Done, Reset

# Seconds for shared stores to get the epoch of a reset. Without them, the host is reset all the
# same, and does not use them for the namespace until they have it.
PUBLISH_SECONDS = 5.0
MAX_PENDING = 1 << 16


@dataclass(eq=False, slots=True)
class _PendingReset:
    """epoch: of the namespace after it. until: latest time of its Done, once it is durable."""

    session: str
    request_id: int
    namespace: Namespace
    epoch: int
    until: float = 0.0


class Resets:
    """Resets without a Done, and the epochs that shared stores have.

    tiers: fastest first.
    """

    def __init__(
        self, namespaces: Namespaces, epochs: Epochs, tiers: Sequence[TierDescription]
    ) -> None:
        self._namespaces, self._epochs = namespaces, epochs
        self._shared = {place: tier.name for place, tier in enumerate(tiers) if tier.is_shared}
        # The last epoch of each namespace that each shared tier had, when it was this host's.
        self._settled: Mapping[int, dict[str, int]] = {place: {} for place in self._shared}
        # In order of arrival. The first ones are durable, and the next ones are being synced.
        self._pending: list[_PendingReset] = []
        self._durable = self._syncing = 0
        # Whether a sync runs, perhaps for resets of closed sessions only.
        self._sync_runs = False
        # Changes by which a reset may be done, and how many `take_done` has seen.
        self._changes, self._seen = 0, (0, 0)

    @property
    def messages(self) -> MessageTable:
        return {Reset: self.reset}

    @property
    def reports(self) -> ReportTable:
        return {
            StoresFound: self.note_stores,
            EpochsSynced: self.end_sync,
            EpochsSettled: self.settle,
        }

    @property
    def deadline(self) -> float | None:
        """The time of the next `take_done`, if any."""
        return self._pending[0].until if self._durable else None

    def epochs_in_use(self) -> dict[str, int]:
        """The epoch of each namespace of this daemon, which shared tiers must have."""
        names = self._namespaces.names() if self._shared else ()
        return {name: self._epochs.current(name) for name in names}

    def reset(self, session: str, message: Reset, now: float) -> list[Action]:
        """Reset the namespace of a session. Raises Refused if it is in none."""
        namespace = self._namespaces.require_namespace(session, message)
        if len(self._pending) >= MAX_PENDING:
            text = f"{MAX_PENDING} resets are in progress; wait for the replies to yours"
            raise Refused(Code.BUSY, text, MAX_PENDING)
        epoch = self._epochs.draw(namespace.name, message.label)
        self._pending.append(_PendingReset(session, message.request_id, namespace, epoch))
        return [*self._namespaces.adopt_epochs(now), *self._sync()]

    def end_sync(self, report: EpochsSynced) -> list[Action]:
        """The epochs are durable as they were when the sync began."""
        for reset in self._pending[self._durable : self._durable + self._syncing]:
            reset.until = report.now + PUBLISH_SECONDS
        self._durable, self._syncing = self._durable + self._syncing, 0
        self._sync_runs = False
        self._changes += 1
        settle: list[Action] = [SettleEpochs()] if self._shared and self._pending else []
        return [*self._sync(), *settle]

    def settle(self, report: EpochsSettled) -> list[Action]:
        """A shared tier has these epochs. Adopt those that other hosts have drawn later."""
        again = False
        self._changes += 1
        for name, epoch in report.found.items():
            if epoch == report.asked.get(name):
                self._settled[report.tier][name] = epoch
                if self._is_published(name, epoch):
                    self._epochs.mark_published(name, epoch)
            elif epoch > (own := self._epochs.current(name)):
                # A reset of this host that the store does not know is later than its epoch,
                # whatever the clocks of the hosts say.
                if self._epochs.is_unpublished(name):
                    self._epochs.draw(name, above=epoch)
                else:
                    self._epochs.raise_to(name, epoch)
                again |= self._epochs.current(name) != own  # else it was damaged
        adopted = self._namespaces.adopt_epochs(report.now)
        return [*adopted, SettleEpochs()] if again else adopted

    def note_stores(self, report: StoresFound) -> list[Action]:
        """A tier has stores of earlier daemons. Adopt later epochs, and drop old stores."""
        names = [(StoreName.parse(store), store) for store in report.stores]
        for name, _ in names:
            self._epochs.raise_to(name.namespace, name.epoch)
        adopted = self._namespaces.adopt_epochs(report.now)
        current = self._epochs.current
        old = [store for name, store in names if name.epoch != current(name.namespace)]
        return [*adopted, *map(DropStore, old)]

    def take_done(self, now: float) -> list[Action]:
        """The Done of each reset that is done by now. Key events must have been sent before."""
        state = self._changes, self._namespaces.adoptions
        if not self._durable or (state == self._seen and now < self._pending[0].until):
            return []
        self._seen = state
        durable = self._pending[: self._durable]
        left = [each for each in durable if not self._is_done(each, now)]
        waiting = set(left)
        self._pending[: self._durable], self._durable = left, len(left)
        return [self._done(each) for each in durable if each not in waiting]

    def close_session(self, session: str) -> None:
        """The resets of a session are done without a reply."""
        durable, end = self._durable, self._durable + self._syncing
        parts = self._pending[:durable], self._pending[durable:end], self._pending[end:]
        first, second, third = ([one for one in part if one.session != session] for part in parts)
        self._pending = [*first, *second, *third]
        self._durable, self._syncing = len(first), len(second)

    def _sync(self) -> list[Action]:
        if self._sync_runs or self._durable == len(self._pending):
            return []
        self._syncing, self._sync_runs = len(self._pending) - self._durable, True
        return [SyncEpochs()]

    def _done(self, reset: _PendingReset) -> SendMessage:
        name, epoch = reset.namespace.name, reset.epoch
        missing = [tier for place, tier in self._shared.items() if self._known(place, name) < epoch]
        reply = Done(reset.request_id, reset.namespace.epoch, tuple(missing))
        return SendMessage(reset.session, reply)

    def _known(self, tier: int, name: str) -> int:
        """The epoch that a shared tier had last."""
        return self._settled[tier].get(name, -1)

    def _is_done(self, reset: _PendingReset, now: float) -> bool:
        # A host's own epochs grow. A namespace whose region was freed is empty.
        is_lost = not self._namespaces.has(reset.namespace)
        if not is_lost and reset.namespace.epoch < reset.epoch:
            return False
        return self._is_published(reset.namespace.name, reset.epoch) or now >= reset.until

    def _is_published(self, name: str, epoch: int) -> bool:
        return all(self._known(tier, name) >= epoch for tier in self._shared)
