"""RequestState: what the scheduler's side knows of one request. Used in the scheduler's thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from kvferry.client.engines.search_answers import wait_answer
from kvferry.client.tier_searches import Prefetch
from kvferry.client.writers import Writers
from kvferry.proto.keys import Lookup, OffloadKey

# Seconds in which ranks search again for a key that its writer has: their daemons may not know it
# yet, or may not have mapped the writer's memory yet.
SEARCH_SECONDS = 0.1

Keys: TypeAlias = tuple[OffloadKey, ...]


@dataclass(slots=True)
class RequestState:
    """A request that looks keys up. since: time of its first lookup. loads: loads so far.

    touched: time of the last touch, by the last key of the list and its length. prefetch: of its
    keys below the host pool. found_below: what it found. keys, seconds: see `request_arrived`.
    computing: seconds that the engine takes to compute all of them, 0 if not known. searched: the
    first keys of the searches at writers, and when each began. search_failed: whether one of these
    keys was not found in time. has_waited: see `wait_search`.
    """

    since: float = 0.0
    loads: int = 0
    touched: dict[tuple[OffloadKey, int], float] = field(default_factory=dict)
    prefetch: Prefetch = field(default_factory=Prefetch)
    found_below: frozenset[OffloadKey] | None = None
    keys: Keys = ()
    seconds: float = 0.0
    computing: float = 0.0
    searched: dict[OffloadKey, float] = field(default_factory=dict)
    search_failed: bool = False
    has_waited: bool = False

    def should_touch(self, keys: Sequence[OffloadKey], interval: float) -> bool:
        """False if these keys were touched within `interval`. A key identifies its prefix."""
        now, prefix = time.monotonic(), (keys[-1], len(keys))
        if now - self.touched.get(prefix, 0.0) < interval:
            return False
        self.touched = {old: t for old, t in self.touched.items() if now - t < interval}
        self.touched[prefix] = now
        return True

    def waits(self, longest: float, shortest: float) -> bool:
        """Whether the request still waits for pending keys: as long as computing its keys takes,
        within these bounds in seconds. Waiting in vain at most doubles its time, or costs
        `shortest`; `longest` if the time is not known."""
        seconds = min(longest, max(shortest, self.computing)) if self.computing else longest
        return time.monotonic() - self.since <= seconds

    def wait_search(self, poll: Callable[[], None]) -> bool:
        """Wait for the answer to the request's search, for at most ANSWER_SECONDS and once. Returns
        whether it came. poll: receives messages."""
        if self.has_waited or self.prefetch.done:
            return False
        self.has_waited = True
        return wait_answer(self.prefetch, poll)

    def search_writers(self, writers: Writers, key: OffloadKey) -> Lookup:
        """Let the ranks search for this key and the next ones; a MISS if not found in time."""
        now = time.monotonic()
        if now - self.searched.setdefault(key, now) > SEARCH_SECONDS:
            if not self.search_failed:  # vLLM may look the keys up in many steps
                self.search_failed = True
                writers.end_search(found=False)
            return Lookup.MISS
        first = self.keys.index(key) if key in self.keys else len(self.keys)
        writers.search_writers(self.keys[first:] or (key,), self.seconds)
        return Lookup.RETRY
