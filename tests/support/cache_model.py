"""A cache and a simple model of it, after semantics.md: lists, loops, and one key at a time.

CacheModel predicts every answer of the cache: which keys are stored and evicted, the counters, and
which blocks may be used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import pytest

from kvferry.daemon.core.block_table import BlockTable
from kvferry.daemon.core.cache.cache import Cache
from kvferry.daemon.core.cache.cache_events import CacheEvent
from kvferry.daemon.core.cache.jobs import Pins, Reservation
from kvferry.proto.errors import Code, Refused
from kvferry.proto.keys import EventKind, Lookup
from support.cached_keys import entries_of, find_key, pending_keys, ready_keys
from support.committed_blocks import commit_all, next_table
from support.plain_policies import PLAIN

PENDING, READY = "pending", "ready"
KEY_BYTES, SUB_BLOCKS = 1, 4


class ModelCacheJob(NamedTuple):
    """A store or a load in flight. epoch: the number of resets before it."""

    handle: Reservation | Pins
    epoch: int


class TierJob:
    """Blocks that a tier writes into (a promotion: `tier` is None) or reads (a write)."""

    def __init__(self, tier: int | None, keys: list[bytes], blocks: Any, epoch: int) -> None:
        self.tier, self.keys, self.blocks, self.epoch = tier, keys, blocks, epoch
        self.promotes = tier is None
        self.holds: dict[bytes, int] = dict(zip(keys, blocks.tolist(), strict=True))
        # Only for a promotion: it has ended, and its blocks are not released yet.
        self.ended = False


class CacheModelState:
    """A cache, and the state that the model expects of it."""

    def __init__(self, policy: str, capacity: int, threshold: int) -> None:
        self.policy_name, self.capacity, self.threshold = policy, capacity, threshold
        self.epoch = 0
        self.start()

    def start(self, table: BlockTable | None = None) -> None:
        """Start a daemon. table: that of the earlier daemon."""
        table = table or BlockTable(self.capacity, KEY_BYTES)
        self.cache = Cache(self.capacity, self.policy_name, self.threshold, (1, 1), table)
        self.policy = PLAIN[self.policy_name](self.capacity)
        # Evicted before the others, the first one in front.
        self.spare: list[bytes] = []
        self.state: dict[bytes, str] = {}
        # In the order in which they were stored.
        self.block_of: dict[bytes, int] = {}
        # The sub-blocks of ready keys that are stored in part.
        self.parts: dict[bytes, tuple[int, int]] = {}
        # Ready keys that an earlier daemon stored.
        self.unverified: set[bytes] = set()
        self.jobs: list[ModelCacheJob] = []
        self.ended: list[ModelCacheJob] = []
        self.tier_jobs: list[TierJob] = []
        # For each tier, the keys whose blocks are in it or are being written.
        self.in_tier: list[set[bytes]] = [set(), set()]
        self.offers: Counter[bytes] = Counter()
        self.counts: Counter[str] = Counter()
        self.mirror: dict[bytes, str] = {}

    # Expected state

    def keys_that_are(self, state: str) -> set[bytes]:
        return {key for key, s in self.state.items() if s == state}

    def hits(self) -> set[bytes]:
        return self.keys_that_are(READY) - self.parts.keys() - self.unverified

    def hit_pending(self) -> set[bytes]:
        return self.keys_that_are(PENDING) | (self.unverified - self.parts.keys())

    def forget(self, key: bytes) -> None:
        """Make a key absent."""
        del self.state[key], self.block_of[key]
        if key in self.spare:
            self.spare.remove(key)
        self.parts.pop(key, None)
        self.unverified.discard(key)
        for keys in self.in_tier:
            keys.discard(key)

    def stored_again(self, key: bytes, parts: dict[bytes, tuple[int, int]]) -> bool:
        if self.state.get(key) != READY or key in self.pinned():
            return False
        all_subs = (0, SUB_BLOCKS)
        new, old = (set(range(*p.get(key, all_subs))) for p in (parts, self.parts))
        return key in self.unverified or new > old

    def pinned(self) -> set[bytes]:
        held = {b for j in self.jobs if isinstance(j.handle, Pins) for b in j.handle.blocks}
        held |= self.held_by_tiers()
        held -= {self.block_of[key] for key in self.keys_that_are(PENDING)}
        return {key for key, block in self.block_of.items() if block in held}

    def orphaned(self) -> set[int]:
        held = {b for j in self.jobs for b in j.handle.blocks} | self.held_by_tiers()
        return held - set(self.block_of.values())

    def held_by_tiers(self) -> set[int]:
        return {block for job in self.tier_jobs for block in job.holds.values()}

    def free(self) -> int:
        return self.capacity - len(self.block_of) - len(self.orphaned())


class CacheModel(CacheModelState):
    """Steps that compare the cache's answers with the model, and checks after a step."""

    # Steps

    def offer(
        self, keys: list[bytes], parts: dict[bytes, tuple[int, int]], keep: list[bytes]
    ) -> None:
        replaced = {key for key in keys if self.stored_again(key, parts)}
        known = self.state.keys() - replaced
        absent = [key for key in dict.fromkeys(keys) if key not in known]
        self.offers.update(absent)
        wanted = [key for key in absent if self.offers[key] >= self.threshold]
        replaced &= set(wanted)
        self.counts["stores_skipped"] += len(absent) - len(wanted)
        movable = self.keys_that_are(READY) - self.pinned() - {*keys, *keep}
        free, used = self.free() + len(replaced), {*self.block_of.values(), *self.orphaned()}
        answer = self.cache.prepare_store(keys, parts, keep)
        if len(wanted) > free + len(movable) and wanted:
            assert answer is None
            self.counts["stores_skipped"] += len(wanted)
            return
        assert answer is not None
        assert list(answer.keys) == wanted
        assert answer.parts == {key: parts[key] for key in wanted if key in parts}
        used -= {self.block_of[key] for key in replaced}
        for key in replaced:
            self.policy.forget(key)
            self.forget(key)
        expected = self.admit(wanted, free, movable) if wanted else []
        assert list(answer.evicted) == expected
        assert len(set(answer.blocks)) == len(wanted)
        assert set(answer.blocks) <= set(range(self.capacity))
        assert not set(answer.blocks) & (used - {self.block_of[key] for key in expected})
        for key in expected:
            self.forget(key)
        self.counts["evictions"] += len(expected)
        self.state.update(dict.fromkeys(wanted, PENDING))
        self.block_of.update(zip(answer.keys, answer.blocks, strict=True))
        self.jobs.append(ModelCacheJob(answer, self.epoch))

    def admit(self, keys: list[bytes], free: int, movable: set[bytes]) -> list[bytes]:
        """The victims for these keys, the spare ones first."""
        spare = [key for key in self.spare if key in movable][: max(0, len(keys) - free)]
        for key in spare:
            self.policy.forget(key)
        return spare + self.policy.admit(keys, free + len(spare), lambda key: key in movable)

    def ending(self, kind: type, which: int) -> Any:
        """Remove a job of this kind from those in flight; None if there is none."""
        jobs = [job for job in self.jobs if isinstance(job.handle, kind)]
        if not jobs:
            return None
        job = jobs[which % len(jobs)]
        self.jobs.remove(job)
        self.ended.append(job)
        return job

    def end_store(self, which: int, success: bool, lost: int = 0) -> None:
        """lost: how many of its keys, from the first on, a store that succeeds does not store."""
        job = self.ending(Reservation, which)
        if job is None:
            return
        keys = job.handle.keys
        stored = keys[lost:] if success else ()
        self.cache.complete_store(job.handle, success, np.array(job.handle.blocks[:lost], np.int64))
        if job.epoch < self.epoch:
            return
        self.state.update(dict.fromkeys(stored, READY))
        self.parts.update({key: part for key, part in job.handle.parts.items() if key in stored})
        self.counts["stored"] += len(stored)
        if success:
            self.counts["stores_unpackable"] += min(lost, len(keys))
        for key in keys:
            if key not in stored:
                self.policy.forget(key)
                self.forget(key)

    def promote(self, keys: list[bytes]) -> None:
        absent = [key for key in dict.fromkeys(keys) if key not in self.state]
        movable = self.keys_that_are(READY) - self.pinned() - {*keys}
        free, used = self.free(), {*self.block_of.values(), *self.orphaned()}
        fitting = absent[: free + len(movable)]
        blocks = self.cache.tier_access.prepare_promotion(absent, keys)
        assert blocks.size == len(fitting)
        if not fitting:
            return
        evicted = self.admit(fitting, free, movable)
        assert not set(blocks.tolist()) & (used - {self.block_of[key] for key in evicted})
        for key in evicted:
            self.forget(key)
        self.counts["evictions"] += len(evicted)
        self.state.update(dict.fromkeys(fitting, PENDING))
        self.block_of.update(zip(fitting, blocks.tolist(), strict=True))
        self.tier_jobs.append(TierJob(None, fitting, blocks, self.epoch))

    def end_promotion(self, which: int, success: bool) -> None:
        """End a promotion. One of the two tiers has the keys already."""
        jobs = [job for job in self.tier_jobs if job.promotes and not job.ended]
        if not jobs:
            return
        job = jobs[which % len(jobs)]
        job.ended = True
        ok = np.array([success or place == which for place in range(len(job.keys))])
        written_in = [which % 2]
        stored = self.cache.tier_access.end_promotion(job.keys, job.blocks, ok, written_in)
        is_current = job.epoch == self.epoch
        assert stored.tolist() == [is_current and done for done in ok.tolist()]
        for key, done in zip(job.keys, ok.tolist(), strict=True) if is_current else ():
            if done:
                self.state[key] = READY
                self.in_tier[which % 2].add(key)
            else:
                self.policy.forget(key)
                self.forget(key)

    def release_promotion(self, which: int) -> None:
        jobs = [job for job in self.tier_jobs if job.ended]
        if jobs:
            job = jobs[which % len(jobs)]
            self.tier_jobs.remove(job)
            self.cache.tier_access.release_promotion(job.blocks)

    def take_writes(self, limit: int) -> None:
        tier = limit % 2
        writing = sum(len(job.keys) for job in self.tier_jobs if job.tier == tier)
        allowed = min(limit, max(1, self.capacity // 4) - writing)
        wanted = [key for key in self.block_of if key in self.hits() - self.in_tier[tier]]
        commit_all(self.cache.table)
        keys, blocks = self.cache.tier_access.take_writes(tier, limit, 1.0)
        assert keys == wanted[: max(0, allowed)]
        assert blocks.tolist() == [self.block_of[key] for key in keys]
        if keys:
            self.in_tier[tier].update(keys)
            self.tier_jobs.append(TierJob(tier, keys, blocks, self.epoch))

    def end_writes(self, which: int, success: bool) -> None:
        jobs = [job for job in self.tier_jobs if not job.promotes]
        if not jobs:
            return
        job = jobs[which % len(jobs)]
        self.tier_jobs.remove(job)
        done = np.array([success or place == which for place in range(len(job.keys))])
        assert job.tier is not None
        self.cache.tier_access.end_writes(job.tier, job.blocks, done)
        for (key, block), written in zip(job.holds.items(), done.tolist(), strict=True):
            if not written and job.epoch == self.epoch and self.block_of.get(key) == block:
                self.in_tier[job.tier].discard(key)

    def pin(self, keys: list[bytes]) -> None:
        loadable = self.keys_that_are(READY) - self.unverified
        missing = [key for key in keys if key not in loadable]
        if missing:
            with pytest.raises(Refused) as caught:
                self.cache.prepare_load(keys)
            assert caught.value.code == Code.KEY_ABSENT
            assert caught.value.value == missing[0].hex()
            return
        pins = self.cache.prepare_load(keys)
        assert list(pins.blocks) == [self.block_of[key] for key in keys]
        self.jobs.append(ModelCacheJob(pins, self.epoch))

    def unpin(self, which: int) -> None:
        if job := self.ending(Pins, which):
            self.cache.complete_load(job.handle)

    def blocks_of(self, keys: list[bytes]) -> Any:
        found = {self.block_of[key] for key in keys if key in self.block_of}
        return np.array(sorted(found), np.int64)

    def discard(self, keys: list[bytes]) -> None:
        """Report lost bytes, also for keys that are being stored."""
        self.cache.discard_blocks(self.blocks_of(keys))
        for key in set(keys) & self.keys_that_are(READY):
            self.policy.forget(key)
            self.forget(key)

    def verify(self, keys: list[bytes]) -> None:
        """Report equal checksums, also for keys that are not unverified."""
        self.cache.mark_verified(self.blocks_of(keys))
        self.unverified -= set(keys)

    def end_again(self, which: int, success: bool) -> None:
        if not self.ended:
            return
        match self.ended[which % len(self.ended)].handle:
            case Reservation() as reservation:
                self.cache.complete_store(reservation, success)
            case pins:
                with pytest.raises(Refused) as caught:
                    self.cache.complete_load(pins)
                assert caught.value.code == Code.NOT_PINNED

    def lookup(self, keys: list[bytes]) -> None:
        for key in keys:
            expected = Lookup.HIT if key in self.hits() else Lookup.MISS
            expected = Lookup.HIT_PENDING if key in self.hit_pending() else expected
            assert find_key(self.cache, key) is expected

    def touch(self, keys: list[bytes]) -> None:
        self.cache.touch(keys)
        self.policy.touch(keys, self.keys_that_are(PENDING))
        self.spare = [key for key in self.spare if key not in keys]

    def make_spare(self, keys: list[bytes]) -> None:
        self.cache.spare(keys)
        known = [key for key in dict.fromkeys(keys) if key in self.state]
        self.spare = [key for key in self.spare if key not in known] + known[::-1]

    def reset(self) -> None:
        self.epoch += 1
        self.cache.reset(self.epoch)
        self.policy = PLAIN[self.policy_name](self.capacity)
        self.state, self.block_of = {}, {}
        self.in_tier = [set(), set()]
        self.parts, self.unverified, self.spare = {}, set(), []
        self.offers.clear()

    def restart(self) -> None:
        """The next daemon finds the ready keys. It has no jobs."""
        ready, parts = self.keys_that_are(READY), self.parts
        commit_all(self.cache.table)
        self.start(next_table(self.cache.table, KEY_BYTES))
        self.cache.restore_keys(SUB_BLOCKS)
        entries = entries_of(self.cache)
        assert {key for key, _ in entries} == ready
        self.policy.admit([key for key, _ in reversed(entries)], self.capacity, lambda key: False)
        self.state = {key: READY for key, _ in entries}
        self.block_of = dict(reversed(entries))  # as if stored from the head of a prompt on
        self.parts, self.unverified = parts, set(self.block_of)
        self.mirror = dict.fromkeys(self.hit_pending(), PENDING)

    # Checks

    def replay(self, events: Iterable[CacheEvent]) -> None:
        for event in events:
            before = [self.mirror.pop(key, None) for key in event.keys]
            match event.kind:
                case EventKind.PENDING:
                    assert set(before) == {None}
                    self.mirror.update(dict.fromkeys(event.keys, PENDING))
                case EventKind.STORED:
                    assert set(before) == {PENDING}
                    self.mirror.update(dict.fromkeys(event.keys, READY))
                case EventKind.REMOVED:
                    assert set(before) == {READY}
                case EventKind.ABANDONED:
                    assert set(before) == {PENDING}
                case EventKind.CLEARED:
                    assert event.keys == ()
                    self.mirror.clear()

    def drain(self) -> None:
        self.replay(self.cache.events.take())
        assert self.cache.events.take() == []
        expected = dict.fromkeys(self.hits(), READY) | dict.fromkeys(self.hit_pending(), PENDING)
        assert self.mirror == expected

    def check(self) -> None:
        self.cache.check_integrity()
        ready, pending = self.keys_that_are(READY), self.keys_that_are(PENDING)
        assert sorted(ready_keys(self.cache)) == sorted(self.hits())
        assert sorted(pending_keys(self.cache)) == sorted(self.hit_pending())
        assert {key: self.cache.stored_part(key) for key in self.parts} == self.parts
        assert self.cache.has_parts == bool(self.parts)
        ready_blocks = np.array([self.block_of[key] for key in sorted(ready)], np.int64)
        for tier, tier_keys in enumerate(self.in_tier):
            is_missing = self.cache._blocks.marks.are_missing(ready_blocks, tier).tolist()
            assert is_missing == [key not in tier_keys for key in sorted(ready)]
        order = [key for key in self.policy.order() if key in ready]
        assert entries_of(self.cache) == [(key, self.block_of[key]) for key in order]
        usage = self.cache.usage
        assert (usage.free, usage.pending) == (self.free(), len(pending))
        unverified = len(self.unverified)
        assert (usage.ready, usage.unverified) == (len(ready) - unverified, unverified)
        assert (usage.pinned, usage.orphaned) == (len(self.pinned()), len(self.orphaned()))
        assert self.cache.counts == self.counts
