"""A model of a core with two tiers: the pool, the tiers, and the jobs in progress.

Each block contains its namespace, its key and the number of earlier resets.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeAlias

from kvferry.daemon.core.actions import (
    BlockSet,
    CommitBlocks,
    MapTensors,
    SendMessage,
    StartTransfer,
    TensorsMapped,
    TensorsUnmapped,
    TransferCompleted,
    UnmapTensors,
)
from kvferry.daemon.core.tier_actions import (
    BlocksCommitted,
    DropStore,
    FetchBlocks,
    FindKeys,
    TierDescription,
    WriteJob,
)
from kvferry.daemon.tiers.base import is_part_of
from kvferry.proto import messages as wire
from kvferry.proto.results import Outcome
from support.namespaces_fixture import (
    FAULT,
    FINGERPRINT,
    LAYOUT,
    OTHER,
    PAGE,
    NamespacesFixture,
    copies,
    each,
)

# Eight blocks each: two namespaces fill the pool, and a newcomer replaces one of them.
REGION_BYTES = 8 * PAGE
FINGERPRINTS = {"a": FINGERPRINT, "b": OTHER}
KEYS = each(b"abcdefghijklmnopqrst")
Content: TypeAlias = tuple[Any, ...]


@dataclass(eq=False)
class Job:
    """A transfer. cells: the content that it writes, or expects, by pool offset."""

    serial: int
    stores: bool
    cells: dict[int, Content]


@dataclass(eq=False)
class Search:
    action: FindKeys
    tier_of: tuple[int, ...]


@dataclass(eq=False)
class Fetch:
    """Blocks that a tier reads.

    found: content in the tier when the fetch began. late: offsets that it still writes to.
    """

    action: FetchBlocks
    found: list[Content | None]
    late: set[int]
    ended: bool = False


@dataclass(eq=False)
class Write:
    """Blocks that a tier writes.

    cells: content of the blocks when the tier got them. dropped: its namespace was reset.
    """

    tier: int
    job: WriteJob
    cells: dict[int, Content]
    dropped: bool = False


@dataclass(eq=False)
class Commit:
    """Blocks whose checksum is being computed.

    cells: content of the blocks when their store ended.
    """

    block_set: BlockSet
    cells: dict[int, Content]


@dataclass(eq=False)
class TierModel:
    blocks: dict[tuple[str, bytes], Content] = field(default_factory=dict)


class TiersModel:
    """`perform` carries out the core's actions, or keeps them for later steps."""

    def __init__(self) -> None:
        super().__init__()
        tiers = (TierDescription("near", writes_promoted=True), TierDescription("far"))
        self.fixture = NamespacesFixture(pool_bytes=2 * REGION_BYTES, tiers=tiers)
        self.core = self.fixture.core
        self.numbers = count(1)
        self.cells = dict.fromkeys(range(0, 2 * REGION_BYTES, PAGE), self.garbage())
        self.tiers = (TierModel(), TierModel())
        self.resets = dict.fromkeys(FINGERPRINTS, 0)
        self.jobs, self.searches = list[Job](), list[Search]()
        self.fetches, self.writes = list[Fetch](), list[Write]()
        self.commits, self.drops = list[Commit](), list[DropStore]()
        # The content that the checksum of each block belongs to.
        self.committed = dict[int, Content]()
        self.inside = set[str]()

    def garbage(self) -> Content:
        return ("garbage", next(self.numbers))

    def content(self, session: str, key: bytes) -> Content:
        return (FINGERPRINTS[session].name, key, self.resets[session])

    def send(self, session: str, message: wire.ClientMessage) -> list[Any]:
        return self.core.handle(session, message, now=101.0)

    def perform(self, actions: list[Any]) -> list[Any]:
        """Keep the requests to the tiers and to the device. Returns the messages."""
        replies = []
        for action in actions:
            match action:
                case FetchBlocks():
                    blocks = self.tiers[action.tier].blocks
                    found = [blocks.get((action.store, key)) for key in action.keys]
                    self.fetches.append(Fetch(action, found, set(action.offsets.tolist())))
                case FindKeys(_, store, keys):
                    self.searches.append(Search(action, self.tier_of(store, keys)))
                case CommitBlocks(_, block_set) if block_set.keys:
                    offsets = self.offsets_of(block_set)
                    self.commits.append(Commit(block_set, {o: self.cells[o] for o in offsets}))
                case DropStore():
                    self.drops.append(action)
                case SendMessage(_, message):
                    replies.append(message)
        return replies

    def offsets_of(self, block_set: BlockSet) -> list[int]:
        (region,) = [r for r in self.core._regions if r.owner == block_set.owner]
        return [region.start + block * PAGE for block in block_set.blocks.tolist()]

    def tier_of(self, store: str, keys: Iterable[bytes]) -> tuple[int, ...]:
        has = [[(store, key) in tier.blocks for tier in self.tiers] for key in keys]
        return tuple([tiers.index(True) if any(tiers) else -1 for tiers in has])

    def is_dropping(self, store: str) -> bool:
        return any(is_part_of(store, drop.namespace) for drop in self.drops)

    # Sessions and transfers

    def disconnect(self, session: str) -> None:
        actions = self.core.close_session(session)
        for job in list(self.jobs):
            self.jobs.remove(job)
            self.end(job, Outcome.CANCELLED)
        for action in actions:
            if isinstance(action, UnmapTensors):
                self.perform(self.core.report(TensorsUnmapped(action.registration)))

    def register(self, session: str, host_bytes: int | None) -> bool:
        """Register an engine. False if there is no room."""
        for action in self.send(session, wire.AllocateKVCaches(8, LAYOUT, host_bytes)):
            if isinstance(action, MapTensors):
                self.perform(self.core.report(TensorsMapped(action.registration, session)))
                return True
        return False

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

    def end(self, job: Job, outcome: Outcome) -> None:
        if not job.stores:
            assert job.cells == {offset: self.cells[offset] for offset in job.cells}
        elif outcome is Outcome.DONE:
            self.cells.update(job.cells)
        error = FAULT if outcome is Outcome.FAILED else None
        self.perform(self.core.report(TransferCompleted(job.serial, outcome, error=error)))

    def end_commit(self, commit: Commit) -> None:
        same = [self.cells[offset] == content for offset, content in commit.cells.items()]
        for offset, content in commit.cells.items():
            if self.cells[offset] == content:
                self.committed[offset] = content
        block_set = commit.block_set
        keys = tuple(key for key, good in zip(block_set.keys, same, strict=True) if good)
        self.core.report(BlocksCommitted(block_set.owner, block_set.blocks[same], keys))
