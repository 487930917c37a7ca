"""Stores that have ended, until they are sealed: read back, so that a later daemon can tell whether
a block still holds what was stored in it.

They are read in rounds, many stores together, of each block only the last. What ends during a round
waits for the next one. So a round never has more to read than the pool holds, however much faster
stores come than they are read: what was stored over meanwhile is not read at all, and forgotten.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from kvferry.daemon.core.actions import Cargo
from kvferry.daemon.engine.auditor import Auditor, Blocks
from kvferry.daemon.engine.ledger import Ledger, Sums, Versions

SEAL_AFTER = 0.2
"""Seconds that stores wait for others to be sealed with them; who is killed loses as much, and what
the round before left."""
FOLD = 1 << 14
"""Blocks that wait, at least, when those are forgotten that were stored over."""


@dataclass(frozen=True, slots=True)
class Store:
    """A store, and the versions that its blocks have while it is the last."""

    ledger: Ledger
    cargo: Cargo
    versions: Versions

    def cut(self, part: slice) -> Store:
        cargo = self.cargo
        smaller = Cargo(cargo.owner, cargo.blocks[part], cargo.keys[part], cargo.parts)
        return replace(self, cargo=smaller, versions=self.versions[part])


class Seals:
    """Used by the loop alone."""

    def __init__(self, auditor: Auditor) -> None:
        self._loop = asyncio.get_running_loop()
        self._auditor = auditor
        self._stores: list[Store] = []
        """For the next round."""
        self._waiting, self._most = 0, FOLD
        """Blocks of these, and how many there may be before some are forgotten."""
        self._reading = 0
        """Batches of this one that are yet to be read."""
        self._round_is_due = False

    @property
    def busy(self) -> bool:
        """Whether something was stored that is not sealed yet."""
        return self._reading > 0 or bool(self._stores)

    def stored(self, store: Store) -> None:
        """A store has ended."""
        if not store.cargo.blocks.size:  # all of its keys were there
            return
        self._stores.append(store)
        self._waiting += store.cargo.blocks.size
        if self._waiting > self._most:
            self._fold()
        self._plan_round()

    def _plan_round(self) -> None:
        if self._stores and not (self._reading or self._round_is_due):
            self._round_is_due = True
            self._loop.call_later(SEAL_AFTER, self._begin_round)

    def _begin_round(self) -> None:
        self._round_is_due = False
        self._fold()
        stores, self._stores, self._waiting = self._stores, [], 0
        for store in stores:
            self._read(store)

    def _fold(self) -> None:
        """Of each ledger make one store."""
        by_ledger: defaultdict[Ledger, list[Store]] = defaultdict(list)
        for store in self._stores:
            if not store.ledger.closed:
                by_ledger[store.ledger].append(store)
        self._stores = [_joined(ledger, mine) for ledger, mine in by_ledger.items()]
        self._waiting = sum([store.cargo.blocks.size for store in self._stores])
        self._most = max(FOLD, 2 * self._waiting)

    def _read(self, store: Store) -> None:
        deed, cargo = store.ledger.deed, store.cargo
        blocks = Blocks(deed.start, deed.block_bytes, cargo.blocks, cargo.keys)
        for part in blocks.batches(urgent=False):
            self._reading += 1
            done = partial(self._seal, store.cut(part))
            self._auditor.read(blocks.cut(part), urgent=False, done=done)

    def _seal(self, store: Store, sums: Sums) -> None:
        self._reading -= 1
        self._plan_round()
        cargo = store.cargo
        if not store.ledger.closed:
            store.ledger.seal(cargo.blocks, store.versions, sums, cargo.keys, cargo.parts)


def _joined(ledger: Ledger, stores: list[Store]) -> Store:
    """Stores of one ledger as one, without blocks that were stored over."""
    blocks = np.concatenate([store.cargo.blocks for store in stores])
    versions = np.concatenate([store.versions for store in stores])
    keys = [key for store in stores for key in store.cargo.keys]
    parts: dict[int, tuple[int, int]] = {}
    for store in stores:  # a whole store behind that of a part makes the block whole
        if parts:
            for block in parts.keys() & set(store.cargo.blocks.tolist()):
                del parts[block]
        parts |= store.cargo.parts
    last = ledger.current(blocks, versions)
    if not last.all():
        keys = [key for key, same in zip(keys, last.tolist(), strict=False) if same]
        blocks, versions = blocks[last], versions[last]
    return Store(ledger, Cargo(ledger.deed.owner, blocks, tuple(keys), parts), versions)
