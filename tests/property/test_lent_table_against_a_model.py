"""A sibling reads a block table while its owner writes it, is killed, restarts, and gives it away.

Each rule of the table, of its readers and of its writers is needed: without it a load returns wrong
bytes (MUTANTS).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import pytest

from kvferry.daemon.core.block_lines import BlockLines
from kvferry.daemon.core.block_table import PENDING, BlockTable
from kvferry.daemon.memory.incarnation import PoolIncarnation
from kvferry.daemon.persistence.table_file import INCARNATION_WORD, MAGIC_WORD, TableFile
from kvferry.daemon.siblings import lent_table
from kvferry.daemon.siblings.lent_table import LentTable, LineCopies
from support.shared_memory_model import WriterModel, play

# Runs without a mutant, and at most with one.
RUNS, MOST_RUNS = 600, 6000
_ONE = np.uint32(1)


def test_a_load_returns_the_bytes_of_its_key_or_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    accepted = 0
    for seed in range(RUNS):
        with monkeypatch.context() as patch:
            accepted += play(seed, patch)
    assert accepted > RUNS


# Readers


def usable_without(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    def mutate(patch: pytest.MonkeyPatch) -> None:
        usable = lent_table.usable

        def without(lines: LineCopies, keys: Any, epoch: int) -> Any:
            fine = {
                "versions": np.ones_like(lines.versions),
                "keys": keys,
                "parts": np.zeros_like(lines.parts),
                "epochs": np.full_like(lines.epochs, epoch),
            }
            return usable(lines._replace(**{name: fine[name]}), keys, epoch)

        patch.setattr(lent_table, "usable", without)

    return mutate


def without_version(patch: pytest.MonkeyPatch) -> None:
    def unchanged(self: LentTable, blocks: Any, versions: Any) -> Any:
        return np.full(len(blocks), self._is_valid())

    patch.setattr(LentTable, "unchanged", unchanged)


def valid_without(*words: str) -> Callable[[pytest.MonkeyPatch], None]:
    def mutate(patch: pytest.MonkeyPatch) -> None:
        def is_valid(self: LentTable) -> bool:
            head = self._head.copy(np.arange(4)).tolist()
            pairs = {
                "void": (head[MAGIC_WORD] != 0, True),
                "composition": (head[2], self._composition),
                "incarnation": (head[INCARNATION_WORD], self._incarnation.read()),
            }
            return all(one == other for name, (one, other) in pairs.items() if name not in words)

        patch.setattr(LentTable, "_is_valid", is_valid)

    return mutate


def version_last(patch: pytest.MonkeyPatch) -> None:
    def copy_lines(self: LentTable, blocks: Any) -> LineCopies:
        versions, *others = self._columns
        copies = [column.copy(blocks) for column in others]
        return LineCopies(versions.copy(blocks), *copies)

    patch.setattr(LentTable, "_copy_lines", copy_lines)


# Writers


def toggled_versions(patch: pytest.MonkeyPatch) -> None:
    def toggle(self: BlockLines, blocks: Any) -> None:
        self._versions[blocks] += _ONE

    patch.setattr(BlockLines, "_make_even", toggle)
    patch.setattr(BlockLines, "validate", toggle)


def version_before_the_rest(patch: pytest.MonkeyPatch) -> None:
    store = BlockLines.store

    def store_late(self: BlockLines, blocks: Any, *others: Any) -> None:
        self.validate(blocks)
        store(self, blocks, *others)

    patch.setattr(BlockLines, "store", store_late)


def pending_with_a_version(patch: pytest.MonkeyPatch) -> None:
    def set_pending(self: BlockTable, blocks: Any) -> None:
        self._move(blocks, PENDING, "reserved")
        self.lines._committed[blocks] = False
        self.lines.touch(blocks)

    patch.setattr(BlockTable, "set_pending", set_pending)


def bytes_before_the_version(patch: pytest.MonkeyPatch) -> None:
    invalidate, write = BlockLines.invalidate, WriterModel.write_bytes
    late = list[Any]()

    def invalidate_late(self: BlockLines, blocks: Any) -> None:
        late.append((self, blocks))

    def write_first(self: WriterModel, *arguments: Any, **options: Any) -> None:
        write(self, *arguments, **options)
        while late:
            invalidate(*late.pop())

    patch.setattr(BlockLines, "invalidate", invalidate_late)
    patch.setattr(WriterModel, "write_bytes", write_first)


def restart_with_odd_versions(patch: pytest.MonkeyPatch) -> None:
    restore = BlockLines.restore

    def restore_odd(self: BlockLines, epoch: int) -> Any:
        with pytest.MonkeyPatch.context() as other:
            other.setattr(BlockLines, "_make_even", lambda *_: None)
            return restore(self, epoch)

    patch.setattr(BlockLines, "restore", restore_odd)


def void_late(patch: pytest.MonkeyPatch) -> None:
    def free_region(self: WriterModel) -> None:
        self.overwrite_all()
        TableFile.mark_void(self.file)
        self.open_table(TableFile.create(self.file.record))

    patch.setattr("support.shared_memory_model.OPERATIONS", [WriterModel.store] * 4 + [free_region])


def incarnation_late(patch: pytest.MonkeyPatch) -> None:
    def restart_without_table(self: WriterModel) -> None:
        self.overwrite_all()
        self.page = PoolIncarnation(self.page.descriptor)
        self.open_table(TableFile.create(self.file.record))

    operations = [WriterModel.store] * 4 + [restart_without_table]
    patch.setattr("support.shared_memory_model.OPERATIONS", operations)


MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "reader: version": without_version,
    "reader: parity": usable_without("versions"),
    "reader: key": usable_without("keys"),
    "reader: part": usable_without("parts"),
    "reader: epoch": usable_without("epochs"),
    "reader: void": valid_without("void", "composition"),
    "reader: composition": valid_without("composition"),
    "reader: incarnation": valid_without("incarnation"),
    "reader: version last": version_last,
    "writer: toggled versions": toggled_versions,
    "writer: version before the rest": version_before_the_rest,
    "writer: pending with a version": pending_with_a_version,
    "writer: bytes before the version": bytes_before_the_version,
    "writer: odd versions after a restart": restart_with_odd_versions,
    "writer: void late": void_late,
    "writer: incarnation late": incarnation_late,
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_without_a_rule_a_load_returns_wrong_bytes(
    mutant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    MUTANTS[mutant](monkeypatch)
    for seed in count():
        assert seed < MOST_RUNS, "the mutant survives"
        with monkeypatch.context() as patch:
            try:
                play(seed, patch)
            except AssertionError as error:
                if "instead of" in str(error):
                    return
