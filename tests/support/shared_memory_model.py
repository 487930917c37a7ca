"""A block table in shared memory: its writer, a reader at a sibling, and what a load may return.

Both run the daemon's own code, one step at a time: a step is one store to or one read from shared
memory. A random schedule decides whose step is next, and where the writer is killed.

The model is plain: a load of a key in an epoch returns the bytes that were stored under this key,
in this epoch, for this composition of host blocks, or it is a miss.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest

from kvferry.daemon.core.block_table import FREE, OCCUPIED, UNCOMMITTED, BlockTable
from kvferry.daemon.memory.foreign_memory import ForeignColumn, SharedWords
from kvferry.daemon.memory.incarnation import PoolIncarnation
from kvferry.daemon.persistence.table_file import TableFile
from kvferry.daemon.siblings.lent_table import LentTable, SoughtKeys
from kvferry.proto.errors import Refused
from support.lent_region import key, record_of

BLOCKS, KEYS, FACTOR = 3, 3, 2
GARBAGE = -1


class WriterKilledError(Exception):
    """SIGKILL between two stores."""


class Schedule:
    """Whose step is next. kill_at: the step of the writer at which it is killed; 0: never."""

    def __init__(self, rng: random.Random, kill_at: int) -> None:
        self._rng, self._kill_at = rng, kill_at
        self._turns = [threading.Semaphore(0), threading.Semaphore(0)]
        self._ended = [False, False]
        self._threads: list[int] = [0, 0]
        self._steps = 0

    def run(self, writer: Callable[[], None], reader: Callable[[], None]) -> None:
        """Run both to their ends. Raises what the reader raises."""
        errors: list[BaseException] = []

        def read() -> None:
            self._threads[1] = threading.get_ident()
            self._turns[1].acquire()
            try:
                reader()
            except BaseException as error:
                errors.append(error)
            self._end(1)

        thread = threading.Thread(target=read)
        self._threads[0] = threading.get_ident()
        thread.start()
        try:
            writer()
        finally:
            self._end(0)
            thread.join()
        for error in errors:
            raise error

    def step(self) -> None:
        """The next step of this thread follows, perhaps after some of the other."""
        who = threading.get_ident()
        if who not in self._threads:
            return
        me = self._threads.index(who)
        if me == 0:
            self._steps += 1
            if self._steps == self._kill_at:
                raise WriterKilledError
        other = 1 - me
        if not self._ended[other] and self._rng.random() < 0.4:
            self._turns[other].release()
            self._turns[me].acquire()

    def _end(self, me: int) -> None:
        self._ended[me] = True
        self._turns[1 - me].release()


_schedule: Schedule | None = None


def step() -> None:
    if _schedule is not None:
        _schedule.step()


class SteppedArray(np.ndarray[Any, Any]):
    """An array each of whose stores is a step."""

    def __setitem__(self, at: Any, value: Any) -> None:
        step()
        super().__setitem__(at, value)


@contextmanager
def stepped(schedule: Schedule, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each access to shared memory is a step."""
    global _schedule
    copy, read, write = ForeignColumn.copy, ForeignColumn.read, SharedWords.write

    def before(function: Callable[..., Any]) -> Callable[..., Any]:
        def stepped_function(*arguments: Any) -> Any:
            step()
            return function(*arguments)

        return stepped_function

    patch.setattr(ForeignColumn, "copy", before(copy))
    patch.setattr(ForeignColumn, "read", before(read))
    patch.setattr(SharedWords, "write", before(write))
    _schedule = schedule
    try:
        yield
    finally:
        _schedule = None


class WriterModel:
    """The owner of a region: stores, evicts, resets, restarts, and loses the region.

    pool: the contents of each block, (BLOCKS, 2): one number in each half, so that a block which is
    half written shows. epoch: the page's.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.pool = np.full((BLOCKS, 2), GARBAGE)
        self.epoch = self.composition = 0
        self.page = PoolIncarnation()
        # All tables so far: the reader has mapped the first one.
        self._files = list[TableFile]()
        self.open_table(TableFile.create(record_of(blocks=BLOCKS)))
        self.file.sign(self.page.number)
        self.pages = self.file.record.pages

    def open_table(self, file: TableFile) -> None:
        self._files.append(file)
        self.file, self.table = file, BlockTable(BLOCKS, 8)
        self.table.lines.use_memory(file.lines.view(SteppedArray))
        self.table.share_keys(file.buckets.view(SteppedArray))
        if self.epoch:
            self.table.begin_epoch(self.epoch)

    def content(self, number: int, epoch: int, composition: int) -> int:
        return 1 + number + KEYS * (epoch + 100 * composition)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            try:
                self._rng.choice(OPERATIONS)(self)
            except WriterKilledError:
                self.restart()

    def store(self) -> None:
        outcome = self._rng.choice(("whole", "whole", "whole", "part", "failed"))
        block, number = self._rng.randrange(BLOCKS), self._rng.randrange(KEYS)
        some, table = np.array([block]), self.table
        table.drop(some[table.among(some, *OCCUPIED)])
        table.set_pending(some)
        content = self.content(number, self.table.epoch, self.composition)
        self.write_bytes(block, content, halves=2 if outcome == "whole" else 1)
        if outcome == "failed":
            table.drop(some)
            return
        table.set_stored(some, [key(number)], {block: (0, 1)} if outcome == "part" else {})

    def write_bytes(self, block: int, content: int, halves: int = 2) -> None:
        for half in range(halves):
            step()
            self.pool[block, half] = content

    def commit(self) -> None:
        some = self.table.find(*UNCOMMITTED)
        self.table.commit(some, self.table.lines.versions(some), some.astype(np.uint64))

    def evict(self) -> None:
        self.table.drop(self.table.find(*OCCUPIED)[:1])

    def reset(self) -> None:
        self.epoch += 1  # the page
        step()
        self.table.begin_epoch(self.epoch)

    def restart(self) -> None:
        """The next daemon has pool and table. It verifies some blocks: those with the right bytes
        stay, as their checksums say; one of them may be corrupt."""
        self.page = PoolIncarnation(self.page.descriptor)
        if self._rng.random() < 0.5:
            self.write_bytes(self._rng.randrange(BLOCKS), GARBAGE)
        try:
            file = TableFile(os.dup(self.file.descriptor))
        except Refused:  # it is void
            file = TableFile.create(self.file.record)
        self.adopt(file)
        found = self.table.find(*OCCUPIED)
        for block, name in zip(found.tolist(), self.table.lines.keys(found), strict=True):
            one = np.array([block])
            part = self.table.part(block)
            content = self.content(int.from_bytes(name), self.epoch, self.composition)
            if (self.pool[block, : 2 if part is None else 1] == content).all():
                self.table.set_verified(one)
            else:
                self.table.drop(one)

    def adopt(self, file: TableFile) -> None:
        self.open_table(file)
        self.composition = int(file.record.pages != self.pages)
        self.table.restore(FACTOR)
        file.sign(self.page.number)

    def restart_without_table(self) -> None:
        """The next daemon has the pool, and a new table."""
        self.page = PoolIncarnation(self.page.descriptor)
        self.open_table(TableFile.create(self.file.record))
        self.file.sign(self.page.number)
        self.overwrite_all()

    def free_region(self) -> None:
        """The range is given to another owner, which writes into it."""
        self.file.mark_void()
        self.overwrite_all()
        self.open_table(TableFile.create(self.file.record))
        self.file.sign(self.page.number)

    def overwrite_all(self) -> None:
        for block in range(BLOCKS):
            self.write_bytes(block, GARBAGE)

    def recompose(self) -> None:
        """Engines with other host blocks use the region, which is empty."""
        some = self.table.find(*OCCUPIED)
        if some.size:
            self.table.drop(some)
        pages = self.pages if self.composition else ((100, 200),)
        self.file.update(msgspec.structs.replace(self.file.record, pages=pages))
        self.composition = 1 - self.composition

    def check(self) -> None:
        self.table.check_integrity()
        assert self.table.count(FREE) + self.table.count(*OCCUPIED) == BLOCKS

    def close(self) -> None:
        for file in self._files:
            file.close()
        os.close(self.page.descriptor)


OPERATIONS: list[Callable[[WriterModel], None]] = [
    *[WriterModel.store] * 12,
    *[WriterModel.commit] * 2,
    *[WriterModel.evict] * 2,
    WriterModel.reset,
    WriterModel.restart,
    WriterModel.restart_without_table,
    WriterModel.free_region,
    WriterModel.recompose,
]


class ReaderModel:
    """A sibling, which has mapped the table as it was at first."""

    def __init__(self, rng: random.Random, writer: WriterModel) -> None:
        self._rng, self._writer = rng, writer
        file, page = writer.file, writer.page
        self._table = LentTable(file.descriptor, page.descriptor, file.record.composition)
        self.accepted = 0

    def run(self, loads: int) -> None:
        for _ in range(loads):
            self.load(self._rng.randrange(KEYS))

    def load(self, number: int) -> None:
        epoch = self._writer.epoch
        blocks, versions = self._table.find(SoughtKeys.of([key(number)]), epoch)
        if blocks[0] < 0:
            return
        halves = []
        for half in range(2):
            step()
            halves.append(int(self._writer.pool[blocks[0], half]))
        if self._table.unchanged(blocks, versions)[0]:
            self.accepted += 1
            expected = self._writer.content(number, epoch, 0)
            assert halves == [expected] * 2, f"{halves} instead of {expected}"


def play(seed: int, patch: pytest.MonkeyPatch) -> int:
    """One random run. Returns the number of loads that were accepted; raises AssertionError if one
    of them has other bytes than the model."""
    rng = random.Random(seed)
    writer = WriterModel(rng)
    for _ in range(rng.randrange(2, 6)):
        writer.store()
    reader = ReaderModel(rng, writer)
    schedule = Schedule(rng, rng.choice((0, rng.randrange(1, 60))))
    with stepped(schedule, patch):
        schedule.run(lambda: writer.run(8), lambda: reader.run(20))
    writer.check()
    writer.close()
    return reader.accepted
