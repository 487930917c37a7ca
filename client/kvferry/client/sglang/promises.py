"""What lookups have promised to requests: keys that the daemon holds until the request loads them.

SGLang ends a request whose load fails. So a lookup counts only keys that the daemon has confirmed
to hold: it waits for the answer, 0.3 ms. It is repeated while the request waits to be scheduled,
then nothing is asked again unless more has been found. SGLang does not say when a request that has
been promised something ends without loading it, so a promise ends by itself.

If keys are not in host memory, the first lookup of a request has the daemon search siblings and
tiers, and waits shortly for the answer. What tiers have is promoted for the next lookups. Used in
the scheduler's thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile

from kvferry.client.blocking import OffloadClient
from kvferry.client.engines.search_answers import wait_answer
from kvferry.client.manager import OffloadingManager
from kvferry.client.sglang.restorable import Window, restorable_lengths
from kvferry.proto.errors import KVFerryError
from kvferry.proto.keys import OffloadKey

log = logging.getLogger("kvferry")

PageKeys = tuple[OffloadKey, ...]
# Seconds for which a request's keys are held that does not look them up again. A request that waits
# to be scheduled is looked up in each step.
PROMISE_SECONDS = 10.0
# Seconds that a lookup waits for the daemon to hold its keys. If it does not answer in time, all
# lookups are a miss for SILENT_SECONDS, so that a daemon that is stopped does not stop the server.
HOLD_SECONDS, SILENT_SECONDS = 0.25, 2.0


@dataclass(slots=True)
class Promise:
    """What one request was promised: restorable lengths, in pages, by keys that are held.

    since: its last lookup. held_by: see Promises._holder. seen: the last key of the lookup that was
    counted.
    """

    since: float
    keys: PageKeys = ()
    lengths: list[int] = field(default_factory=list)
    held_by: tuple[int, ...] = ()
    seen: OffloadKey = b""


class Promises:
    """The promises of one rank, whose client has the namespace of the manager. clock: for tests."""

    def __init__(
        self,
        client: OffloadClient,
        manager: OffloadingManager,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client, self._manager, self._clock = client, manager, clock
        # By request, the one that was looked up longest ago first; and those that load.
        self._promises: dict[str, Promise] = {}
        self._claimed: dict[str, Promise] = {}
        self._silent_until = 0.0

    def lookup(
        self, rid: str, pages: Sequence[PageKeys], windows: Sequence[tuple[Sequence[PageKeys], int]]
    ) -> list[int]:
        """The lengths, in pages, of all prefixes that can be restored; each is held until `claim`.

        pages: the keys of each page of the full attention layers, the first one that the GPU lacks
        first. windows: for each other source the keys of the same pages, and how many of the last
        ones a prefix needs.
        """
        now = self._clock()
        self._manager.poll()
        promise = self._promises.pop(rid, None) or Promise(now)
        self._promises[rid] = promise
        promise.since = now
        self.expire(now)
        if self._client.gone is not None or now < self._silent_until or not pages:
            return []
        found, keys = self._find(pages, windows)
        if promise.seen != pages[-1][-1]:
            promise.seen = pages[-1][-1]
            self._note_use(pages, longest := found[-1] if found else 0)
            if longest < len(pages) and self._search(pages[longest:], windows):
                found, keys = self._find(pages, windows)
        if (keys, self._holder) != (promise.keys, promise.held_by):
            self._release(promise)
            self._hold(promise, found, keys, groups=len(pages[0]), exact=bool(windows))
        return promise.lengths

    def claim(self, rid: str) -> bool:
        """A request loads what it was promised. Returns whether it is held; then `done` must
        follow."""
        promise = self._promises.pop(rid, None)
        if promise is None or not promise.lengths:
            return False
        if promise.held_by != self._holder or self._client.gone is not None:
            self._release(promise)
            return False
        self._claimed[rid] = promise
        return True

    def done(self, rid: str) -> None:
        """The load has ended."""
        if (promise := self._claimed.pop(rid, None)) is not None:
            self._release(promise)

    def expire(self, now: float) -> None:
        """End the promises of requests that have not looked up for PROMISE_SECONDS."""
        late = takewhile(lambda one: now - one[1].since > PROMISE_SECONDS, self._promises.items())
        for rid, promise in [*late]:
            del self._promises[rid]
            self._release(promise)

    def end_all(self) -> None:
        for promise in (*self._promises.values(), *self._claimed.values()):
            self._release(promise)
        self._promises.clear()
        self._claimed.clear()

    @property
    def _holder(self) -> tuple[int, ...]:
        """The session that holds keys, and the epoch of what it holds: a reset empties it."""
        return (self._client.incarnation, *self._manager.epochs)

    def _find(
        self, pages: Sequence[PageKeys], windows: Sequence[tuple[Sequence[PageKeys], int]]
    ) -> tuple[list[int], PageKeys]:
        """The restorable lengths, by the mirror, and the keys that they need."""
        (ready,) = self._manager.ready_keys
        count = sum(1 for _ in takewhile(lambda page: all(map(ready.__contains__, page)), pages))
        others = [
            Window([all(map(ready.__contains__, page)) for page in keys[:count]], needed)
            for keys, needed in windows
        ]
        lengths = restorable_lengths(count, others)
        if not lengths:
            return [], ()
        wanted = [key for page in pages[: lengths[-1]] for key in page]
        for keys, needed in windows:
            ends = {at for n in lengths for at in range(max(0, n - needed), n)}
            wanted += [key for at in sorted(ends) for key in keys[at]]
        return lengths, tuple(wanted)

    def _hold(
        self, promise: Promise, lengths: list[int], keys: PageKeys, *, groups: int, exact: bool
    ) -> None:
        """Have the daemon hold keys. exact: whether a part of them is worth nothing."""
        if not keys:
            return
        holder = self._holder
        try:
            held = self._client.hold(keys, timeout=HOLD_SECONDS)
        except KVFerryError as error:
            log.debug("kvferry: a lookup is a miss: %s", error)
            self._silent_until = self._clock() + SILENT_SECONDS
            return
        if held < len(keys):  # evicted meanwhile
            lengths = [] if exact else [n for n in lengths if n * groups <= held]
        promise.keys, promise.lengths = keys, lengths
        promise.held_by = holder
        if not lengths:
            self._release(promise)

    def _release(self, promise: Promise) -> None:
        if promise.keys:
            with suppress(KVFerryError):
                self._client.unpin(promise.keys)
        promise.keys, promise.lengths = (), []

    def _search(
        self, pages: Sequence[PageKeys], windows: Sequence[tuple[Sequence[PageKeys], int]]
    ) -> bool:
        """Search siblings and tiers. Returns whether they answer in time."""
        if not self._client.namespace.opened.tiers:
            return False
        keys = [key for page in pages for key in page]
        for others, _ in windows:
            keys += [key for page in others for key in page]
        return wait_answer(self._manager.prefetch(keys), self._manager.poll)

    def _note_use(self, pages: Sequence[PageKeys], found: int) -> None:
        """Count what a request has looked up, and mark it as used."""
        keys = [key for page in pages for key in page]
        groups = len(pages[0])
        self._manager.count_lookups(found * groups, len(keys) - found * groups)
        self._manager.touch(keys)
