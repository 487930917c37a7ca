"""Epochs without a file, for tests of the core. The clock is a counter."""

from __future__ import annotations

from typing import Any

from kvferry.daemon.core.core import Core
from kvferry.daemon.core.epochs import NEVER_RESET
from kvferry.daemon.core.tier_actions import EpochsSynced, SyncEpochs

# An epoch that is too large to be one, and all above it.
DAMAGED = 1 << 62


class OwnEpochs:
    """Satisfies Epochs. Without other hosts, an epoch is the number of resets."""

    def __init__(self) -> None:
        self.changes = 0
        self._current = dict[str, int]()
        self._labels = dict[str, str]()
        self._unpublished = set[tuple[str, int]]()

    def current(self, namespace: str) -> int:
        return self._current.get(namespace, NEVER_RESET)

    def draw(self, namespace: str, label: str = "", above: int = 0) -> int:
        if label and self._labels.get(namespace) == label:
            return self.current(namespace)
        if above >= DAMAGED:
            return self.current(namespace)
        epoch = 1 + max(self.current(namespace), above)
        self._current[namespace], self._labels[namespace] = epoch, label
        self._unpublished.add((namespace, epoch))
        self.changes += 1
        return epoch

    def raise_to(self, namespace: str, epoch: int) -> None:
        if self.current(namespace) < epoch < DAMAGED:
            self._current[namespace] = epoch
            self.changes += 1

    def is_unpublished(self, namespace: str) -> bool:
        return (namespace, self.current(namespace)) in self._unpublished

    def mark_published(self, namespace: str, epoch: int) -> None:
        self._unpublished.discard((namespace, epoch))


def with_syncs(core: Core, actions: list[Any], now: float) -> list[Any]:
    """Actions of a core, then those that follow when its SyncEpochs has been performed."""
    others = [action for action in actions if not isinstance(action, SyncEpochs)]
    if len(others) < len(actions):
        others += with_syncs(core, core.report(EpochsSynced(now=now)), now)
    return others
