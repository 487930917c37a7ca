"""Host blocks addressed by number, compared with a dictionary.

The model has the last store of every sub-block, in the order of submission. A load is accepted if
for each of its sub-blocks the last store is done or in flight. It requires the stores in flight.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeAlias

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvferry.daemon.core.block_states import _UNVERIFIED, BlockStates
from kvferry.daemon.core.block_table import UNCHECKED, WITH_CONTENTS, BlockTable
from kvferry.daemon.core.layout import BlockLayout, ResolvedBlocks
from kvferry.proto.errors import Code, Refused
from kvferry.proto.layout import LayoutArrays
from kvferry.proto.specs import Direction, GPULoadStoreSpec, KVLayout, TensorLayout, TensorRef
from support.committed_blocks import commit_all, next_table

HOSTS = 4
FACTOR = 3
# Page sizes of the groups, by number of sizes.
PAGES = {1: (64,), 2: (64, 32)}

SHAPES: dict[str, Any] = {
    "group": st.integers(0, 1),
    "hosts": st.lists(st.integers(0, HOSTS - 1), min_size=1, max_size=3, unique=True),
    "skip": st.integers(0, FACTOR - 1),
    "cut": st.integers(0, FACTOR - 1),
}

HOST_SETS = st.sets(st.integers(0, HOSTS - 1))

# (host block, sub-block)
Cell: TypeAlias = tuple[int, int]


@dataclass
class ModelStore:
    serial: int
    direction: Direction
    group: int
    blocks: ResolvedBlocks
    cells: list[Cell]
    requires: tuple[int, ...] = ()


@dataclass
class Cells:
    """The content of each sub-block: the serial number of its last store."""

    content: dict[Cell, int | None] = field(default_factory=dict)
    unverified: set[Cell] = field(default_factory=set)
    group: dict[int, int] = field(default_factory=dict)

    def clear(self, hosts: list[int]) -> None:
        for cell in [cell for cell in self.content if cell[0] in hosts]:
            del self.content[cell]
            self.unverified.discard(cell)


class BlockStatesMachine(RuleBasedStateMachine):
    sizes = 1

    def __init__(self) -> None:
        super().__init__()
        self.serials = count(1)
        self.queue: list[ModelStore] = []
        self.done: set[int] = set()

    @initialize()
    def begin(self) -> None:
        pages = PAGES[self.sizes]
        tensors = tuple(TensorLayout(64, page, page) for page in pages)
        groups = tuple((TensorRef(number, page),) for number, page in enumerate(pages))
        self.layout = LayoutArrays.from_layout(KVLayout(tensors, groups, FACTOR))
        self.block_layout = BlockLayout(self.layout, 0, HOSTS)
        self.table = BlockTable(HOSTS)
        self.states = BlockStates.for_layout(self.layout, self.table)
        # The content after all jobs in the queue.
        self.cells = Cells()

    def resolve(
        self, direction: Direction, group: int, hosts: list[int], skip: int, cut: int
    ) -> ModelStore:
        number = max(0, len(hosts) * FACTOR - skip - cut)
        cells = [(host, sub) for host in hosts for sub in range(FACTOR)][skip : skip + number]
        sizes = tuple(number * (g == group) for g in range(self.sizes))
        gpu = GPULoadStoreSpec(range(number), sizes, (skip,) * self.sizes)
        blocks = self.block_layout.resolve(direction, gpu, np.array(hosts, dtype=np.int64))
        return ModelStore(next(self.serials), direction, group, blocks, cells)

    @rule(**SHAPES)
    def store(self, group: int, hosts: list[int], skip: int, cut: int) -> None:
        if len(hosts) == 1 and skip + cut >= FACTOR:
            return
        group %= self.sizes
        job = self.resolve(Direction.STORE, group, hosts, skip, cut)
        self.states.submit_store(job.serial, job.blocks)
        self.cells.clear([host for host in hosts if self.cells.group.get(host, group) != group])
        self.cells.group.update(dict.fromkeys(hosts, group))
        for cell in list(self.cells.unverified):
            if cell[0] in hosts:
                self.cells.clear([cell[0]])
        self.cells.content.update(dict.fromkeys(job.cells, job.serial))
        self.queue.append(job)

    @rule(**SHAPES)
    def load(self, group: int, hosts: list[int], skip: int, cut: int) -> None:
        if len(hosts) == 1 and skip + cut >= FACTOR:
            return
        group %= self.sizes
        job = self.resolve(Direction.LOAD, group, hosts, skip, cut)
        cells = self.cells
        found = [cells.content.get(cell) for cell in job.cells]
        stale = {
            str(cell[0])
            for cell, serial in zip(job.cells, found, strict=True)
            if serial is None or cell in cells.unverified or cells.group[cell[0]] != group
        }
        if stale:
            with pytest.raises(Refused) as caught:
                self.states.required_stores(job.blocks)
            assert caught.value.code == Code.STALE
            assert caught.value.value in stale
            return
        job.requires = self.states.required_stores(job.blocks)
        assert set(job.requires) == {serial for serial in found if serial not in self.done}
        self.queue.append(job)

    @precondition(lambda self: self.queue)
    @rule(done=st.sampled_from([True, True, False]))
    def end(self, done: bool) -> None:
        """End the oldest job."""
        job = self.queue.pop(0)
        if job.direction is Direction.LOAD:
            return
        self.states.end_store(job.serial, job.blocks, done=done)
        if done:
            self.done.add(job.serial)
            return
        for cell, serial in list(self.cells.content.items()):
            if serial == job.serial:
                del self.cells.content[cell]

    @precondition(lambda self: self.queue)
    @rule(which=st.integers(0, 5))
    def cancel(self, which: int) -> None:
        """Cancel a job, which ends at once, although the jobs before it have not ended."""
        self.queue.insert(0, self.queue.pop(which % len(self.queue)))
        self.end(done=False)

    @precondition(lambda self: not self.queue)
    @rule()
    def restart(self) -> None:
        """Restore the committed blocks in another daemon."""
        committed = self.stored_parts()
        commit_all(self.table)
        self.table = next_table(self.table, 0)
        self.states = BlockStates.for_layout(self.layout, self.table)
        self.states.restore_blocks()
        kept = {(h, sub) for h, part in committed.items() for sub in range(*part)}
        if self.sizes > 1:
            kept = set()
        assert kept <= self.cells.content.keys()
        self.cells.content = {cell: self.cells.content[cell] for cell in kept}
        self.cells.unverified = set(kept)

    @rule(good=HOST_SETS, bad=HOST_SETS)
    def compare(self, good: set[int], bad: set[int]) -> None:
        """Some blocks match their checksums, others are corrupt."""
        self.states.mark_verified(np.array(sorted(good), dtype=np.int64))
        self.states.discard_blocks(np.array(sorted(bad), dtype=np.int64))
        cells = self.cells
        cells.unverified -= {cell for cell in cells.unverified if cell[0] in good}
        for cell, serial in list(cells.content.items()):
            if cell[0] in bad and serial in self.done:
                del cells.content[cell]
                cells.unverified.discard(cell)

    def stored_parts(self) -> dict[int, tuple[int, int]]:
        """The sub-blocks of each host block that the next daemon may load."""
        hosts = self.table.find(*WITH_CONTENTS).tolist()
        return {host: self.table.part(host) or (0, FACTOR) for host in hosts}

    @invariant()
    def stored_blocks_have_loadable_bytes_and_no_store_in_flight(self) -> None:
        if not hasattr(self, "states"):
            return
        self.table.check_integrity()
        written = {
            int(host)
            for job in self.queue
            if job.direction is Direction.STORE
            for host in job.blocks.host_blocks
        }
        assert not written & self.stored_parts().keys()
        unverified = {host for host, _ in self.cells.unverified}
        assert unverified == {*self.table.find(*UNCHECKED).tolist()}
        sub_blocks = np.argwhere(self.states._by_block == _UNVERIFIED).tolist()
        assert {(host, sub) for host, sub in sub_blocks} == self.cells.unverified
        for host, part in self.stored_parts().items():
            assert part[0] < part[1]
            for sub in range(*part):
                assert self.cells.content[host, sub] in self.done


@pytest.mark.parametrize("sizes", PAGES)
def test_blocks_load_by_number_if_their_store_completed(sizes: int) -> None:
    machine = type("BlockStatesMachine", (BlockStatesMachine,), {"sizes": sizes})
    run_state_machine_as_test(machine, settings=settings(max_examples=150, stateful_step_count=40))
