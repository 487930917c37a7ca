"""A core with two tiers, and a pool that remembers what was written where: no key has other bytes.

The machine stands for engines, the device and the tiers. Tiers are dictionaries that lose keys,
answer late, and write into the blocks of a fetch until it is released, whatever became of its keys.
Each block's content names its namespace, its key and how many resets came before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from kvferry.daemon.core.actions import (
    MapTensors,
    StartTransfer,
    TensorsMapped,
    TensorsUnmapped,
    TransferCompleted,
    UnmapTensors,
)
from kvferry.daemon.core.tier_actions import (
    BlocksCommitted,
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
    FAULT,
    LAYOUT,
    PAGE,
    copies,
)
from support.tiers_model import (
    FINGERPRINTS,
    KEYS,
    ROOM,
    Commit,
    Content,
    Job,
    Search,
    TiersModel,
    Write,
)

NEWCOMER = "newcomer"
ENDS = [Outcome.DONE, Outcome.DONE, Outcome.FAILED, Outcome.CANCELLED]

T = TypeVar("T")


class TiersMachine(TiersModel, RuleBasedStateMachine):
    def one_of(self, things: Iterable[T]) -> T:
        thing: T = self.draw(st.sampled_from(list(things)))
        return thing

    def take(self, things: list[T]) -> T:
        return things.pop(self.draw(st.integers(0, len(things) - 1)))

    def some_keys(self) -> tuple[bytes, ...]:
        start = self.draw(st.integers(0, len(KEYS) - 1))
        return KEYS[start : start + self.draw(st.integers(1, 5))]

    # What happens

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        self.draw = data.draw
        for session in FINGERPRINTS:
            self.come(session)
        for _ in range(4):
            self.store_at_once()
            self.take_writes()
            while self.writes:
                self.end_write()

    @rule(data=st.data())
    def something_happens(self, data: st.DataObject) -> None:
        self.draw = data.draw
        getattr(self, self.one_of(self.possible_steps()))()

    def possible_steps(self) -> list[str]:
        """Names of methods, likely ones more than once."""
        steps = list[str]()
        if self.inside:
            steps += ["promote", "store_at_once", "take_writes", "store_at_once"] * 5
            steps += ["store", "load", "find"] * 2 + ["reset"]
        steps += ["dropped"] * 2 * bool(self.drops)
        steps += ["answer"] * 4 * bool(self.searches)
        steps += ["reset"] * 4 * bool(self.searches and self.inside)
        steps += ["end_job"] * 3 * bool(self.jobs) + ["commit"] * 3 * bool(self.commits)
        steps += ["end_write"] * 6 * bool(self.writes)
        steps += ["end_fetch", "end_fetch", "release", "write_late"] * 4 * bool(self.fetches)
        steps += ["newcomer", "come_or_go"] * 2 * bool(self.fetches or self.writes)
        return [*steps, "recheck", "lose", "newcomer", "come_or_go"]

    def come(self, session: str) -> None:
        self.fixture.open_sessions(session)
        message = wire.OpenNamespace(7, FINGERPRINTS[session], ROOM, self.one_of(["lru", "arc"]), 1)
        (reply, *_) = self.perform(self.send(session, message))
        if isinstance(reply, wire.Opened):
            assert self.register(session, None)
            self.inside.add(session)
        else:
            self.core.close_session(session)

    def come_or_go(self) -> None:
        session = self.one_of(FINGERPRINTS)
        if session not in self.inside:
            self.come(session)
            return
        self.inside.remove(session)
        self.leave(session)

    def leave(self, session: str) -> None:
        actions = self.core.close_session(session)
        for job in list(self.jobs):
            self.jobs.remove(job)
            self.end(job, Outcome.CANCELLED)
        for action in actions:
            if isinstance(action, UnmapTensors):
                self.perform(self.core.report(TensorsUnmapped(action.registration)))

    def newcomer(self) -> None:
        """An engine of its own, that writes to all of its region, or its end."""
        if NEWCOMER in self.core.sessions:
            self.leave(NEWCOMER)
            return
        self.fixture.open_sessions(NEWCOMER)
        if not self.register(NEWCOMER, ROOM):
            self.leave(NEWCOMER)
            return
        spec = GPULoadStoreSpec(range(8)), CPULoadStoreSpec(range(8))
        start = self.submit(NEWCOMER, *spec)
        assert start is not None
        self.start(start, {block: ("newcomer", block) for block in range(8)})

    def register(self, session: str, host_bytes: int | None) -> bool:
        """Whether there is room."""
        for action in self.send(session, wire.AllocateKVCaches(8, LAYOUT, host_bytes)):
            if isinstance(action, MapTensors):
                self.perform(self.core.report(TensorsMapped(action.registration, session)))
                return True
        return False

    # Transfers

    def submit(self, session: str, *spec: Any) -> StartTransfer | None:
        actions = self.send(session, wire.Submit(next(self.numbers), *spec))
        self.perform(actions)
        starts = [action for action in actions if isinstance(action, StartTransfer)]
        return starts[0] if starts else None

    def start(self, start: StartTransfer, contents: dict[int, Content]) -> None:
        cells = {offset: contents[block] for _, block, offset in copies(start.plan)}
        self.jobs.append(Job(start.plan.serial, True, cells))
        for offset in cells:
            self.cells[offset] = self.garbage()
            self.committed.pop(offset, None)

    def store(self) -> None:
        session, keys = self.one_of(sorted(self.inside)), self.some_keys()
        spec = GPULoadStoreSpec(range(len(keys))), KeyLoadStoreSpec(keys)
        start = self.submit(session, *spec)
        if start is not None and start.plan.nbytes:
            self.start(start, {n: self.content(session, key) for n, key in enumerate(keys)})

    def store_at_once(self) -> None:
        """Store keys, and compute their checksums."""
        before = len(self.jobs)
        self.store()
        if len(self.jobs) > before:
            self.end(self.jobs.pop(), Outcome.DONE)
            self.commit_one(self.commits.pop())

    def load(self) -> None:
        session = self.one_of(sorted(self.inside))
        namespace = self.core._namespaces._by_name[FINGERPRINTS[session].name]
        ready = sorted(namespace.cache.ready_keys())
        if not ready:
            return
        key = self.one_of(ready)
        start = self.submit(session, KeyLoadStoreSpec((key,)), GPULoadStoreSpec([0]))
        if start is not None:
            cells = {o: self.content(session, key) for _, _, o in copies(start.plan)}
            self.jobs.append(Job(start.plan.serial, False, cells))

    def end_job(self) -> None:
        self.end(self.take(self.jobs), self.one_of(ENDS))

    def end(self, job: Job, outcome: Outcome) -> None:
        if not job.stores:
            assert job.cells == {offset: self.cells[offset] for offset in job.cells}
        elif outcome is Outcome.DONE:
            self.cells.update(job.cells)
        error = FAULT if outcome is Outcome.FAILED else None
        self.perform(self.core.report(TransferCompleted(job.serial, outcome, error=error)))

    def commit(self) -> None:
        """Compute the checksums of a store, except for blocks that were overwritten since."""
        self.commit_one(self.take(self.commits))

    def commit_one(self, commit: Commit) -> None:
        same = [self.cells[offset] == content for offset, content in commit.cells.items()]
        for offset, content in commit.cells.items():
            if self.cells[offset] == content:
                self.committed[offset] = content
        one = commit.block_set
        keys = tuple(key for key, good in zip(one.keys, same, strict=True) if good)
        self.core.report(BlocksCommitted(one.owner, one.blocks[same], keys))

    # Promotions

    def find(self) -> None:
        """Search for keys; mostly for such that only tiers have."""
        session = self.one_of(sorted(self.inside))
        own = FINGERPRINTS[session].name
        ready = self.core._namespaces._by_name[own].cache.ready_keys()
        names = {name for tier in self.tiers for name in tier.blocks}
        below = sorted({key for store, key in names if is_part_of(store, own)} - set(ready))
        keys = self.some_keys()
        wants_below: bool = self.draw(st.sampled_from([True, True, False]))
        if below and wants_below:
            start = self.draw(st.integers(0, len(below) - 1))
            keys = tuple(below[start : start + 4])
        self.perform(self.send(session, wire.FindInTiers(next(self.numbers), keys)))

    def promote(self) -> None:
        """Search for keys, and have the answer at once."""
        before = len(self.searches)
        self.find()
        if len(self.searches) > before:
            self.answer_one(self.searches.pop())

    def answer(self) -> None:
        self.answer_one(self.take(self.searches))

    def answer_one(self, search: Search) -> None:
        now = self.tier_of(search.action.store, search.action.keys)
        tier_of = self.one_of([search.tier_of, now])
        report = KeysFound(search.action.search, tier_of, (1e9,) * 2, (0.0,) * 2, (True,) * 2)
        self.perform(self.core.report(report))

    def write_late(self) -> None:
        """A tier writes into a block that it was given and that is not released."""
        if late := [offset for fetch in self.fetches for offset in sorted(fetch.late)]:
            self.cells[self.one_of(late)] = self.garbage()

    def end_fetch(self) -> None:
        running = [fetch for fetch in self.fetches if not fetch.ended]
        if not running:
            return
        fetch, in_time = self.one_of(running), self.one_of([True, True, False])
        fetch.ended, ok = True, list[bool]()
        for offset, found in zip(fetch.action.offsets.tolist(), fetch.found, strict=True):
            ok.append(in_time and found is not None)
            if in_time and found is not None:
                self.cells[offset] = found
                fetch.late.discard(offset)
        self.perform(self.core.report(BlocksFetched(fetch.action.fetch, tuple(ok))))

    def release(self) -> None:
        """Mostly after its end; also when the tier's process died before."""
        fetch = self.take(self.fetches)
        self.perform(self.core.report(FetchReleased(fetch.action.fetch)))

    # Writes

    def take_writes(self) -> None:
        tier = self.one_of([0, 1])
        limit, coldest = self.draw(st.integers(1, 4)), self.one_of([0.5, 1.0])
        for job in self.core.writes.take_writes(tier, limit, coldest):
            cells = {offset: self.cells[offset] for offset in job.offsets.tolist()}
            assert all(self.committed.get(o) == content for o, content in cells.items())
            assert [content[1] for content in cells.values()] == list(job.keys)
            self.writes.append(Write(tier, job, cells))

    def end_write(self) -> None:
        """The tier read the bytes that the blocks had when it got them."""
        write = self.take(self.writes)
        assert write.cells == {offset: self.cells[offset] for offset in write.cells}
        done = [not write.dropped and self.one_of([True, True, False]) for _ in write.job.keys]
        for key, content, good in zip(write.job.keys, write.cells.values(), done, strict=True):
            if good:
                self.tiers[write.tier].blocks[write.job.store, key] = content
        self.core.report(BlocksWritten(write.job.number, tuple(done)))

    def recheck(self) -> None:
        tier = self.one_of([0, 1])
        if (written := self.core.writes.next_written(tier, 4)) is not None:
            blocks = self.tiers[tier].blocks
            missing = [(written.store, key) not in blocks for key in written.keys]
            self.core.writes.reopen_writes(written, missing)

    def lose(self) -> None:
        tier = self.one_of(self.tiers)
        if tier.blocks:
            del tier.blocks[self.one_of(sorted(tier.blocks))]

    # Resets

    def reset(self) -> None:
        session = self.one_of(sorted(self.inside))
        self.resets[session] += 1
        self.perform(self.send(session, wire.Reset(next(self.numbers))))

    def dropped(self) -> None:
        """What was handed out to be written before is dropped, too."""
        drop = self.take(self.drops)
        for tier in self.tiers:
            for name in [name for name in tier.blocks if is_part_of(name[0], drop.namespace)]:
                del tier.blocks[name]
        for write in self.writes:
            write.dropped |= is_part_of(write.job.store, drop.namespace)
        self.perform(self.core.report(StoreDropped(drop.drop)))

    # Always

    @invariant()
    def what_can_be_loaded_is_what_was_stored(self) -> None:
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
    def what_tiers_have_is_what_was_stored(self) -> None:
        resets = {one.name: self.resets[session] for session, one in FINGERPRINTS.items()}
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


def test_no_key_has_other_bytes_whatever_tiers_do() -> None:
    run_state_machine_as_test(
        TiersMachine, settings=settings(max_examples=100, stateful_step_count=80)
    )
