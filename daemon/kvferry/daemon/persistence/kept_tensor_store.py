"""Kept tensors in the descriptor store, so that they outlive the daemon.

    tensors-3.memory    the memory of the tensors
    tensors-3.label     the record of their engine and layout

If one of the two is missing, the other is dropped. Event loop only.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from itertools import count

import msgspec
import structlog

from kvferry.daemon.core.actions import KeepTensors
from kvferry.daemon.core.records import KeptTensorsRecord, decode_record, encode_record
from kvferry.daemon.persistence.region_store import FdStore, number_of
from kvferry.proto.errors import Code, KVFerryError, Refused

# Prefix of the names of tensors' descriptors in the descriptor store.
TENSORS = "tensors-"
MEMORY, LABEL = ".memory", ".label"

log = structlog.get_logger()


class KeptTensorStore:
    """Kept tensors of all engines. fd_store: where their descriptors are stored."""

    def __init__(self, fd_store: FdStore) -> None:
        self._fd_store = fd_store
        # Names by number of the registration that the tensors were allocated for.
        self._names: dict[int, str] = {}
        self._numbers = count(1)

    def restore_tensors(
        self, kept: Mapping[str, int], restore: Callable[[KeptTensorsRecord], int]
    ) -> dict[int, int]:
        """Restore the tensors that an earlier daemon kept.

        Returns the descriptors of their memory, by the number that `restore` returned. If `restore`
        raises Refused, the tensors are dropped and a warning is logged.
        """
        found: dict[int, int] = {}
        names = {name.rpartition(".")[0] for name in kept if name.startswith(TENSORS)}
        for name in sorted(names, key=number_of):
            memory_fd, record_fd = kept.get(name + MEMORY), kept.get(name + LABEL)
            try:
                if memory_fd is None:
                    message = f"descriptor {name}{MEMORY} is missing"
                    raise Refused(Code.BAD_LAYOUT, message, name)
                number = restore(_read(record_fd))
            except KVFerryError as error:
                log.warning("kept tensors dropped", name=name, reason=str(error))
                self._remove_fds(name)
                if memory_fd is not None:
                    os.close(memory_fd)
            else:
                self._names[number], found[number] = name, memory_fd
            finally:
                if record_fd is not None:
                    os.close(record_fd)
        self._numbers = count(1 + max(map(number_of, names), default=0))
        return found

    def store_tensors(self, action: KeepTensors) -> None:
        """Store the memory and the record of tensors under a new name."""
        (memory_fd,) = action.descriptors
        name = self._names[action.registration] = f"{TENSORS}{next(self._numbers)}"
        record_fd = os.memfd_create("kvferry-label", os.MFD_CLOEXEC)
        try:
            os.write(record_fd, encode_record(action.record))
            self._fd_store.store_fd(name + LABEL, record_fd)
            self._fd_store.store_fd(name + MEMORY, memory_fd)
        finally:
            os.close(record_fd)

    def remove_tensors(self, number: int) -> None:
        """Stop keeping the tensors of a registration, if they are kept."""
        name = self._names.pop(number, None)
        if name is not None:
            self._remove_fds(name)

    def _remove_fds(self, name: str) -> None:
        self._fd_store.remove_fd(name + LABEL)
        self._fd_store.remove_fd(name + MEMORY)


def _read(record_fd: int | None) -> KeptTensorsRecord:
    if record_fd is None:
        raise Refused(Code.BAD_LAYOUT, "the descriptor of the tensors' record is missing")
    try:
        return decode_record(os.pread(record_fd, os.fstat(record_fd).st_size, 0), KeptTensorsRecord)
    except (msgspec.DecodeError, OSError) as error:
        message = f"the tensors' record cannot be read: {error}"
        raise Refused(Code.BAD_LAYOUT, message) from error
