"""Files that lose what was not synced, as in a power cut: in pages of 4 KiB, in any combination.

While `recorded` is active, writes of this process are noted with the contents that each page had
before and got since its file was synced last. `cut` gives each of these pages one of its contents,
at random, and undoes some of the renames whose directory was not synced. The sizes of files and
which files exist are kept: a journal of the file system has these.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PAGE = 4096


class PowerCuts:
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        # By path and page: its contents since the last sync of the file, in order.
        self._unsynced = dict[tuple[str, int], list[bytes]]()
        self._renames: list[tuple[str, str]] = []
        self.lost = self.undone = 0

    @contextmanager
    def recorded(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name in ("pwrite", "pwritev", "fsync", "fdatasync", "rename"):
                patch.setattr(os, name, getattr(self, f"_{name}")(getattr(os, name)))
            yield

    def cut(self) -> None:
        """The files must be closed."""
        for source, target in reversed(self._renames):
            if self._random.random() < 0.5 and os.path.exists(target):
                os.rename(target, source)
                self.undone += 1
        for (path, page), contents in self._unsynced.items():
            chosen = self._random.randrange(len(contents))
            if os.path.exists(path):
                self.lost += chosen < len(contents) - 1
                with open(path, "r+b") as file:
                    file.seek(page * PAGE)
                    file.write(contents[chosen])
        self._unsynced.clear()
        self._renames.clear()

    def _pwrite(self, call: Any) -> Any:
        def pwrite(descriptor: int, data: bytes, at: int) -> int:
            with self._noted(descriptor, at, len(data)):
                return int(call(descriptor, data, at))

        return pwrite

    def _pwritev(self, call: Any) -> Any:
        def pwritev(descriptor: int, parts: Sequence[memoryview], at: int) -> int:
            with self._noted(descriptor, at, sum(map(len, parts))):
                return int(call(descriptor, parts, at))

        return pwritev

    def _fsync(self, call: Any) -> Any:
        def fsync(descriptor: int) -> None:
            call(descriptor)
            synced = _path_of(descriptor)
            for written in [each for each in self._unsynced if each[0] == synced]:
                del self._unsynced[written]
            self._renames = [each for each in self._renames if os.path.dirname(each[1]) != synced]

        return fsync

    _fdatasync = _fsync

    def _rename(self, call: Any) -> Any:
        def rename(source: Path, target: Path) -> None:
            call(source, target)
            self._move(str(source), str(target))
            self._renames.append((str(source), str(target)))

        return rename

    def _move(self, source: str, target: str) -> None:
        for path, page in list(self._unsynced):
            if path == source or path.startswith(f"{source}/"):
                moved = target + path.removeprefix(source), page
                self._unsynced[moved] = self._unsynced.pop((path, page))

    @contextmanager
    def _noted(self, descriptor: int, at: int, nbytes: int) -> Iterator[None]:
        path = _path_of(descriptor)
        pages = range(at // PAGE, -(-(at + nbytes) // PAGE))
        with open(path, "rb") as file:
            for page in pages:
                if (path, page) not in self._unsynced:
                    self._unsynced[path, page] = [_read(file, page)]
            yield
            for page in pages:
                self._unsynced[path, page].append(_read(file, page))


def _read(file: Any, page: int) -> bytes:
    return bytes(os.pread(file.fileno(), PAGE, page * PAGE))


def _path_of(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")
