"""Kept tensors in the descriptor store, so that they outlive the daemon.

    tensors-3.memory    the memory of the tensors
    tensors-3.label     the record of their engine and layout

If the store lost one of the two, the other is dropped. Event loop only.
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
    """Called by the loop alone."""

    def __init__(self, keeper: FdStore) -> None:
        self._keeper = keeper
        # Names by number of the registration that the tensors were allocated for.
        self._places: dict[int, str] = {}
        self._numbers = count(1)

    def take_up(
        self, kept: Mapping[str, int], restore: Callable[[KeptTensorsRecord], int]
    ) -> dict[int, int]:
        """What an earlier daemon kept: descriptors of memory, by the number that `restore` gave.

        `restore` raises Refused where tensors are of no use any more. Those are given up, and said.
        """
        found: dict[int, int] = {}
        places = {name.rpartition(".")[0] for name in kept if name.startswith(TENSORS)}
        for place in sorted(places, key=number_of):
            memory, label = kept.get(place + MEMORY), kept.get(place + LABEL)
            try:
                if memory is None:
                    message = f"descriptor {place}{MEMORY} is missing"
                    raise Refused(Code.BAD_LAYOUT, message, place)
                number = restore(_read(label))
            except KVFerryError as error:
                log.warning("kept tensors dropped", name=place, reason=str(error))
                self._forget(place)
                if memory is not None:
                    os.close(memory)
            else:
                self._places[number], found[number] = place, memory
            finally:
                if label is not None:
                    os.close(label)
        self._numbers = count(1 + max(map(number_of, places), default=0))
        return found

    def put(self, shelve: KeepTensors) -> None:
        (memory,) = shelve.descriptors
        place = self._places[shelve.registration] = f"{TENSORS}{next(self._numbers)}"
        label = os.memfd_create("kvferry-label", os.MFD_CLOEXEC)
        try:
            os.write(label, encode_record(shelve.tenancy))
            self._keeper.keep(place + LABEL, label)
            self._keeper.keep(place + MEMORY, memory)
        finally:
            os.close(label)

    def remove(self, number: int) -> None:
        """Tensors are kept no longer, if they were."""
        place = self._places.pop(number, None)
        if place is not None:
            self._forget(place)

    def _forget(self, place: str) -> None:
        self._keeper.forget(place + LABEL)
        self._keeper.forget(place + MEMORY)


def _read(label: int | None) -> KeptTensorsRecord:
    if label is None:
        raise Refused(Code.BAD_LAYOUT, "the descriptor of the tensors' record is missing")
    try:
        return decode_record(os.pread(label, os.fstat(label).st_size, 0), KeptTensorsRecord)
    except (msgspec.DecodeError, OSError) as error:
        message = f"the tensors' record cannot be read: {error}"
        raise Refused(Code.BAD_LAYOUT, message) from error
