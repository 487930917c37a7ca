"""The slab files of a namespace, by number. Slab n has the slots from n times `slots_per_slab` on.

Any thread, except that `create` and `delete` must not run at the same time as each other.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from kvferry.daemon.tiers.disk.slab import SlabFile

if TYPE_CHECKING:
    from kvferry.daemon.tiers.block_cipher import BlockCipher

_PREFIX = "slab-"
# Of one namespace: each slab takes a descriptor, and no process has more.
_MAX_SLABS = 1 << 20

log = structlog.get_logger()


class Slabs:
    """Opens all slab files of a directory. Files that are too short or too long are deleted, and
    those with a name that no slab has. What cannot be opened as a file, such as a symbolic link, is
    left alone, and its number is not used. cipher: see SlabFile.
    """

    def __init__(
        self,
        directory: Path,
        slot_bytes: int,
        slots_per_slab: int,
        cipher: BlockCipher | None = None,
    ) -> None:
        self._directory, self._cipher = directory, cipher
        self._slot_bytes, self._slots = slot_bytes, slots_per_slab
        self._files: dict[int, SlabFile] = {}
        self._unusable: set[int] = set()
        try:
            for path in sorted(directory.glob(f"{_PREFIX}*")):
                number = slab_number(path)
                try:
                    slab = SlabFile(path, slot_bytes, slots_per_slab, cipher)
                except OSError as error:
                    log.warning("slab file skipped; its blocks are lost", reason=str(error))
                    if number is not None:
                        self._unusable.add(number)
                    continue
                if number is not None and slab.is_whole:
                    self._files[number] = slab
                else:
                    slab.delete()
        except BaseException:
            self.close()
            raise

    @property
    def numbers(self) -> list[int]:
        return list(self._files)

    @property
    def end(self) -> int:
        """No slot from this one on is in a file."""
        return (max(self._files, default=-1) + 1) * self._slots

    @property
    def nbytes(self) -> int:
        """Bytes of all files; those that cannot be used have theirs, too."""
        return (len(self._files) + len(self._unusable)) * self._slots * self._slot_bytes

    def slots_of(self, number: int) -> range:
        return range(number * self._slots, (number + 1) * self._slots)

    def place(self, slot: int) -> tuple[SlabFile, int]:
        """The slab file of a slot, and the slot's position in it."""
        number, at = divmod(slot, self._slots)
        return self._files[number], at

    def first_missing(self) -> int:
        taken = self._files.keys() | self._unusable
        return next(n for n in range(len(taken) + 1) if n not in taken)

    def create(self, number: int) -> None:
        """Raises OSError."""
        path = self._directory / _file_name(number)
        created = SlabFile.create(path, self._slot_bytes, self._slots, self._cipher)
        self._files[number] = created

    def truncated(self) -> list[int]:
        """Slabs whose files are shorter than their slots, because someone has truncated them."""
        return [number for number, slab in self._files.items() if not slab.is_whole]

    def delete(self, number: int) -> None:
        """None of its slots may be in use."""
        self._files.pop(number).delete()

    def take_written(self) -> list[int]:
        """Descriptors of files that were written since the last call; the caller closes them."""
        return [slab.start_sync() for slab in self._files.values() if slab.written]

    def close(self) -> None:
        for slab in self._files.values():
            slab.close()
        self._files.clear()


def slab_number(path: Path) -> int | None:
    """The number of a slab file; None if no slab has this name."""
    text = path.name.removeprefix(_PREFIX)
    if not text.isdecimal() or int(text) >= _MAX_SLABS or path.name != _file_name(int(text)):
        return None
    return int(text)


def _file_name(number: int) -> str:
    return f"{_PREFIX}{number:05}"
