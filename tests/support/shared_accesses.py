"""Observes each access to memory that daemons share, in this process.

    write    an item of a block table, an entry of a key table, a word of a head or of a page
    read     a column of a block table or of a key table, a head or a word

While `observed_accesses` is active, `before` is called before each access, and may raise or switch
to another thread: so a test runs other daemons between any two accesses, or kills a daemon there.
`written` is called after each write of a word. Items of an array are written one at a time, keys in
two parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np

from kvferry.daemon.core.block_lines import BlockLines, Lines
from kvferry.daemon.core.key_table import KeyTable
from kvferry.daemon.memory.foreign_memory import ForeignColumn, SharedWords

READ, WRITE = "read", "write"
Before = Callable[[str], None]


@contextmanager
def observed_accesses(before: Before, written: Callable[[], None]) -> Iterator[None]:
    """See the module. Arrays that are created meanwhile are observed as long as they exist."""
    with ExitStack() as stack:
        SharedArray.before = staticmethod(before)
        for owner, name, function in _replacements(before, written):
            stack.enter_context(patch.object(owner, name, function))
        stack.callback(setattr, SharedArray, "before", staticmethod(_ignore))
        yield


def _ignore(_: str) -> None:
    """Do nothing."""


class SharedArray(np.ndarray[Any, np.dtype[Any]]):
    """An array in shared memory. Its fields are shared, too; other parts of it are copies."""

    before: Before = staticmethod(_ignore)

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        is_copy = not isinstance(key, str) and isinstance(found, SharedArray)
        return np.asarray(found) if is_copy else found

    def __setitem__(self, key: Any, value: Any) -> None:
        places = _places(key)
        if places is None:
            self._write(key, value)
            return
        indices = len(key) if isinstance(key, tuple) else 1
        values = np.broadcast_to(np.asarray(value), (len(places), *self.shape[indices:]))
        for place, each in zip(places, values, strict=True):
            self._write(tuple(place), each)

    def _write(self, place: Any, value: Any) -> None:
        if self.dtype.kind == "V" and np.ndim(value) == 0:
            # A key: the first half is written before the second one.
            data, old = np.asarray(value, self.dtype).tobytes(), np.asarray(self)[place].tobytes()
            half = len(data) // 2
            SharedArray.before(WRITE)
            super().__setitem__(place, np.frombuffer(data[:half] + old[half:], self.dtype)[0])
        SharedArray.before(WRITE)
        super().__setitem__(place, value)


def _places(key: Any) -> list[tuple[int, ...]] | None:
    """The items that an index names, if it consists of arrays."""
    parts = key if isinstance(key, tuple) else (key,)
    arrays = [np.asarray(part) for part in parts]
    if any(array.ndim != 1 for array in arrays):
        return None
    if arrays[0].dtype == np.bool_:
        arrays = [np.flatnonzero(arrays[0])]
    return list(zip(*(array.tolist() for array in arrays), strict=True))


def _replacements(
    before: Before, written: Callable[[], None]
) -> Iterator[tuple[type, str, Callable[..., Any]]]:
    use_memory, make_keys = BlockLines.use_memory, KeyTable.__init__
    copy, read = ForeignColumn.copy, ForeignColumn.read
    read_word, write_word = SharedWords.read, SharedWords.write

    def use_observed(self: BlockLines, lines: Lines) -> None:
        use_memory(self, lines.view(SharedArray))
        self._stamps = lines["stamp"]  # siblings do not read it

    def make_observed(self: KeyTable, buckets: Any, *arguments: Any) -> None:
        make_keys(self, buckets.view(SharedArray), *arguments)

    def copy_observed(self: ForeignColumn, rows: Any) -> Any:
        before(READ)
        return copy(self, rows)

    def read_observed(self: ForeignColumn, row: int = 0) -> int:
        before(READ)
        return read(self, row)

    def read_word_observed(self: SharedWords, row: int) -> int:
        before(READ)
        return read_word(self, row)

    def write_word_observed(self: SharedWords, row: int, value: int) -> None:
        before(WRITE)
        write_word(self, row, value)
        written()

    yield BlockLines, "use_memory", use_observed
    yield KeyTable, "__init__", make_observed
    yield ForeignColumn, "copy", copy_observed
    yield ForeignColumn, "read", read_observed
    yield SharedWords, "read", read_word_observed
    yield SharedWords, "write", write_word_observed
