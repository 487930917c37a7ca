"""Which ranks' daemons store a key.

Ranks that hold different bytes all store each key. If all hold the same bytes (*replicated*), and
their daemons leave out what a sibling has, each key has one writer. The daemons of the other ranks
look for it at that of the writer when it is looked up, to load it from there. Used by
OffloadingManager, in its thread.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from kvferry.client.mirror import HIT, MISS, Mirror
from kvferry.client.nonblocking import NonBlockingClient
from kvferry.proto.keys import OffloadKey

MirrorsOf: TypeAlias = Callable[[OffloadKey], Sequence[Mirror]]

# Requests in a row of which a rank did not find a key that its writer has, until all ranks store
# all keys, and for how many seconds.
FAILURES, RETRY_SECONDS = 3, 60.0


def writer_of(key: OffloadKey, ranks: int) -> int:
    """The rank that stores this key. The same in all processes."""
    return zlib.crc32(key) % ranks


class Writers:
    """clients: of the ranks' daemons. replicated: whether all ranks hold the same bytes."""

    def __init__(
        self, clients: Sequence[NonBlockingClient], clock: Callable[[], float], *, replicated: bool
    ) -> None:
        self._clients, self._clock = tuple(clients), clock
        self._replicated = replicated and len(self._clients) > 1
        # All ranks store all keys until then.
        self._stores_all_until = -math.inf
        self._failures = 0

    @property
    def count(self) -> int:
        """The ranks among which the keys are divided. 1: each rank stores all keys."""
        if not self._replicated or self._clock() < self._stores_all_until:
            return 1
        once = all(client.namespace.opened.stores_once for client in self._clients)
        return len(self._clients) if once else 1

    def clients_of(self, key: OffloadKey) -> Sequence[NonBlockingClient]:
        """Those whose daemons store this key."""
        count = self.count
        return self._clients if count == 1 else (self._clients[writer_of(key, count)],)

    def mirrors(self) -> MirrorsOf:
        """A function that returns the mirrors of the daemons that store a key. Use it at once."""
        count, mirrors = self.count, [client.namespace.mirror for client in self._clients]
        if count == 1:
            return lambda _: mirrors
        return lambda key: (mirrors[writer_of(key, count)],)

    def first_absent(self, keys: tuple[OffloadKey, ...]) -> int | None:
        """The index of the first key that a daemon lacks which stores it."""
        of = self.mirrors()
        for key in self.not_ready(keys):
            if any(mirror.lookup(key) is MISS for mirror in of(key)):
                return keys.index(key)
        return None

    def not_ready(self, keys: tuple[OffloadKey, ...]) -> tuple[OffloadKey, ...]:
        """Keys without most of those that are a HIT at all daemons that store them.

        A prompt that a cache serves may have thousands of such keys.
        """
        if self.count > 1:
            return keys
        missing = [client.namespace.mirror.missing_keys(keys) for client in self._clients]
        lacking = set().union(*missing)
        return tuple(key for key in keys if key in lacking) if lacking else ()

    def divide(self, keys: tuple[OffloadKey, ...]) -> list[tuple[OffloadKey, ...]]:
        """For each rank, those of these keys that its daemon stores."""
        count = self.count
        if count == 1:
            return [keys] * len(self._clients)
        own: list[list[OffloadKey]] = [[] for _ in self._clients]
        for key in keys:
            own[writer_of(key, count)].append(key)
        return [tuple(each) for each in own]

    # Keys that only their writer has

    def is_at_writer(self, key: OffloadKey) -> bool:
        """Whether a key has one writer, and is a HIT there; other ranks may miss it."""
        if self.count == 1 or any(client.gone is not None for client in self._clients):
            return False
        return self.mirrors()(key)[0].lookup(key) is HIT

    def search_writers(self, keys: Iterable[OffloadKey], compute_seconds: float = 0.0) -> None:
        """Have each rank search its siblings for those keys that it lacks, without waiting.

        Arguments: see OffloadingManager.prefetch. Until a daemon has answered, keys are a RETRY.
        """
        keys = tuple(keys)
        for client in self._clients:
            client.find_in_tiers(keys, compute_seconds)

    def end_search(self, *, found: bool) -> None:
        """A request loads after a search, or a rank did not find a key that its writer has."""
        self._failures = 0 if found else self._failures + 1
        if self._failures >= FAILURES:
            self._failures, self._stores_all_until = 0, self._clock() + RETRY_SECONDS
