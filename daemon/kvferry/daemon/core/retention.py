"""The retained keys of one namespace: held until a deadline, within shares of the namespace.

    Retain      an entry of (session, label, key) holds the block that the key has now
    again       its deadline is extended; if the key has another block, that one is held
    end         deadline, Release, reset, end of the session, or an operator

Blocks are held as pins are (session_pins.py), so neither a policy nor `spare` evicts them.
Deadlines are whole seconds, so that entries which end together are in one set. Event loop only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import ceil
from typing import NamedTuple

from kvferry.daemon.core.cache.cache import Cache
from kvferry.proto.keys import OffloadKey

# Shares of a namespace's blocks that are retained at most: of all engines, of one, of a label.
ALL_SHARE, ENGINE_SHARE, LABEL_SHARE = 1 / 2, 1 / 4, 1 / 16
# Entries of an engine per block of its share: labels may retain the same blocks.
ENTRIES_OF_A_BLOCK = 4
# Entries that end without a break. More take longer than 10 ms.
SOME = 1 << 12


class Owner(NamedTuple):
    engine: str
    session: str
    label: str


class RetainCounts(NamedTuple):
    """Distinct keys of a Retain: see Retained."""

    kept: int
    missing: int
    clipped: int


@dataclass(eq=False, slots=True)
class _Entry:
    """block: -1 after its end. due: time.monotonic() in whole seconds."""

    owner: Owner
    key: OffloadKey
    block: int
    due: int


class RetainedBlocks:
    """The retained keys of a namespace whose blocks are in `cache`."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        blocks = cache.usage.capacity
        self._all, self._of_engine, self._of_label = (
            max(1, int(share * blocks)) for share in (ALL_SHARE, ENGINE_SHARE, LABEL_SHARE)
        )
        # Counters of NamespaceStatus, by field.
        self.counts: Counter[str] = Counter()
        self._start()

    def _start(self) -> None:
        self._entries: dict[Owner, dict[OffloadKey, _Entry]] = {}
        # Entries by deadline, and the deadlines: each of these is in the heap once.
        self._due: dict[int, dict[_Entry, None]] = {}
        self._heap: list[int] = []
        # Entries of each block, of the whole namespace and of each engine; entries of each engine.
        self._blocks: Counter[int] = Counter()
        self._engine_blocks: dict[str, Counter[int]] = {}
        self._engine_entries: Counter[str] = Counter()
        # Entries that have ended, and whose blocks are still held.
        self._ending: list[dict[OffloadKey, _Entry]] = []

    def __len__(self) -> int:
        """The number of distinct blocks."""
        return len(self._blocks)

    @property
    def deadline(self) -> int | None:
        """The time of the next `expire`, if any."""
        return self._heap[0] if self._heap else None

    def retain(
        self, owner: Owner, keys: Sequence[OffloadKey], seconds: float, now: float
    ) -> RetainCounts:
        """Hold the blocks of the loadable keys; the first ones, if a share does not have room."""
        distinct, due = tuple(dict.fromkeys(keys)), ceil(now + seconds)
        entries = self._entries.setdefault(owner, {})
        kept = missing = clipped = 0
        surplus = []
        for key, block in zip(distinct, self._cache.pin_loadable(distinct), strict=True):
            entry = entries.get(key)
            if block < 0:
                missing += 1
            elif entry is not None and entry.block == block:
                surplus.append(block)
                self._extend(entry, due)
                kept += 1
            elif not clipped and self._has_room(owner, block, len(entries)):
                if entry is not None:  # the key had another block
                    surplus.append(self._end(entry))
                entries[key] = self._add(_Entry(owner, key, block, due))
                kept += 1
            else:
                surplus.append(block)
                clipped += 1
        if not entries:
            del self._entries[owner]
        self._cache.unpin_blocks(surplus)
        self.counts["hints_accepted"] += kept
        self.counts["hints_missing"] += missing
        self.counts["hints_clipped"] += clipped
        return RetainCounts(kept, missing, clipped)

    def release(self, owner: Owner, keys: Iterable[OffloadKey]) -> None:
        """End the entries of these keys."""
        entries = self._entries.get(owner, {})
        ended = [entries.pop(key) for key in dict.fromkeys(keys) if key in entries]
        self._cache.unpin_blocks([self._end(entry) for entry in ended])
        if not entries:
            self._entries.pop(owner, None)

    def end_session(self, session: str) -> None:
        """End the entries of a session; `free_some` releases their blocks."""
        self._end_owners([owner for owner in self._entries if owner.session == session])

    def end_label(self, label: str | None) -> int:
        """End the entries of a label, or all; `free_some` releases their blocks. Returns the number
        of blocks that are no longer retained."""
        owners = [owner for owner in self._entries if label in (None, owner.label)]
        ended = Counter(e.block for owner in owners for e in self._entries[owner].values())
        self._end_owners(owners)
        return sum(self._blocks[block] == entries for block, entries in ended.items())

    def free_some(self) -> bool:
        """Release some blocks of entries that have ended. Return whether any are left."""
        blocks = list[int]()
        while self._ending and len(blocks) < SOME:
            if self._ending[-1]:
                blocks.append(self._end(self._ending[-1].popitem()[1]))
            else:
                self._ending.pop()
        self._cache.unpin_blocks([block for block in blocks if block >= 0])
        return bool(self._ending)

    def expire(self, now: float) -> None:
        """End the entries whose time is over, SOME at a time: call it again at `deadline`."""
        blocks = list[int]()
        while self._heap and self._heap[0] <= now and len(blocks) < SOME:
            entries = self._due.get(self._heap[0])
            if not entries:
                self._due.pop(heappop(self._heap), None)
                continue
            entry = next(iter(entries))
            blocks.append(self._end(entry))
            its = self._entries.get(entry.owner, {})
            if its.get(entry.key) is entry:
                del its[entry.key]
                if not its:
                    del self._entries[entry.owner]
        self._cache.unpin_blocks(blocks)

    def clear(self) -> None:
        """End all entries: the namespace was reset."""
        self._cache.unpin_blocks([entry.block for due in self._due.values() for entry in due])
        self._start()

    def fields(self) -> dict[str, int]:
        """Of NamespaceStatus."""
        return {"retained": len(self), **self.counts}

    def check_integrity(self) -> None:
        """Raise AssertionError if the state is inconsistent. Slow, for tests."""
        entries = [entry for due in self._due.values() for entry in due]
        assert Counter(entry.block for entry in entries) == self._blocks, "blocks are counted wrong"
        assert Counter(e.owner.engine for e in entries) == self._engine_entries
        assert {*self._due} == {*self._heap}, "a deadline is missing"

    def _has_room(self, owner: Owner, block: int, entries: int) -> bool:
        """Whether an owner with so many entries may have another one, of this block."""
        engine = owner.engine
        own = self._engine_blocks.get(engine, ())
        return (
            (not owner.label or entries < self._of_label)
            and self._engine_entries[engine] < ENTRIES_OF_A_BLOCK * self._of_engine
            and (block in own or len(own) < self._of_engine)
            and (block in self._blocks or len(self._blocks) < self._all)
        )

    def _add(self, entry: _Entry) -> _Entry:
        engine = entry.owner.engine
        self._blocks[entry.block] += 1
        self._engine_blocks.setdefault(engine, Counter())[entry.block] += 1
        self._engine_entries[engine] += 1
        self._schedule(entry)
        return entry

    def _schedule(self, entry: _Entry) -> None:
        if entry.due not in self._due:
            self._due[entry.due] = {}
            heappush(self._heap, entry.due)
        self._due[entry.due][entry] = None

    def _extend(self, entry: _Entry, due: int) -> None:
        if due > entry.due:
            del self._due[entry.due][entry]
            entry.due = due
            self._schedule(entry)

    def _end_owners(self, owners: Iterable[Owner]) -> None:
        self._ending += [self._entries.pop(owner) for owner in owners]

    def _end(self, entry: _Entry) -> int:
        """Forget an entry. Returns the block to be unpinned; -1 if it has ended before."""
        block, entry.block = entry.block, -1
        if block < 0:
            return block
        del self._due[entry.due][entry]
        engine = entry.owner.engine
        own = self._engine_blocks[engine]
        for blocks in (self._blocks, own):
            blocks[block] -= 1
            if not blocks[block]:
                del blocks[block]
        self._engine_entries[engine] -= 1
        if not own:
            del self._engine_blocks[engine], self._engine_entries[engine]
        return block
