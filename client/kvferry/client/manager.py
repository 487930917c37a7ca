"""The methods of vLLM's OffloadingManager for a scheduler; none of them waits.

The daemon decides what is resident, and a scheduler cannot wait for it. So a manager answers from
mirrors, which are a moment old, and nothing that it says reserves anything:

    store   prepare_store says which keys are worth a transfer. The transfer itself, submitted by
            the worker with these keys, has the daemon reserve room, evict, and skip what is there;
            it may also be refused (CACHE_FULL). What was offered and not completed is a
            HIT_PENDING meanwhile, and is not offered again. What is pending for longer than
            `patience` and was not offered here is a MISS, and may be offered.
    load    prepare_load pins, by a message that may come too late: then the worker's transfer is
            refused (KEY_ABSENT). A failed load is a miss, and never wrong bytes.

There is a client, and so a mirror, for each tensor-parallel rank's daemon, with the same keys and
bytes of their own. A key is a HIT where all have it and a MISS where any has not; a store of it
then writes what is missing. RETRY where one of them does not know, and none says MISS.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import msgspec

from kvferry.client.blocking import OffloadClient
from kvferry.client.mirror import HIT, HIT_PENDING, MISS, RETRY, Mirror
from kvferry.client.nonblocking import Locate, NonBlocking
from kvferry.client.residency_events import OffloadingEvent, ResidencyEvents
from kvferry.client.session_state import SessionState
from kvferry.proto.errors import Code, Gone, Refused
from kvferry.proto.keys import Lookup, OffloadKey
from kvferry.proto.specs import MAX_KEYS, KeyLoadStoreSpec
from kvferry.proto.status import Fingerprint

TOUCHES = 4096
"""Touched keys that are kept to be sent together."""
# Seconds for which a key may be pending. A daemon verifies 64 GiB in about that time after a
# restart; to compute a prefix takes less than to wait longer for it.
PATIENCE = 5.0
# Pending keys whose first lookup is remembered; of more the earliest are forgotten.
PENDING_REMEMBERED = 1 << 16


@dataclass(frozen=True, slots=True)
class PrepareStoreOutput:
    """What to store. evicted_keys: always empty; who goes is known later, from take_events.

    store_specs: for the worker of each rank. A transfer that comes after a reset is refused
    (STALE) where this was decided on before.
    """

    keys_to_store: tuple[OffloadKey, ...]
    store_specs: tuple[KeyLoadStoreSpec, ...]
    evicted_keys: tuple[OffloadKey, ...] = ()

    @property
    def store_spec(self) -> KeyLoadStoreSpec:
        """For the worker of rank 0."""
        return self.store_specs[0]


@dataclass(frozen=True, slots=True)
class Usage:
    """Host blocks of all ranks together, as the mirrors know them; pinned: by this manager."""

    blocks: int
    ready: int
    pending: int
    pinned: int

    @property
    def free(self) -> int:
        return self.blocks - self.ready - self.pending


class OffloadingManager:
    """The residency of one engine, over the clients of its ranks' daemons.

    clients: each with a namespace opened, mirror and all; or make both with `open`.
    events: whether there are any to take.
    patience: seconds after which a key that is still pending, and was not offered here, is a MISS:
    its verification is not done, or another engine's store is stuck. clock: for tests.
    `hits` and `misses` count the lookups answered so.
    """

    def __init__(
        self,
        clients: NonBlocking | Sequence[NonBlocking],
        *,
        events: bool = False,
        patience: float = PATIENCE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._patience, self._clock = patience, clock
        self._pending_since: dict[OffloadKey, float] = {}
        self._clients = (clients,) if isinstance(clients, NonBlocking) else tuple(clients)
        self._namespaces = tuple(client.namespace for client in self._clients)
        mirrors = [namespace.mirror for namespace in self._namespaces]
        self._events = ResidencyEvents(mirrors) if events else None
        self._offered: set[OffloadKey] = set()
        self._touched: dict[OffloadKey, None] = {}
        """Least recent first."""
        self.hits = self.misses = 0
        self._told = 0, 0
        self._opened = ExitStack()

    @classmethod
    def open(
        cls,
        directories: Sequence[Locate],
        *,
        engine: str,
        fingerprint: Fingerprint,
        cpu_bytes_to_use: int | None = None,
        eviction_policy: str = "lru",
        store_threshold: int = 1,
        events: bool = False,
        patience: float = PATIENCE,
        timeout: float = 10.0,
        wait: bool = True,
    ) -> OffloadingManager:
        """Clients of the daemons in `directories`, in the order of ranks, and a manager over them.

        fingerprint: that of the engine. With several daemons rank and world_size are put in, as
            the workers have to: msgspec.structs.replace(fingerprint, rank=r, world_size=n).
        cpu_bytes_to_use: of each daemon's pool. wait: for the daemons, at most `timeout` seconds
            each; else polling connects, and all keys are a MISS until then (OffloadClient, state).
        The others, and errors: as OffloadClient and its open_namespace. `shutdown` closes the
        clients.
        """
        options: dict[str, Any] = {
            "cpu_bytes_to_use": cpu_bytes_to_use,
            "eviction_policy": eviction_policy,
            "store_threshold": store_threshold,
        }
        about: dict[str, Any] = {
            "engine": engine,
            "client": "OffloadingManager",
            "timeout": timeout,
        }
        with ExitStack() as opened:
            clients = []
            for rank, directory in enumerate(directories):
                of_rank = _of_rank(fingerprint, rank, len(directories))
                state = None if wait else SessionState.of_namespace(of_rank, **options)
                client = OffloadClient(directory, state=state, **about)
                clients.append(opened.enter_context(client))
                if wait:
                    client.open_namespace(of_rank, **options)
            manager = cls(clients, events=events, patience=patience)
            manager._opened = opened.pop_all()
        return manager

    def wait_connected(self, timeout: float | None = None) -> None:
        """Return once all daemons are connected; as OffloadClient.wait_connected."""
        for client in self._clients:
            assert isinstance(client, OffloadClient)
            client.wait_connected(timeout)

    def poll(self) -> None:
        """Take in what has arrived, and advance a reconnect; lookup and take_events do it too."""
        for client in self._clients:
            client.poll()

    def abandon(self) -> None:
        """Give the sessions up and begin new ones; pins and resets are restored."""
        for client in self._clients:
            client.abandon()

    @property
    def num_blocks(self) -> int:
        """How many keys can be resident at a time."""
        return min(namespace.opened.num_blocks for namespace in self._namespaces)

    @property
    def usage(self) -> Usage:
        ready = pending = 0
        for mirror in self._fresh_mirrors():
            ready += mirror.ready
            pending += mirror.pending
        blocks = sum(namespace.opened.num_blocks for namespace in self._namespaces)
        pinned = sum(namespace.pinned for namespace in self._namespaces)
        return Usage(blocks, ready, pending, pinned)

    def lookup(self, key: OffloadKey) -> Lookup:
        """HIT, MISS, HIT_PENDING (a store of it is on its way) or RETRY (ask again later)."""
        found = self._find(key)
        if found is HIT:
            self.hits += 1
        elif found is MISS:
            self.misses += 1
        return found

    @property
    def ready_keys(self) -> tuple[Set[OffloadKey], ...]:
        """Of each rank, the keys that are a HIT there: lookups for who has many, and counts them.

        As fresh as the last call of any method, and valid until the next. Not to be changed.
        """
        return tuple([namespace.mirror.ready_keys for namespace in self._namespaces])

    def count(self, hits: int) -> None:
        """Lookups that were answered from `ready_keys`."""
        self.hits += hits

    def prepare_store(self, keys: Iterable[OffloadKey]) -> PrepareStoreOutput | None:
        """Which of these keys to store; those that are there or on their way are left out.

        Nothing to store is an empty answer, as is every one while a daemon is gone. None where
        more keys are offered than there are blocks. Of more than one transfer takes (MAX_KEYS) it
        is the first. Give what is to be stored to the worker, and to complete_store when its
        transfer has ended. Raises Refused (BAD_KEY).
        """
        keys = self._checked(dict.fromkeys(keys))
        if len(keys) > self.num_blocks:
            return None
        self.flush()
        found = (HIT, HIT_PENDING)
        absent = tuple(key for key in keys if self._find(key) not in found)
        wanted = () if self.gone else absent[:MAX_KEYS]
        lacking = set(absent)
        keep = tuple([key for key in keys if key not in lacking])[:MAX_KEYS] if wanted else ()
        self._offered.update(wanted)
        for key in self._pending_since.keys() & set(wanted):
            del self._pending_since[key]
        return PrepareStoreOutput(
            wanted,
            tuple(KeyLoadStoreSpec(wanted, one.generation, keep) for one in self._namespaces),
        )

    def complete_store(self, keys: Iterable[OffloadKey], success: bool = True) -> None:
        """The transfer of these keys has ended, so or so. Twice is harmless.

        Whether it succeeded the daemon has seen itself; a key that it skipped, or whose store
        failed, is a MISS again.
        """
        self._offered.difference_update(keys)

    def prepare_load(self, keys: Iterable[OffloadKey]) -> KeyLoadStoreSpec:
        """Keep these keys until complete_load; returns what the worker loads from, in their order.

        Raises Refused (KEY_ABSENT) where one of them is no HIT, or BAD_KEY; nothing is kept then.
        """
        keys = self._checked(keys)
        for mirror in self._fresh_mirrors():
            if lacking := mirror.lacking(keys):
                raise Refused(
                    Code.KEY_ABSENT, "only a HIT can be loaded: look it up first", lacking.pop()
                )
        for client in self._clients:
            for some in _pieces(keys):
                client.pin(some)
        return KeyLoadStoreSpec(keys)

    def complete_load(self, keys: Iterable[OffloadKey]) -> None:
        """Let keys go that prepare_load kept. Raises Refused (NOT_PINNED) where it did not."""
        keys = tuple(keys)
        for client in self._clients:
            for some in _pieces(keys):
                client.unpin(some)

    def touch(self, keys: Iterable[OffloadKey]) -> None:
        """These are of use: the first becomes the most recent. Sent by `flush`, or when many."""
        keys = self._checked(keys)
        fresh, touched = dict.fromkeys(reversed(keys)), self._touched
        for key in touched.keys() & fresh.keys():
            del touched[key]
        if len(touched) + len(fresh) > TOUCHES:
            self.flush()
        touched.update(fresh)

    def flush(self) -> None:
        """Tell the daemons which keys were touched, and how many lookups were a hit or a miss.

        prepare_store and take_events do it too, prepare_load does not: somebody waits for that.
        Once a step of the engine is enough.
        """
        told = self.hits, self.misses
        hits, misses = told[0] - self._told[0], told[1] - self._told[1]
        if self._touched or hits or misses:
            keys = tuple(reversed(self._touched))
            self._touched.clear()
            self._told = told
            for client in self._clients:
                first, *more = _pieces(keys)
                client.touch(first, hits, misses)
                for some in more:
                    client.touch(some)

    def take_events(self) -> list[OffloadingEvent]:
        """What became a HIT and what ceased to be one since the last call, each in one event.

        Added up, they are what is a HIT now: the first call names what was there before, and a
        key that came and went in between is in none. None unless `events` were asked for.
        """
        self.flush()
        mirrors = self._fresh_mirrors()
        return self._events.take(mirrors) if self._events is not None else []

    def reset_cache(self) -> None:
        """Make every key absent: here at once, there soon. Until then all lookups say MISS."""
        self._offered.clear()
        self._pending_since.clear()
        self._touched.clear()
        for client in self._clients:
            if client.gone is None or client.connecting:
                client.reset_async()

    @property
    def resetting(self) -> bool:
        """Whether one of the daemons has not done a reset that it was sent, as far as is known."""
        self.poll()
        return any(namespace.undone() for namespace in self._namespaces)

    @property
    def gone(self) -> Gone | None:
        """Why one of the daemons is not there any more, once that is known."""
        return next((client.gone for client in self._clients if client.gone is not None), None)

    def close(self) -> None:
        """Say what is still to be said; clients that `open` made are closed."""
        self.flush()
        self._opened.close()

    shutdown = close

    def __enter__(self) -> OffloadingManager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _checked(self, keys: Iterable[OffloadKey]) -> tuple[OffloadKey, ...]:
        """`keys`, however many; Refused (BAD_KEY) where they are none of this namespace's."""
        keys, check = tuple(keys), self._namespaces[0].checked
        for some in _pieces(keys):
            check(some)
        return keys

    def _find(self, key: OffloadKey) -> Lookup:
        found = HIT
        for client in self._clients:
            here = client.lookup(key)
            if here is MISS:
                self._pending_since.pop(key, None)
                return HIT_PENDING if key in self._offered and not self.gone else MISS
            if here is not HIT and found is not RETRY:
                found = here
        if found is HIT_PENDING and key not in self._offered:
            return HIT_PENDING if self._is_patient(key) else MISS
        if self._pending_since:
            self._pending_since.pop(key, None)
        return found

    def _is_patient(self, key: OffloadKey) -> bool:
        """Whether a pending key was not pending for too long."""
        now, pending = self._clock(), self._pending_since
        if key not in pending and len(pending) >= PENDING_REMEMBERED:
            del pending[next(iter(pending))]
        return now - pending.setdefault(key, now) <= self._patience

    def _fresh_mirrors(self) -> list[Mirror]:
        self.poll()
        return [namespace.mirror for namespace in self._namespaces]


def _pieces(keys: tuple[OffloadKey, ...]) -> Iterator[tuple[OffloadKey, ...]]:
    """As many as travel at once; one piece where there are none."""
    for at in range(0, len(keys) or 1, MAX_KEYS):
        yield keys[at : at + MAX_KEYS]


def _of_rank(fingerprint: Fingerprint, rank: int, ranks: int) -> Fingerprint:
    if ranks == 1:
        return fingerprint
    return msgspec.structs.replace(fingerprint, rank=rank, world_size=ranks)
