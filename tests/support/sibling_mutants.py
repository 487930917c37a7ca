"""Weakened comparisons, each of which loses bytes: test_sibling_cores_mutants.py."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from threading import get_ident
from typing import Any
from unittest.mock import patch

import numpy as np

from kvferry.daemon.core import keyed_transfers
from kvferry.daemon.core.block_lines import BlockLines
from kvferry.daemon.core.block_table import PENDING, BlockTable
from kvferry.daemon.core.borrowed import BorrowedBlocks
from kvferry.daemon.core.cache.deferred_free import DeferredFree
from kvferry.daemon.core.namespace import Namespace
from kvferry.daemon.core.namespaces import Namespaces
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
from support.shared_accesses import WRITE, SharedArray

_ONE = np.uint32(1)
_STORE = BlockLines.store
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
    os.pwrite(incarnation.descriptor, incarnation.number.to_bytes(8, "little"), 0)


def _set_pending(self: BlockTable, blocks: Any) -> None:
    self._move(blocks, PENDING, "reserved")
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
    check = keyed_transfers._check_epoch

    def check_epoch(namespace: Namespace, direction: Direction, host: Any) -> None:
        if direction is Direction.LOAD:
            check(namespace, direction, host)

    return patch.object(keyed_transfers, "_check_epoch", check_epoch)


def _adopt_only(self: Namespace, epoch: int) -> DeferredFree:
    self.is_behind = False
    self.region.table.epoch = epoch
    self._update_contents()
    return DeferredFree()


def _store_version_first(self: BlockLines, blocks: Any, keys: Any, parts: Any, epoch: int) -> None:
    self.validate(blocks)
    _STORE(self, blocks, keys, parts, epoch)


def _restore_odd(self: BlockLines, epoch: int) -> Any:
    """The lines of committed blocks stay as they are."""
    blocks = self.committed(epoch)
    blocks = blocks[np.argsort(self._stamps[blocks], kind="stable")]
    return blocks, self.keys(blocks)


def _restore_any_epoch() -> Any:
    committed = BlockLines.committed

    def all_committed(self: BlockLines, epoch: int) -> Any:
        blocks = np.flatnonzero(np.asarray(self._committed))
        self.memory["epoch"][blocks] = epoch
        return committed(self, epoch)

    return patch.object(BlockLines, "committed", all_committed)


def _drop_nothing(self: BlockLines, blocks: Any) -> None:
    self._committed[blocks] = False


@contextmanager
def _signed_before_the_draw() -> Iterator[None]:
    """The tables are signed with the next incarnation, and then it is drawn."""
    make, restore = PoolIncarnation.__init__, RegionStore.restore_regions
    made = dict[int, PoolIncarnation]()

    def draw_later(self: PoolIncarnation, kept: int | None = None) -> None:
        make(self, kept)
        made.pop(get_ident(), None)
        if kept is not None:
            made[get_ident()] = self
            os.pwrite(kept, (self.number - 1).to_bytes(8, "little"), 0)

    def restore_and_draw(self: RegionStore, *arguments: Any) -> None:
        restore(self, *arguments)
        if (each := made.pop(get_ident(), None)) is not None:
            SharedArray.before(WRITE)
            _write_page(each)

    with (
        patch.object(PoolIncarnation, "__init__", draw_later),
        patch.object(RegionStore, "restore_regions", restore_and_draw),
    ):
        yield


def _behind_is_ignored() -> Any:
    adopt = Namespaces.adopt_epochs

    def adopt_and_forget(self: Namespaces, now: float) -> Any:
        actions = adopt(self, now)
        for namespace in self:
            namespace.is_behind = False
        return actions

    return patch.object(Namespaces, "adopt_epochs", adopt_and_forget)


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
    "the version is read last": partial(patch.object, LentTable, "_copy_lines", _read_version_last),
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
        patch.object, Namespace, "begin_epoch", _adopt_only
    ),
    "a namespace that is behind is used": _behind_is_ignored,
    "the version of a store is written first": partial(
        patch.object, BlockLines, "store", _store_version_first
    ),
    "a restart leaves versions as they are": partial(
        patch.object, BlockLines, "restore", _restore_odd
    ),
    "a restart adopts any epoch": _restore_any_epoch,
    "losing contents keeps the version": partial(
        patch.object, BlockLines, "invalidate", _drop_nothing
    ),
    "tables are signed before the draw": _signed_before_the_draw,
}
