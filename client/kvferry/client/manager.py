"""The methods of vLLM's OffloadingManager, for a scheduler; none of them waits.

The daemon decides what is resident, and a scheduler cannot wait for it. So a manager answers from
mirrors, which are slightly old, and its answers reserve nothing:

    store   prepare_store returns the keys that should be stored. The transfer, which the worker
            submits with these keys, makes the daemon reserve blocks, evict, and skip keys that are
            resident; it may be refused (CACHE_FULL). A key that was returned and not completed is a
            HIT_PENDING, and is not returned again. A key that is pending for longer than
            `pending_timeout`, and was not returned here, is a MISS and may be stored.
    below   prefetch has the daemon search below the host pool, and promote what tiers have: copy it
            to the pool. A searched key is a RETRY, a key that is being promoted a HIT_PENDING. A
            key that a sibling has is a HIT, and is loaded from the sibling's memory.
    load    prepare_load pins, by a message that may arrive too late: the worker's transfer is then
            refused (KEY_ABSENT). A failed load is a miss, never wrong bytes.

There is one client, and so one mirror, per tensor-parallel rank's daemon; all have the same keys,
each with its own bytes. A key is a HIT if it is a HIT on all ranks. It is a MISS if any rank misses
it; the next store writes it there. Otherwise it is a RETRY: some mirror is incomplete.

If all ranks hold the same bytes, each key may have one writer (writers.py). A key that only its
writer has is stored, but a MISS until the daemons of the other ranks have found it: see
Writers.search_writers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import ExitStack
from typing import Unpack

import msgspec

from kvferry.client.blocking import OffloadClient
from kvferry.client.manager_outputs import PrepareStoreOutput, ResidencyUsage
from kvferry.client.mirror import HIT, HIT_PENDING, MISS, RETRY, Mirror
from kvferry.client.nonblocking import (
    ClientOptions,
    DaemonDirectory,
    NonBlockingClient,
)
from kvferry.client.pending_keys import PendingKeys
from kvferry.client.residency_events import OffloadingEvent, ResidencyEvents
from kvferry.client.retentions import Retention
from kvferry.client.session_state import NamespaceOptions, SessionState
from kvferry.client.tier_searches import Prefetch
from kvferry.client.use_report import UseReport
from kvferry.client.writers import Writers
from kvferry.proto.errors import Code, Gone, Refused
from kvferry.proto.fingerprint import Fingerprint
from kvferry.proto.keys import Lookup, OffloadKey
from kvferry.proto.specs import KeyLoadStoreSpec

# Seconds for which a key may be pending. After a restart a daemon verifies 64 GiB in about that
# time; after it, computing a prefix is faster than waiting.
PENDING_TIMEOUT = 5.0


class OffloadingManager:
    """The resident keys of one engine, over the clients of its ranks' daemons.

    clients: each has opened the namespace with a mirror; `connect` creates clients and manager.
    events: whether take_events returns any.
    pending_timeout: seconds after which a key that is still pending, and that this manager does not
        store, is a MISS: it is not verified yet, or another engine's store is stuck.
    replicated: whether all ranks hold the same bytes.
    clock: for tests.
    """

    def __init__(
        self,
        clients: NonBlockingClient | Sequence[NonBlockingClient],
        *,
        events: bool = False,
        pending_timeout: float = PENDING_TIMEOUT,
        replicated: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pending = PendingKeys(pending_timeout, clock)
        self._clients = (clients,) if isinstance(clients, NonBlockingClient) else tuple(clients)
        self.writers = Writers(self._clients, clock, replicated=replicated)
        self._namespaces = tuple(client.namespace for client in self._clients)
        mirrors = [namespace.mirror for namespace in self._namespaces]
        self._events = ResidencyEvents(mirrors) if events else None
        self._offered: set[OffloadKey] = set()
        self._uses = UseReport(self._clients, self.writers)
        self._own_clients = ExitStack()

    @classmethod
    def connect(
        cls,
        directories: Sequence[DaemonDirectory],
        *,
        engine: str,
        fingerprint: Fingerprint,
        events: bool = False,
        pending_timeout: float = PENDING_TIMEOUT,
        replicated: bool = False,
        timeout: float = 10.0,
        wait: bool = True,
        **options: Unpack[NamespaceOptions],
    ) -> OffloadingManager:
        """Connect to the daemons in `directories`, in the order of ranks.

        fingerprint: of the engine. With several daemons, rank and world_size are set here; workers
            must do the same: msgspec.structs.replace(fingerprint, rank=r, world_size=n).
        replicated: whether all ranks hold the same bytes; then they have the same fingerprint.
        wait: wait for each daemon, at most `timeout` seconds; False: polling connects, and all keys
            are a MISS until then (ClientOptions, state).
        options: NamespaceOptions; cpu_bytes_to_use is per daemon.
        Other arguments, and errors: as OffloadClient and its open_namespace. `shutdown` closes the
        clients.
        """
        client_options: ClientOptions = {
            "engine": engine,
            "client": "OffloadingManager",
            "timeout": timeout,
        }
        with ExitStack() as opened:
            clients = []
            for rank, directory in enumerate(directories):
                count = 1 if replicated else len(directories)
                rank_fingerprint = _rank_fingerprint(fingerprint, rank, count)
                if not wait:
                    state = SessionState.of_namespace(rank_fingerprint, **options)
                    client_options["state"] = state
                client = OffloadClient(directory, **client_options)
                clients.append(opened.enter_context(client))
                if wait:
                    client.open_namespace(rank_fingerprint, **options)
            manager = cls(
                clients, events=events, pending_timeout=pending_timeout, replicated=replicated
            )
            manager._own_clients = opened.pop_all()
        return manager

    def wait_connected(self, timeout: float | None = None) -> None:
        """Return when all daemons are connected. Raises as OffloadClient.wait_connected."""
        for client in self._clients:
            assert isinstance(client, OffloadClient)
            client.wait_connected(timeout)

    @property
    def clients(self) -> tuple[NonBlockingClient, ...]:
        """The clients of the daemons, in the order of ranks."""
        return self._clients

    def poll(self) -> None:
        """Receive messages and advance a reconnect; lookup and take_events do it too."""
        for client in self._clients:
            client.poll()

    def abandon(self) -> None:
        """Abandon all sessions and reconnect; pins and pending resets are restored."""
        for client in self._clients:
            client.abandon()

    @property
    def num_blocks(self) -> int:
        """The number of keys that can be resident on all ranks."""
        return min(namespace.opened.num_blocks for namespace in self._namespaces)

    @property
    def usage(self) -> ResidencyUsage:
        ready = pending = 0
        for mirror in self._fresh_mirrors():
            ready += mirror.ready
            pending += mirror.pending
        blocks = sum(namespace.opened.num_blocks for namespace in self._namespaces)
        pinned = sum(namespace.pinned for namespace in self._namespaces)
        return ResidencyUsage(blocks, ready, pending, pinned)

    def lookup(self, key: OffloadKey) -> Lookup:
        """HIT, MISS, HIT_PENDING (it is being stored or verified) or RETRY (look it up again)."""
        found = self._find(key)
        if found is MISS and self.writers.count > 1:
            at_writer = self._find(key, self.writers.clients_of(key))
            found = MISS if at_writer is HIT else at_writer
        if found is HIT:
            self._uses.hits += 1
        elif found is MISS:
            self._uses.misses += 1
        return found

    @property
    def ready_keys(self) -> tuple[Set[OffloadKey], ...]:
        """For each rank, the keys that are a HIT. For callers with many lookups; see count_lookups.

        As old as the last call of any method, and valid until the next one. Do not change them.
        """
        return tuple([namespace.mirror.ready_keys for namespace in self._namespaces])

    @property
    def is_stored(self) -> Callable[[OffloadKey], bool]:
        """Whether a key is a HIT at all daemons that store it. Use it before the next call."""
        mirrors_of = self.writers.mirrors()
        return lambda key: all(key in mirror.ready_keys for mirror in mirrors_of(key))

    @property
    def hits(self) -> int:
        """How many lookups had this result so far."""
        return self._uses.hits

    @property
    def misses(self) -> int:
        """How many lookups had this result so far."""
        return self._uses.misses

    def count_lookups(self, hits: int, misses: int = 0) -> None:
        """Count lookups that the caller has answered from `ready_keys`."""
        self._uses.hits += hits
        self._uses.misses += misses

    @property
    def epochs(self) -> tuple[int, ...]:
        """For each rank, the epoch of its namespace: another one after each reset."""
        return tuple([namespace.epoch for namespace in self._namespaces])

    @property
    def reset_epochs(self) -> tuple[int, ...]:
        """For each rank, the epoch after the last reset of this manager; 0 before the first."""
        return tuple([namespace.reset_epoch for namespace in self._namespaces])

    def prepare_store(
        self, keys: Iterable[OffloadKey], epochs: Sequence[int] = ()
    ) -> PrepareStoreOutput | None:
        """Returns which of these keys to store; resident and pending keys are left out.

        epochs: `self.epochs` when the engine began to compute the request of these keys; empty:
        now. After a reset, blocks of an earlier epoch are not stored.

        The result has no keys if there is nothing to store, or while a daemon is disconnected. It
        is None if more keys are given than there are blocks. The worker stores the result's keys;
        call complete_store when its transfer has ended. Raises Refused (BAD_KEY).
        """
        keys = self._checked(dict.fromkeys(keys))
        if len(keys) > self.num_blocks:
            return None
        self.flush()
        present = (HIT, HIT_PENDING)
        clients_of = self.writers.clients_of
        lacking = self.writers.not_ready(keys)
        absent = tuple(key for key in lacking if self._find(key, clients_of(key)) not in present)
        wanted = () if self.gone else absent
        missing = set(absent)
        keep = tuple([key for key in keys if key not in missing]) if wanted else ()
        self._offered.update(wanted)
        if self._pending.since:
            self._pending.forget({*keys}.difference(lacking).union(wanted))
        specs = (
            KeyLoadStoreSpec(own, epoch, keep)
            for own, epoch in zip(self.writers.divide(wanted), epochs or self.epochs, strict=True)
        )
        return PrepareStoreOutput(wanted, tuple(specs), writers=self.writers.count)

    def is_storing(self, keys: Iterable[OffloadKey]) -> bool:
        """Whether prepare_store has returned one of these keys, and its store has not completed."""
        return not self._offered.isdisjoint(keys)

    def complete_store(self, keys: Iterable[OffloadKey], success: bool = True) -> None:
        """The transfer of these keys has ended. Calling it twice is harmless.

        `success` is ignored: the daemon knows the result. A key that it skipped, or whose store has
        failed, is a MISS again.
        """
        self._offered.difference_update(keys)

    def prepare_load(self, keys: Iterable[OffloadKey]) -> KeyLoadStoreSpec:
        """Pin these keys until complete_load; returns the worker's source spec, in their order.

        Raises Refused (KEY_ABSENT) if one of them is no HIT, or BAD_KEY; no key is pinned then.
        """
        keys = self._checked(keys)
        for mirror in self._fresh_mirrors():
            if missing := mirror.missing_keys(keys):
                raise Refused(
                    Code.KEY_ABSENT, "a key is no HIT; look it up before loading", missing.pop()
                )
        for client in self._clients:
            client.pin(keys)
        return KeyLoadStoreSpec(keys)

    def complete_load(self, keys: Iterable[OffloadKey]) -> None:
        """Unpin keys that prepare_load has pinned. Raises Refused (NOT_PINNED) for others."""
        keys = tuple(keys)
        for client in self._clients:
            client.unpin(keys)

    def prefetch(self, keys: Iterable[OffloadKey], compute_seconds: float = 0.0) -> Prefetch:
        """Have the daemons search for those keys below the host pool that are not in it.

        keys: of one request, in prefix order; call it when the request arrives, before its lookups.
        compute_seconds: the time in which the engine computes the tokens of one key. Keys are
        promoted only if that is expected to take longer; 0: all that tiers have is promoted.
        Returns at once; without siblings and tiers nothing is searched. Raises Refused (BAD_KEY).
        """
        keys = self._checked(keys)
        self.poll()
        if (absent := self.writers.first_absent(keys)) is None:
            return Prefetch()
        # Ranks that divide the keys read them in parallel.
        compute_seconds *= self.writers.count
        wanted = zip(self._clients, self.writers.divide(keys[absent:]), strict=True)
        return Prefetch(tuple(each.find_in_tiers(own, compute_seconds) for each, own in wanted))

    def touch(self, keys: Iterable[OffloadKey], new: int = 0) -> None:
        """Mark keys as used; the first becomes the most recent. Sent by `flush`, or if many.

        new: the last ones that no lookup was for, because they are of tokens that the engine has
        generated. The daemon counts the hits of pools of other sizes without them.
        """
        self._uses.touch(self._checked(keys), new)

    def spare(self, keys: Iterable[OffloadKey]) -> None:
        """Let the blocks of these keys be evicted first: see OffloadClient.spare. Sent by `flush`,
        after the touched keys."""
        self._uses.spare(self._checked(keys))

    def retain(
        self, keys: Iterable[OffloadKey], seconds: float, label: str = ""
    ) -> tuple[Retention, ...]:
        """Keep keys from eviction for a time: see OffloadClient.retain. Sent at once; one result
        per rank, each filled while the manager is polled."""
        wanted = self.writers.divide(self._checked(keys))
        return tuple(
            client.retain(own, seconds, label)
            for client, own in zip(self._clients, wanted, strict=True)
        )

    def release(self, keys: Iterable[OffloadKey], label: str = "") -> None:
        """Nobody will use these keys: see OffloadClient.release. Sent at once, after the touched
        keys, which would make them recent again."""
        self.flush()
        wanted = self.writers.divide(self._checked(keys))
        for client, own in zip(self._clients, wanted, strict=True):
            client.release(own, label)

    def keep(self, keys: Iterable[OffloadKey]) -> None:
        """The engine's GPU is about to overwrite the blocks of these keys: mark them as used,
        without counting it. Sent at once, the first ends up as the most recent."""
        wanted = self.writers.divide(self._checked(keys))
        for client, own in zip(self._clients, wanted, strict=True):
            client.touch(own, by_prompt=False)

    @property
    def is_shared(self) -> bool:
        """Whether others wait for what this engine stores, as of the last `prefetch`: a sibling has
        the namespace open, or a tier is shared with other hosts."""
        return any(namespace.is_shared for namespace in self._namespaces)

    def count_saved(self, tokens: int, seconds: float) -> None:
        """The load of some tokens begins. seconds: in which the engine computes so many; 0 if not
        known. A load that fails is counted, too."""
        self._uses.count_saved(tokens, seconds)

    def flush(self) -> None:
        """Send the touched keys, the numbers of hits and misses, and what loads saved.

        prepare_store and take_events do it too; prepare_load does not, because a request waits for
        it. Call it once per step of the engine.
        """
        self._uses.send()

    def take_events(self) -> list[OffloadingEvent]:
        """The keys that became a HIT, and those that ceased to be one, since the last call.

        The sum of all events is the set of keys that are a HIT now: the first call reports the keys
        that were resident before. Empty unless `events` is true.
        """
        self.flush()
        mirrors, stored_in = self._fresh_mirrors(), self.writers.mirrors()
        return self._events.take_events(mirrors, stored_in) if self._events is not None else []

    def reset_cache(self, label: str = "") -> None:
        """Remove all keys, without waiting. Until it is done, every lookup is a MISS. label: see
        OffloadClient.reset."""
        self._offered.clear()
        self._pending.since.clear()
        self._uses.forget_keys()
        for client in self._clients:
            if client.gone is None or client.connecting:
                client.reset_async(label)

    @property
    def is_resetting(self) -> bool:
        """Whether a daemon has not answered a reset yet: it may drop what is stored until then."""
        return any(namespace.pending_resets() for namespace in self._namespaces)

    @property
    def gone(self) -> Gone | None:
        """Why one of the daemons is not connected; None if all are."""
        return next((client.gone for client in self._clients if client.gone is not None), None)

    def close(self) -> None:
        """Send pending messages. Close the clients that `connect` created."""
        self.flush()
        self._own_clients.close()

    shutdown = close

    def __enter__(self) -> OffloadingManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _checked(self, keys: Iterable[OffloadKey]) -> tuple[OffloadKey, ...]:
        """`keys` as a tuple. Raises Refused (BAD_KEY)."""
        return self._namespaces[0].checked_keys(keys)

    def _find(self, key: OffloadKey, clients: Sequence[NonBlockingClient] = ()) -> Lookup:
        """At some ranks' daemons; at all if none are given."""
        found = HIT
        for client in clients or self._clients:
            here = client.lookup(key)
            if here is MISS:
                self._pending.since.pop(key, None)
                return HIT_PENDING if key in self._offered and not self.gone else MISS
            if here is not HIT and found is not RETRY:
                found = here
        if found is HIT_PENDING and key not in self._offered:
            return HIT_PENDING if self._pending.is_recent(key) else MISS
        if self._pending.since:
            self._pending.since.pop(key, None)
        return found

    def _fresh_mirrors(self) -> list[Mirror]:
        self.poll()
        return [namespace.mirror for namespace in self._namespaces]


def _rank_fingerprint(fingerprint: Fingerprint, rank: int, ranks: int) -> Fingerprint:
    if ranks == 1:
        return fingerprint
    return msgspec.structs.replace(fingerprint, rank=rank, world_size=ranks)
