"""A region: bytes of the host pool that one owner has, and the state of its host blocks."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field

from kvferry.daemon.core.block_lines import Lines
from kvferry.daemon.core.block_states import BlockStates
from kvferry.daemon.core.block_table import BlockTable
from kvferry.daemon.core.records import Contents, RegionOwner
from kvferry.proto.layout import LayoutArrays


@dataclass(slots=True)
class Region:
    """`nbytes` bytes of the host pool from byte `start` on.

    present: whether the owner has a session or registration; otherwise the region is deserted.
    uid: the user that owns an engine's region; None for a namespace. states: which blocks can be
    loaded by number; None if the host blocks have keys. memory: the lines of an earlier daemon.
    last_use: time of its last use (UseClock) by an earlier daemon.
    """

    owner: RegionOwner
    contents: Contents
    start: int
    nbytes: int
    present: bool = True
    uid: int | None = None
    states: BlockStates | None = field(default=None, compare=False)
    memory: InitVar[Lines | None] = None
    last_use: int = field(default=0, compare=False)
    table: BlockTable = field(init=False, compare=False)

    def __post_init__(self, memory: Lines | None) -> None:
        key_bytes = 0 if isinstance(self.contents, LayoutArrays) else self.contents.key_bytes
        self.table = BlockTable(self.num_blocks, key_bytes, memory)

    @property
    def end(self) -> int:
        return self.start + self.nbytes

    @property
    def block_bytes(self) -> int:
        return self.contents.host_block_bytes

    @property
    def num_blocks(self) -> int:
        return self.nbytes // self.block_bytes
