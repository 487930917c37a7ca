"""Epochs of namespaces: a drop of a namespace on one host is seen on all.

The keys of a namespace are those of its epoch, a random number, so that no epoch is used again. The
store has two pinned objects for it:

    kvferry/NAME/epoch          the pointer: its contents are the epoch, in decimal
    kvferry/NAME/epoch/EPOCH    the marker: without it, the epoch is not valid

A daemon that finds no valid epoch chooses one: it puts the marker, then the pointer. The store
keeps the first pointer that is put, and all daemons read that one. A marker is put once, so an
epoch that has lost it stays invalid. A drop removes the marker. Both may also be lost with their
store or master, which counts as a drop. A lookup asks for its keys and for the marker in one
request. `refresh` reads the pointer again: another daemon may have replaced it while its marker
exists. A drop names what it removes: a pattern takes a second for a million keys. Any thread.
"""

from __future__ import annotations

import mmap
import secrets
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import structlog

from kvferry.daemon.tiers.block_memory import BounceBuffer
from kvferry.daemon.tiers.mooncake.store_client import NO_SPACE, NOT_FOUND, StoreClient, StoreError

# The store was not asked yet; no epoch is valid, since the store has no room for a new one.
UNKNOWN, NO_EPOCH = -1, 0
# Epochs are below this, so that they fit an int64.
END_OF_EPOCHS = 1 << 62
OBJECT_BYTES = 64
# Seconds for which an epoch is kept that nobody asks for. The daemon asks every second for those of
# the namespaces that it has.
KEPT = 10.0
# Attempts to choose an epoch. Each drop by another host in the meantime takes one.
MAX_ATTEMPTS = 4

log = structlog.get_logger()


@dataclass(slots=True)
class _Known:
    """The last known epoch of one namespace.

    asked: time of the last request for it, in seconds.
    """

    epoch: int = UNKNOWN
    asked: float = 0.0


class Epochs:
    def __init__(self, store: StoreClient) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._known: dict[str, _Known] = {}
        # Held while the buffer is in use, which has the contents of pointers and markers.
        self._settling = threading.RLock()
        self._buffer = BounceBuffer(mmap.PAGESIZE)
        store.register(self._buffer.address, self._buffer.nbytes)

    def last_known(self, name: str) -> int:
        """The epoch as far as known, NO_EPOCH or UNKNOWN. Asks nobody; `refresh` will."""
        with self._lock:
            known = self._known.setdefault(name, _Known())
            known.asked = time.monotonic()
            return known.epoch

    def known(self, name: str) -> int:
        """The epoch as far as known, or NO_EPOCH. The store is asked the first time. Raises
        StoreError."""
        epoch = self.last_known(name)
        return self._settle(name) if epoch == UNKNOWN else epoch

    def update(self, name: str, epoch: int, present: bool) -> bool:
        """Whether `epoch` is the epoch. present: whether the store has its marker. Raises
        StoreError."""
        if not present:
            self._settle(name)
        return self.last_known(name) == epoch

    def refresh(self) -> None:
        """Find the epochs of all namespaces that callers ask for. Raises StoreError."""
        with self._lock:
            oldest = time.monotonic() - KEPT
            self._known = {name: each for name, each in self._known.items() if each.asked >= oldest}
            wanted = {name: each.epoch for name, each in self._known.items()}
        if not wanted:
            return
        pointers = self._read_pointers(list(wanted))
        present = self._store.exist([marker(name, epoch) for name, epoch in wanted.items()])
        for (name, epoch), pointer, exists in zip(wanted.items(), pointers, present, strict=True):
            if (exists and pointer == epoch) or _is_unreadable(pointer):
                continue
            with suppress(StoreError):  # which lookups report
                self._settle(name)

    def begin_epoch(self, name: str) -> int:
        """End the epoch of a namespace, and begin another one. Raises StoreError."""
        with self._settling:
            ended = {*self._read_pointers([name]), self.last_known(name)}
            self._store.remove([marker(name, each) for each in ended])
            return self._settle(name)

    def _settle(self, name: str) -> int:
        """Find the valid epoch, or choose one. Raises StoreError."""
        with self._settling:
            for _ in range(MAX_ATTEMPTS):
                (found,) = self._read_pointers([name])
                if _is_unreadable(found):
                    raise StoreError.of_call(f"{_pointer(name)} cannot be read", found)
                if found > NO_EPOCH and all(self._store.exist([marker(name, found)])):
                    return self._note(name, found)
                self._end(name)
                if found != NOT_FOUND:
                    self._store.remove([_pointer(name)])
                # Chosen only now: nothing was put into it while another epoch was valid.
                if not self._put_epoch(name, 1 + secrets.randbelow(END_OF_EPOCHS - 1)):
                    return self._note(name, NO_EPOCH)
        raise StoreError(f"namespace {name} has no epoch: other hosts drop it all the time")

    def _note(self, name: str, epoch: int) -> int:
        with self._lock:
            self._known.setdefault(name, _Known(asked=time.monotonic())).epoch = epoch
        return epoch

    def _end(self, name: str) -> None:
        """A known epoch has ended: the daemon must not use its blocks, also if the store cannot be
        written now."""
        with self._lock:
            known = self._known.get(name)
            if known is None or known.epoch <= NO_EPOCH:
                return
            ended, known.epoch = known.epoch, NO_EPOCH
        log.info("epoch of namespace has ended", namespace=name, epoch=ended)

    def _put_epoch(self, name: str, epoch: int) -> bool:
        """Put a marker, then the pointer unless there is one. False if there is no room."""
        self._buffer.view[:OBJECT_BYTES] = str(epoch).encode().ljust(OBJECT_BYTES)
        for each in (marker(name, epoch), _pointer(name)):
            code = self._store.put_pinned(each, self._buffer.address, OBJECT_BYTES)
            if code == NO_SPACE:
                return False
            if code:
                raise StoreError.of_call(f"{each} cannot be put", code)
        return True

    def _read_pointers(self, names: Sequence[str]) -> list[int]:
        """The epoch that each pointer names, NO_EPOCH if it names none, or a code."""
        found = list[int]()
        count = self._buffer.nbytes // OBJECT_BYTES
        with self._settling:
            for at in range(0, len(names), count):
                pointers = [_pointer(name) for name in names[at : at + count]]
                places = range(0, len(pointers) * OBJECT_BYTES, OBJECT_BYTES)
                addresses = [[self._buffer.address + place] for place in places]
                codes = self._store.get(pointers, addresses, [[OBJECT_BYTES]] * len(pointers))
                for place, code in zip(places, codes, strict=True):
                    text = bytes(self._buffer.view[place : place + OBJECT_BYTES]).strip()
                    number = int(text) if text.isdigit() else NO_EPOCH
                    found.append(code if code < 0 else number)
        return found


def marker(name: str, epoch: int) -> str:
    """The object without which this epoch is not valid."""
    return f"{_pointer(name)}/{epoch}"


def _pointer(name: str) -> str:
    return f"kvferry/{name}/epoch"


def _is_unreadable(pointer: int) -> bool:
    """Whether a pointer may exist, but could not be read."""
    return pointer < 0 and pointer != NOT_FOUND
