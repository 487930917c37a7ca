"""A core with two tiers, and a model of the pool: no key ever has wrong bytes.

The machine replaces engines, the device and the tiers. Tiers are dictionaries that lose keys and
reply late. They write into the blocks of a fetch until it is released, even if its keys were reset.
The content of a block has its namespace, its key and the number of resets before it was stored.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from kvferry.daemon.core.tier_actions import (
    BlocksFetched,
    BlocksWritten,
    FetchReleased,
    KeysFound,
    StoreDropped,
)
from kvferry.daemon.tiers.base import is_part_of
from kvferry.proto import messages as wire
from kvferry.proto.results import Outcome
from kvferry.proto.specs import CPULoadStoreSpec, GPULoadStoreSpec, KeyLoadStoreSpec
from support.namespaces_fixture import (
    PAGE,
    copies,
)
from support.tiers_model import (
    FINGERPRINTS,
    KEYS,
    REGION_BYTES,
    Job,
    Search,
    TiersModel,
    Write,
)

OTHER_ENGINE = "other"
ENDS = [Outcome.DONE, Outcome.DONE, Outcome.FAILED, Outcome.CANCELLED]

T = TypeVar("T")


class TiersMachine(TiersModel, RuleBasedStateMachine):
    def draw_from(self, values: Iterable[T]) -> T:
        value: T = self.draw(st.sampled_from(list(values)))
        return value

    def pop_from(self, values: list[T]) -> T:
        return values.pop(self.draw(st.integers(0, len(values) - 1)))

    def draw_keys(self) -> tuple[bytes, ...]:
        start = self.draw(st.integers(0, len(KEYS) - 1))
        return KEYS[start : start + self.draw(st.integers(1, 5))]

    # Steps

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        self.draw = data.draw
        for session in FINGERPRINTS:
            self.connect(session)
        for _ in range(4):
            self.store_and_commit()
            self.take_writes()
            while self.writes:
                self.end_write()

    @rule(data=st.data())
    def run_step(self, data: st.DataObject) -> None:
        self.draw = data.draw
        getattr(self, self.draw_from(self.possible_steps()))()

    def possible_steps(self) -> list[str]:
        """Names of methods. Frequent ones occur more than once."""
        steps = list[str]()
        if self.inside:
            steps += ["promote", "store_and_commit", "take_writes", "store_and_commit"] * 5
            steps += ["store", "load", "find"] * 2 + ["reset"]
        steps += ["end_drop"] * 2 * bool(self.drops)
        steps += ["end_search"] * 4 * bool(self.searches)
        steps += ["reset"] * 4 * bool(self.searches and self.inside)
        steps += ["end_job"] * 3 * bool(self.jobs) + ["commit"] * 3 * bool(self.commits)
        steps += ["end_write"] * 6 * bool(self.writes)
        steps += ["end_fetch", "end_fetch", "release", "write_late"] * 4 * bool(self.fetches)
        steps += (
            ["toggle_other_engine", "connect_or_disconnect"] * 2 * bool(self.fetches or self.writes)
        )
        return [
            *steps,
            "check_written_keys",
            "lose_key",
            "toggle_other_engine",
            "connect_or_disconnect",
        ]

    def connect(self, session: str) -> None:
        self.fixture.open_sessions(session)
        message = wire.OpenNamespace(
            7, FINGERPRINTS[session], REGION_BYTES, self.draw_from(["lru", "arc"]), 1
        )
        replies = self.perform(self.send(session, message))
        if replies and isinstance(replies[0], wire.Opened):
            assert self.register(session, None)
            self.inside.add(session)
        else:  # refused, or waiting until tiers release a region
            self.core.close_session(session)

    def connect_or_disconnect(self) -> None:
        session = self.draw_from(FINGERPRINTS)
        if session not in self.inside:
            self.connect(session)
            return
        self.inside.remove(session)
        self.disconnect(session)

    def toggle_other_engine(self) -> None:
        """Connect an engine without namespace that fills its region, or disconnect it."""
        if OTHER_ENGINE in self.core.sessions:
            self.disconnect(OTHER_ENGINE)
            return
        self.fixture.open_sessions(OTHER_ENGINE)
        if not self.register(OTHER_ENGINE, REGION_BYTES):
            self.disconnect(OTHER_ENGINE)
            return
        spec = GPULoadStoreSpec(range(8)), CPULoadStoreSpec(range(8))
        start = self.submit(OTHER_ENGINE, *spec)
        assert start is not None
        self.start(start, {block: ("other", block) for block in range(8)})

    # Transfers

    def store(self) -> None:
        session, keys = self.draw_from(sorted(self.inside)), self.draw_keys()
        spec = GPULoadStoreSpec(range(len(keys))), KeyLoadStoreSpec(keys)
        start = self.submit(session, *spec)
        if start is not None and start.plan.nbytes:
            self.start(start, {n: self.content(session, key) for n, key in enumerate(keys)})

    def store_and_commit(self) -> None:
        """Store keys, and compute their checksums."""
        before = len(self.jobs)
        self.store()
        if len(self.jobs) > before:
            self.end(self.jobs.pop(), Outcome.DONE)
            self.end_commit(self.commits.pop())

    def load(self) -> None:
        session = self.draw_from(sorted(self.inside))
        namespace = self.core._namespaces._by_name[FINGERPRINTS[session].name]
        ready = sorted(namespace.cache.ready_keys())
        if not ready:
            return
        key = self.draw_from(ready)
        start = self.submit(session, KeyLoadStoreSpec((key,)), GPULoadStoreSpec([0]))
        if start is not None:
            cells = {o: self.content(session, key) for _, _, o in copies(start.plan)}
            self.jobs.append(Job(start.plan.serial, False, cells))

    def end_job(self) -> None:
        self.end(self.pop_from(self.jobs), self.draw_from(ENDS))

    def commit(self) -> None:
        """Compute the checksums of a store, except those of overwritten blocks."""
        self.end_commit(self.pop_from(self.commits))

    # Promotions

    def find(self) -> None:
        """Search for keys, mostly for those that only tiers have."""
        session = self.draw_from(sorted(self.inside))
        own = FINGERPRINTS[session].name
        ready = self.core._namespaces._by_name[own].cache.ready_keys()
        names = {name for tier in self.tiers for name in tier.blocks}
        below = sorted({key for store, key in names if is_part_of(store, own)} - set(ready))
        keys = self.draw_keys()
        only_in_tiers: bool = self.draw(st.sampled_from([True, True, False]))
        if below and only_in_tiers:
            start = self.draw(st.integers(0, len(below) - 1))
            keys = tuple(below[start : start + 4])
        self.perform(self.send(session, wire.FindInTiers(next(self.numbers), keys)))

    def promote(self) -> None:
        """Search for keys, and end the search at once."""
        before = len(self.searches)
        self.find()
        if len(self.searches) > before:
            self.end_one_search(self.searches.pop())

    def end_search(self) -> None:
        self.end_one_search(self.pop_from(self.searches))

    def end_one_search(self, search: Search) -> None:
        now = self.tier_of(search.action.store, search.action.keys)
        tier_of = self.draw_from([search.tier_of, now])
        report = KeysFound(search.action.search, tier_of, (1e9,) * 2, (0.0,) * 2, (True,) * 2)
        self.perform(self.core.report(report))

    def write_late(self) -> None:
        """A tier writes into a block of a fetch that is not released."""
        if late := [offset for fetch in self.fetches for offset in sorted(fetch.late)]:
            self.cells[self.draw_from(late)] = self.garbage()

    def end_fetch(self) -> None:
        running = [fetch for fetch in self.fetches if not fetch.ended]
        if not running:
            return
        fetch, in_time = self.draw_from(running), self.draw_from([True, True, False])
        fetch.ended, ok = True, list[bool]()
        for offset, found in zip(fetch.action.offsets.tolist(), fetch.found, strict=True):
            ok.append(in_time and found is not None)
            if in_time and found is not None:
                self.cells[offset] = found
                fetch.late.discard(offset)
        self.perform(self.core.report(BlocksFetched(fetch.action.fetch, tuple(ok))))

    def release(self) -> None:
        """Release a fetch. If the process of the tier died, it has not ended before."""
        fetch = self.pop_from(self.fetches)
        self.perform(self.core.report(FetchReleased(fetch.action.fetch)))

    # Writes

    def take_writes(self) -> None:
        tier = self.draw_from([0, 1])
        limit, coldest = self.draw(st.integers(1, 4)), self.draw_from([0.5, 1.0])
        for job in self.core.writes.take_writes(tier, limit, coldest):
            cells = {offset: self.cells[offset] for offset in job.offsets.tolist()}
            assert all(self.committed.get(o) == content for o, content in cells.items())
            assert [content[1] for content in cells.values()] == list(job.keys)
            self.writes.append(Write(tier, job, cells))

    def end_write(self) -> None:
        """The blocks must still have the bytes that they had at the start of the write."""
        write = self.pop_from(self.writes)
        assert write.cells == {offset: self.cells[offset] for offset in write.cells}
        done = [not write.dropped and self.draw_from([True, True, False]) for _ in write.job.keys]
        for key, content, good in zip(write.job.keys, write.cells.values(), done, strict=True):
            if good:
                self.tiers[write.tier].blocks[write.job.store, key] = content
        self.core.report(BlocksWritten(write.job.number, tuple(done)))

    def check_written_keys(self) -> None:
        tier = self.draw_from([0, 1])
        if (written := self.core.writes.next_written(tier, 4)) is not None:
            blocks = self.tiers[tier].blocks
            missing = [(written.store, key) not in blocks for key in written.keys]
            self.core.writes.reopen_writes(written, missing)

    def lose_key(self) -> None:
        tier = self.draw_from(self.tiers)
        if tier.blocks:
            del tier.blocks[self.draw_from(sorted(tier.blocks))]

    # Resets

    def reset(self) -> None:
        session = self.draw_from(sorted(self.inside))
        self.resets[session] += 1
        self.perform(self.send(session, wire.Reset(next(self.numbers))))

    def end_drop(self) -> None:
        """Writes that were in flight before are dropped, too."""
        drop = self.pop_from(self.drops)
        for tier in self.tiers:
            for name in [name for name in tier.blocks if is_part_of(name[0], drop.namespace)]:
                del tier.blocks[name]
        for write in self.writes:
            write.dropped |= is_part_of(write.job.store, drop.namespace)
        self.perform(self.core.report(StoreDropped(drop.drop)))

    # Invariants

    @invariant()
    def loadable_keys_have_their_stored_bytes(self) -> None:
        for session, fingerprint in FINGERPRINTS.items():
            namespace = self.core._namespaces._by_name.get(fingerprint.name)
            if namespace is None:
                continue
            namespace.cache.check_integrity()
            ready = set(namespace.cache.ready_keys())
            for key, block in namespace.cache.entries():
                if key in ready:
                    at = namespace.region.start + block * PAGE
                    assert self.cells[at] == self.content(session, key)

    @invariant()
    def no_block_has_two_writers(self) -> None:
        writers = [offset for job in self.jobs if job.stores for offset in job.cells]
        writers += [offset for fetch in self.fetches for offset in fetch.late]
        assert len(set(writers)) == len(writers)

    @invariant()
    def keys_in_tiers_have_their_stored_bytes(self) -> None:
        resets = {f.name: self.resets[session] for session, f in FINGERPRINTS.items()}
        for tier in self.tiers:
            for (store, key), content in tier.blocks.items():
                name = store.partition("-")[0]
                assert self.is_dropping(store) or content == (name, key, resets[name])

    def teardown(self) -> None:
        """End everything. Then no block is held."""
        for fetch in self.fetches:
            self.core.report(FetchReleased(fetch.action.fetch))
        for write in self.writes:
            self.core.report(BlocksWritten(write.job.number, (False,) * len(write.job.keys)))
        for job in self.jobs:
            self.end(job, Outcome.CANCELLED)
        for namespace in self.core._namespaces:
            usage = namespace.cache.usage
            assert (usage.pending, usage.orphaned, usage.pinned) == (0, 0, 0)
            assert (namespace.promoting, namespace.cache.tier_access.writing) == (0, 0)


def test_no_key_has_wrong_bytes() -> None:
    run_state_machine_as_test(
        TiersMachine, settings=settings(max_examples=100, stateful_step_count=80)
    )
