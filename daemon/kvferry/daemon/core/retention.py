"""The retained keys of one namespace: held until a deadline, within shares of the namespace.

An entry of (owner, key) holds the block that the key has, as a pin does (session_pins.py): neither
a policy nor `spare` evicts it. There are at most MAX_ENTRIES, so to look at all of them takes some
milliseconds. Event loop only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from kvferry.daemon.core.cache.cache import Cache
from kvferry.proto.keys import OffloadKey

# Shares of a namespace's blocks that are retained at most: of all engines, of one, of a label.
ALL_SHARE, ENGINE_SHARE, LABEL_SHARE = 1 / 2, 1 / 4, 1 / 16
# Of a namespace: 32 GiB in blocks of 2 MiB. Labels may retain the same block.
MAX_ENTRIES = 1 << 14
# Seconds between two looks for entries whose time is over.
LOOK_EVERY = 1.0


class Owner(NamedTuple):
    engine: str
    session: str
    label: str


class RetainCounts(NamedTuple):
    """Distinct keys of a Retain: see Retained."""

    kept: int
    missing: int
    clipped: int


class RetainedBlocks:
    """The retained keys of a namespace whose blocks are in `cache`.

    deadline: the time of the next `expire`, if any.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        blocks = cache.usage.capacity
        self._all, self._of_engine, self._of_label = (
            max(1, int(share * blocks)) for share in (ALL_SHARE, ENGINE_SHARE, LABEL_SHARE)
        )
        # Counters of NamespaceStatus, by field.
        self.counts: Counter[str] = Counter()
        self.deadline: float | None = None
        # For each key its block, and when its time is over.
        self._entries: dict[Owner, dict[OffloadKey, tuple[int, float]]] = {}

    def blocks(self, which: Callable[[Owner], bool] = lambda _: True) -> set[int]:
        """The distinct blocks of the owners for which `which` is true."""
        owners = filter(which, self._entries)
        return {block for owner in owners for block, _ in self._entries[owner].values()}

    def retain(
        self, owner: Owner, keys: Sequence[OffloadKey], seconds: float, now: float
    ) -> RetainCounts:
        """Hold the blocks of the loadable keys; the first ones, if a share does not have room."""
        distinct = tuple(dict.fromkeys(keys))
        everyone, own = self.blocks(), self.blocks(lambda other: other.engine == owner.engine)
        room = MAX_ENTRIES - sum(map(len, self._entries.values()))
        entries = self._entries.setdefault(owner, {})
        if owner.label:
            room = min(room, self._of_label - len(entries))
        kept = missing = clipped = 0
        surplus = list[int]()
        for key, block in zip(distinct, self._cache.pin_loadable(distinct), strict=True):
            held, due = entries.get(key, (-1, 0.0))
            fits = (block in own or len(own) < self._of_engine) and (
                block in everyone or len(everyone) < self._all
            )
            if block < 0:
                missing += 1
            elif block == held or (not clipped and room > 0 and fits):
                room -= held < 0
                if held >= 0:  # held once more; or the key had another block
                    surplus.append(held)
                entries[key] = block, max(due, now + seconds)
                own.add(block)
                everyone.add(block)
                kept += 1
            else:
                surplus.append(block)
                clipped += 1
        self._cache.unpin_blocks(surplus)
        if not entries:
            del self._entries[owner]
        if self._entries and self.deadline is None:
            self.deadline = now + LOOK_EVERY
        self.counts.update(hints_accepted=kept, hints_missing=missing, hints_clipped=clipped)
        return RetainCounts(kept, missing, clipped)

    def release(self, owner: Owner, keys: Iterable[OffloadKey]) -> None:
        """End the entries of these keys."""
        entries = self._entries.get(owner, {})
        ended = [entries.pop(key)[0] for key in dict.fromkeys(keys) if key in entries]
        self._cache.unpin_blocks(ended)
        if not entries:
            self._entries.pop(owner, None)

    def end(self, which: Callable[[Owner], bool] = lambda _: True) -> int:
        """End the entries of the owners for which `which` is true. Returns the number of blocks
        that are no longer retained."""
        before = len(self.blocks())
        ended = [self._entries.pop(owner) for owner in [*filter(which, self._entries)]]
        self._cache.unpin_blocks([block for each in ended for block, _ in each.values()])
        return before - len(self.blocks())

    def expire(self, now: float) -> None:
        """End the entries whose time is over: up to LOOK_EVERY late."""
        if self.deadline is None or now < self.deadline:
            return
        for owner, entries in [*self._entries.items()]:
            self.release(owner, [key for key, (_, due) in entries.items() if due <= now])
        self.deadline = now + LOOK_EVERY if self._entries else None

    def fields(self) -> dict[str, int]:
        """Of NamespaceStatus."""
        return {"retained": len(self.blocks()), **self.counts}
