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

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
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
        # In order of arrival: to be synced next; being synced (None: no sync runs); and durable, by
        # namespace, of which none is done before those that came earlier.
        self._next: list[_PendingReset] = []
        self._syncing: list[_PendingReset] | None = None
        self._durable: dict[Namespace, deque[_PendingReset]] = {}
        # How many are in these.
        self._pending = 0
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
        return min((queue[0].until for queue in self._durable.values()), default=None)

    def epochs_in_use(self) -> dict[str, int]:
        """The epoch of each namespace of this daemon, which shared tiers must have."""
        if not self._shared:
            return {}
        return {one.name: self._epochs.current(one.name) for one in self._namespaces}

    def reset(self, session: str, message: Reset, now: float) -> list[Action]:
        """Reset the namespace of a session. Raises Refused if it is in none."""
        namespace = self._namespaces.require_namespace(session, message)
        if self._pending >= MAX_PENDING:
            text = f"{MAX_PENDING} resets are in progress; wait for the replies to yours"
            raise Refused(Code.BUSY, text, MAX_PENDING)
        epoch = self._epochs.draw(namespace.name, message.label)
        self._next.append(_PendingReset(session, message.request_id, namespace, epoch))
        self._pending += 1
        return [*self._namespaces.adopt_epochs(now), *self._sync()]

    def end_sync(self, report: EpochsSynced) -> list[Action]:
        """The epochs are durable as they were when the sync began."""
        for reset in self._syncing or ():
            reset.until = report.now + PUBLISH_SECONDS
            self._durable.setdefault(reset.namespace, deque()).append(reset)
        self._syncing = None
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
        state, deadline = (self._changes, self._namespaces.adoptions), self.deadline
        if deadline is None or (state == self._seen and now < deadline):
            return []
        self._seen, done = state, list[_PendingReset]()
        for queue in self._durable.values():
            while queue and self._is_done(queue[0], now):
                done.append(queue.popleft())
        self._durable = {one: queue for one, queue in self._durable.items() if queue}
        self._pending -= len(done)
        return [self._done(each) for each in done]

    def close_session(self, session: str) -> None:
        """The resets of a session are done without a reply."""
        self._next = _without(self._next, session)
        if self._syncing is not None:
            self._syncing = _without(self._syncing, session)
        left = {one: deque(_without(queue, session)) for one, queue in self._durable.items()}
        self._durable = {one: queue for one, queue in left.items() if queue}
        parts = self._next, self._syncing or (), *self._durable.values()
        self._pending = sum(map(len, parts))

    def _sync(self) -> list[Action]:
        if self._syncing is not None or not self._next:
            return []
        self._syncing, self._next = self._next, []
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


def _without(resets: Iterable[_PendingReset], session: str) -> list[_PendingReset]:
    return [each for each in resets if each.session != session]
