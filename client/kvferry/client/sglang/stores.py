"""Stores: nodes of the tree that are offloaded. The tree locks a node until its store has ended.

A store has two steps, because the scheduler's thread must not wait for the device: when the slots
of its pages are in host memory, its transfer is submitted. The tree takes the results in the order
of its offers. Used in the scheduler's thread.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile

from kvferry.client.engines.rank_session import WAIT_TIMEOUT, RankSession
from kvferry.client.manager import OffloadingManager
from kvferry.client.sglang.block_ids import BlockIds
from kvferry.client.sglang.transfers import RankTransfers
from kvferry.proto.errors import Code, Gone, KVFerryError
from kvferry.proto.keys import OffloadKey
from kvferry.proto.specs import Direction

log = logging.getLogger("kvferry")


@dataclass(eq=False, slots=True)
class Store:
    """One node. job_id and since: of its transfer, once it is submitted. success: None until it has
    ended."""

    blocks: BlockIds
    job_id: int = 0
    since: float = 0.0
    keys: tuple[OffloadKey, ...] = ()
    success: bool | None = None


class Stores:
    """The stores of one rank. own: the keys that this rank stores; others may be another's. clock:
    for tests."""

    def __init__(
        self,
        session: RankSession,
        manager: OffloadingManager,
        transfers: RankTransfers,
        own: Callable[[list[OffloadKey]], list[OffloadKey]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._session, self._manager = session, manager
        self._transfers, self._own, self._clock = transfers, own, clock
        # In the order of the offers.
        self._stores: deque[Store] = deque()

    def __len__(self) -> int:
        """How many have not been taken."""
        return len(self._stores)

    def offer(self, blocks: BlockIds) -> None:
        self._stores.append(Store(blocks))

    def advance(self) -> None:
        """Submit what can be, and note what has ended. RankTransfers.poll has received the results.

        During a reset nothing is submitted: the daemon would refuse it, as from before.
        """
        manager = self._manager
        is_resetting = manager.is_resetting and manager.gone is None
        for store in self._stores:
            if store.job_id:
                self._check_ended(store)
            elif store.success is None:
                if is_resetting or not store.blocks.ready:
                    break
                self._submit(store)

    @property
    def ended(self) -> int:
        """How many have ended, of those that were not taken, from the oldest on."""
        return len(list(takewhile(lambda store: store.success is not None, self._stores)))

    def take(self) -> bool:
        """Whether the oldest one, which has ended, has succeeded."""
        return bool(self._stores.popleft().success)

    def end_all(self) -> None:
        """Return when no transfer reads the device; then none is left."""
        self._session.wait_all()
        self._transfers.poll()
        for store in self._stores:
            if store.job_id:
                self._check_ended(store)
        self._stores.clear()

    def _submit(self, store: Store) -> None:
        output = self._manager.prepare_store(self._own(store.blocks.keys()))
        if output is None or not output.keys_to_store:
            # There is nothing to store if others have stored it, or do so.
            store.success = output is not None and self._manager.gone is None
            return
        store.keys = output.keys_to_store
        try:
            spec = store.blocks.spec(store.keys), output.store_spec
            store.job_id = self._transfers.submit(spec, Direction.STORE)
            store.since = self._clock()
        except KVFerryError as error:
            log.warning("kvferry: a node is not stored: %s", error)
            self._end(store, success=False)

    def _check_ended(self, store: Store) -> None:
        success = self._transfers.take(store.job_id)
        if success is not None:
            self._end(store, success=success)
        elif self._clock() - store.since > WAIT_TIMEOUT:
            message = f"a store has not ended within {WAIT_TIMEOUT:.0f} s"
            self._session.abandon(Gone(Code.TIMEOUT, message, store.job_id))
            self._transfers.poll()  # all jobs have ended, so no other is too late

    def _end(self, store: Store, *, success: bool) -> None:
        store.success, store.job_id = success, 0
        self._manager.complete_store(store.keys)
