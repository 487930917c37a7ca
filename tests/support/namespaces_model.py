"""A simple model of namespaces: dictionaries of keys, and the content of the pool.

    ready      keys that can be loaded, the host block of each, and its stored sub-blocks
    pending    keys that a transfer stores
    pinned     ready keys whose blocks a load or a session holds, or that are retained
    orphaned   host blocks without a key, held by a transfer or a session from before a reset
    free       all other blocks

The pool is an array of cells. The last store writes its serial, the key and the sub-block into a
cell. So a load shows whether its bytes are those of its keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from kvferry.proto.fingerprint import Fingerprint
from kvferry.proto.specs import Direction, KVLayout
from support.key_requests import KeyRequest
from support.mirror_model import MirrorModel

CELL = 128
# Bytes of most regions. The pool has two, or one of a namespace without a quota.
REGION = 4096
POOL = 2 * REGION

# (serial of a store, key, sub-block)
Content: TypeAlias = tuple[int, bytes, int]
# (offset, bytes, what a transfer writes there, or must find there)
Cell: TypeAlias = tuple[int, int, Content]


class PoolModel:
    def __init__(self) -> None:
        self._cells: list[Content | None] = [None] * (POOL // CELL)

    def write(self, offset: int, nbytes: int, content: Content | None) -> None:
        cells = slice(offset // CELL, (offset + nbytes) // CELL)
        self._cells[cells] = [content] * (nbytes // CELL)

    def check(self, offset: int, nbytes: int, content: Content) -> None:
        cells = self._cells[offset // CELL : (offset + nbytes) // CELL]
        assert cells == [content] * (nbytes // CELL)


@dataclass(frozen=True)
class KeyBlock:
    """The host block of a key. offset: in the pool. serial: of its store. subs: stored ones."""

    offset: int
    serial: int
    subs: tuple[int, ...]


@dataclass(eq=False)
class KeyedRegistration:
    """An engine's registration, as the device worker sees it."""

    number: int
    engine: str
    session: str
    namespace: NamespaceModel
    layout: KVLayout
    mapped: bool = False
    closing: bool = False

    @property
    def usable(self) -> bool:
        return self.mapped and not self.closing


@dataclass(eq=False)
class KeyedTransfer:
    """A transfer in flight, the host blocks of its keys, and the cells it writes or expects."""

    serial: int
    direction: Direction
    registration: KeyedRegistration
    epoch: int
    blocks: dict[bytes, KeyBlock]
    cells: list[Cell]


@dataclass(eq=False)
class NamespaceModel:
    fingerprint: Fingerprint
    # Where its region starts in the pool, and its size.
    start: int
    nbytes: int
    # Of its keys; it belongs to the host, and outlives the region.
    epoch: int
    # The layout of the engine that registered last.
    layout: KVLayout | None = None
    # The engine of each session.
    sessions: dict[str, str] = field(default_factory=dict)
    registrations: list[KeyedRegistration] = field(default_factory=list)
    transfers: dict[int, KeyedTransfer] = field(default_factory=dict)
    ready: dict[bytes, KeyBlock] = field(default_factory=dict)
    pending: dict[bytes, KeyBlock] = field(default_factory=dict)
    # For each session and key, the epoch and the block of each pin, the oldest first; None
    # for a key that was absent.
    pins: dict[str, dict[bytes, list[tuple[int, KeyBlock] | None]]] = field(default_factory=dict)
    # For each session and label, the deadline of each retained key.
    retained: dict[tuple[str, str], dict[bytes, float]] = field(default_factory=dict)
    subscribers: dict[str, MirrorModel] = field(default_factory=dict)
    # A mirror of all events that were published.
    published: MirrorModel = field(init=False)

    def __post_init__(self) -> None:
        self.published = MirrorModel(epoch=self.epoch)

    @property
    def name(self) -> str:
        return self.fingerprint.name

    @property
    def capacity(self) -> int:
        return self.nbytes // self.fingerprint.host_block_bytes

    @property
    def in_use(self) -> bool:
        return bool(self.sessions or self.registrations)

    @property
    def layout_is_fixed(self) -> bool:
        """Whether an engine with another layout is refused."""
        return bool(self.layout) and bool(self.registrations or self.free < self.capacity)

    @property
    def free(self) -> int:
        return self.capacity - len(self.ready) - len(self.pending) - len(self.orphaned)

    @property
    def orphaned(self) -> set[int]:
        """Offsets of the blocks."""
        pinned = {b.offset for _, epoch, b in self._pins() if epoch != self.epoch}
        transfers = [t for t in self.transfers.values() if t.epoch != self.epoch]
        return pinned.union(b.offset for t in transfers for b in t.blocks.values())

    @property
    def pinned(self) -> set[bytes]:
        pinned = {key for key, epoch, _ in self._pins() if epoch == self.epoch}
        return pinned.union(
            self.retained_by(*self.sessions.values()),
            *(
                transfer.blocks
                for transfer in self.transfers.values()
                if transfer.direction is Direction.LOAD and transfer.epoch == self.epoch
            ),
        )

    def _pins(self) -> Iterator[tuple[bytes, int, KeyBlock]]:
        for by_key in self.pins.values():
            for key, pins in by_key.items():
                yield from ((key, *pin) for pin in pins if pin is not None)

    def hits(self) -> set[bytes]:
        """Keys with all sub-blocks stored."""
        factor = 1 if self.layout is None else self.layout.block_size_factor
        return {key for key, block in self.ready.items() if len(block.subs) == factor}

    def is_loadable(self, request: KeyRequest) -> bool:
        ready = self.ready
        return all(b.key in ready and b.sub in ready[b.key].subs for b in request.blocks)

    def replaced(self, request: KeyRequest) -> set[bytes]:
        """Partly stored keys that a store replaces: it has all stored sub-blocks, and more."""
        return {
            key
            for key in self.ready.keys() & set(request.keys) - self.pinned
            if {b.sub for b in request.first_blocks(key)} > set(self.ready[key].subs)
        }

    def retained_by(self, *engines: str) -> set[bytes]:
        """The distinct keys that these engines retain."""
        retained = self.retained.items()
        return {key for who, keys in retained for key in keys if self.sessions[who[0]] in engines}

    def begin_epoch(self, epoch: int) -> None:
        self.ready, self.pending, self.epoch = {}, {}, epoch
        self.retained.clear()
