"""Weakened comparisons, each of which loses bytes: test_sibling_cores_mutants.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np

from kvferry.daemon.core.block_lines import BlockLines
from kvferry.daemon.core.block_table import BlockTable
from kvferry.daemon.core.borrowed import BorrowedBlocks
from kvferry.daemon.core.cache.cache import Cache
from kvferry.daemon.core.cache.deferred_free import DeferredFree
from kvferry.daemon.core.namespace import Namespace
from kvferry.daemon.memory.incarnation import PoolIncarnation
from kvferry.daemon.persistence.region_store import RegionStore
from kvferry.daemon.persistence.table_file import (
    COMPOSITION_WORD,
    INCARNATION_WORD,
    MAGIC_VALUE,
    MAGIC_WORD,
    TableFile,
)
from kvferry.daemon.siblings import lent_table
from kvferry.daemon.siblings.lent_table import LentTable, LineCopies
from kvferry.proto.specs import Direction

_ONE = np.uint32(1)
_HEAD = np.arange(4)
Mutant = Callable[[], AbstractContextManager[Any]]


def _usable(*, parity: bool = True, key: bool = True, part: bool = True, epoch: bool = True) -> Any:
    def usable(lines: LineCopies, keys: Any, current: int) -> Any:
        good = np.ones(len(lines.versions), np.bool_)
        if parity:
            good &= lines.versions & _ONE == _ONE
        if key:
            good &= lines.keys == keys
        if part:
            good &= lines.parts[:, 1] == 0
        if epoch:
            good &= lines.epochs == current
        return good

    return patch.object(lent_table, "usable", usable)


def _valid(*, composition: bool = True, incarnation: bool = True) -> Any:
    def is_valid(self: LentTable) -> bool:
        head = self._head.copy(_HEAD).tolist()
        return bool(
            (head[MAGIC_WORD] == MAGIC_VALUE or not composition)
            and (head[COMPOSITION_WORD] == self._composition or not composition)
            and (head[INCARNATION_WORD] == self._incarnation.read() or not incarnation)
        )

    return patch.object(LentTable, "_is_valid", is_valid)


def _ignore_version(self: LentTable, blocks: Any, _versions: Any) -> Any:
    return np.full(blocks.size, self._is_valid())


def _compare_version_only(self: LentTable, blocks: Any, versions: Any) -> Any:
    return self._columns[0].copy(blocks) == versions


def _read_version_last(self: LentTable, blocks: Any) -> LineCopies:
    version, *others = self._columns
    keys, parts, epochs = (column.copy(blocks) for column in others)
    return LineCopies(version.copy(blocks), keys, parts, epochs)


@contextmanager
def _toggled(change: Callable[[Any], Any]) -> Iterator[None]:
    """Each transition changes the version in the same way."""

    def toggle(self: BlockLines, blocks: Any) -> None:
        self._versions[blocks] = change(self._versions[blocks])

    with (
        patch.object(BlockLines, "_make_even", toggle),
        patch.object(BlockLines, "validate", toggle),
    ):
        yield


def _draw_nothing() -> Any:
    make = PoolIncarnation.__init__

    def keep(self: PoolIncarnation, kept: int | None = None) -> None:
        make(self, kept)
        if kept is not None:
            self.number -= 1
            _write_page(self)

    return patch.object(PoolIncarnation, "__init__", keep)


def _write_page(incarnation: PoolIncarnation) -> None:
    import os

    os.pwrite(incarnation.descriptor, incarnation.number.to_bytes(8, "little"), 0)


def _set_pending(self: BlockTable, blocks: Any) -> None:
    self._move(blocks, 2, "reserved")
    self.lines._committed[blocks] = False
    self.lines.touch(blocks)


def _void_late() -> Any:
    """A freed region is marked as void a few changes of regions later."""
    apply, late = RegionStore._drop_file, list[Any]()

    def drop(self: RegionStore, name: str, file: TableFile) -> None:
        self._fd_store.remove_fd(name)
        late.append((self, name, file))
        if len(late) > 3:
            apply(*late.pop(0))

    return patch.object(RegionStore, "_drop_file", drop)


def _check_loads_only() -> Any:
    check = Namespace._check_epoch

    def check_epoch(self: Namespace, direction: Direction, host: Any) -> None:
        if direction is Direction.LOAD:
            check(self, direction, host)

    return patch.object(Namespace, "_check_epoch", check_epoch)


def _begin_epoch(self: BlockTable, epoch: int) -> None:
    self.epoch = epoch


MUTANTS: dict[str, Mutant] = {
    "the version is not compared after the copy": partial(
        patch.object, LentTable, "unchanged", _ignore_version
    ),
    "nothing is compared after the copy": partial(
        patch.object, BorrowedBlocks, "changed_keys", lambda _: []
    ),
    "the head is not compared after the copy": partial(
        patch.object, LentTable, "unchanged", _compare_version_only
    ),
    "the version is read last": partial(
        patch.object, LentTable, "_copy_lines", _read_version_last
    ),
    "the parity is ignored": partial(_usable, parity=False),
    "the version is inverted": partial(_toggled, lambda versions: versions ^ _ONE),
    "the version is counted": partial(_toggled, lambda versions: versions + _ONE),
    "the epoch of a line is ignored": partial(_usable, epoch=False),
    "keys are compared by hash": partial(_usable, key=False),
    "the part is ignored": partial(_usable, part=False),
    "the composition is ignored": partial(_valid, composition=False),
    "the incarnation is ignored": partial(_valid, incarnation=False),
    "no incarnation is drawn": _draw_nothing,
    "a reserved block keeps its version": partial(
        patch.object, BlockTable, "set_pending", _set_pending
    ),
    "a freed table is not void": partial(patch.object, TableFile, "mark_void", lambda _: None),
    "a freed table is void late": _void_late,
    "a store is of any epoch": _check_loads_only,
    "an adopted epoch empties nothing": partial(
        patch.multiple, BlockTable, begin_epoch=_begin_epoch
    ),
}
