"""Epochs of namespaces: a drop of a namespace on one host is seen on all.

The keys of a namespace are those of its epoch. The epoch is the greatest number n for which the
store has the marker n of the namespace. A lookup asks for its keys, for the marker of the epoch
that it knows, and for the next one, all in one request. Markers are pinned, so the store does not
evict them; if some are lost with their owner, the next lookup puts them again. Any thread.
"""

from __future__ import annotations

import mmap
import threading
import time
from dataclasses import dataclass

import structlog

from kvferry.daemon.tiers.block_memory import BounceBuffer
from kvferry.daemon.tiers.mooncake.store_client import StoreClient, StoreError

# Markers that one request asks for. A daemon that starts finds the epoch if less are missing.
WINDOW = 64
MARKER_BYTES = 64
# Seconds for which a known epoch is used without another request.
FRESH = 1.0

log = structlog.get_logger()


@dataclass(slots=True)
class _Known:
    """The highest epoch of a namespace that was seen. asked: when, in seconds."""

    epoch: int = 0
    asked: float = 0.0


class Epochs:
    def __init__(self, store: StoreClient) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._known: dict[str, _Known] = {}
        # The contents of markers.
        self._buffer = BounceBuffer(mmap.PAGESIZE)
        store.register(self._buffer.address, self._buffer.nbytes)

    def known(self, name: str) -> int:
        """The epoch as far as known. The store is asked the first time. Raises StoreError."""
        with self._lock:
            known = self._known.get(name)
        return self._search(name, 0) if known is None else known.epoch

    def last_known(self, name: str) -> int:
        """The epoch as far as known; -1: not known. Asks nobody."""
        with self._lock:
            known = self._known.get(name)
        return -1 if known is None else known.epoch

    def refresh(self) -> None:
        """Look for later epochs of all known namespaces. Raises StoreError."""
        with self._lock:
            known = {name: each.epoch for name, each in self._known.items()}
        if not known:
            return
        later = self._store.exist([_marker(name, epoch + 1) for name, epoch in known.items()])
        for (name, epoch), exists in zip(known.items(), later, strict=True):
            if exists:
                self._search(name, epoch + 1)

    def learn(self, name: str, epoch: int) -> None:
        """An earlier process of this tier has seen this epoch, also if the store has lost it."""
        with self._lock:
            known = self._known.setdefault(name, _Known())
            known.epoch = max(known.epoch, epoch)

    def current(self, name: str) -> int:
        """The epoch as the store had it FRESH seconds ago at the earliest. Raises StoreError."""
        with self._lock:
            known = self._known.get(name)
        if known is None:
            return self._search(name, 0)
        if time.monotonic() - known.asked > FRESH:
            epoch = known.epoch
            self.update(name, epoch, *self._store.exist(markers(name, epoch)))
        return self.known(name)

    def update(self, name: str, epoch: int, present: bool, next_present: bool) -> bool:
        """Whether `epoch` is the epoch, after the store was asked for `markers(name, epoch)`."""
        if next_present:
            self._search(name, epoch + 1)
        else:
            self._note(name, epoch)
            if epoch and not present:
                log.warning("markers of an epoch lost; put again", namespace=name, epoch=epoch)
                try:
                    self._put_markers(name, range(1, epoch + 1))
                except StoreError as error:
                    log.warning("markers of an epoch not put", namespace=name, reason=str(error))
        return self.known(name) == epoch

    def raise_epoch(self, name: str) -> int:
        """Begin the next epoch. The store has its marker then. Raises StoreError."""
        epoch = self._search(name, self.known(name)) + 1
        self._put_markers(name, range(1, epoch + 1))
        self._note(name, epoch)
        return epoch

    def _search(self, name: str, least: int) -> int:
        """Find the greatest epoch from `least` on, and note it."""
        while True:
            asked = range(least + 1, least + 1 + WINDOW)
            found = self._store.exist([_marker(name, epoch) for epoch in asked])
            if not any(found):
                return self._note(name, least)
            least = max(epoch for epoch, exists in zip(asked, found, strict=True) if exists)

    def _note(self, name: str, epoch: int) -> int:
        """The epoch never goes back. Returns it."""
        with self._lock:
            known = self._known.setdefault(name, _Known())
            known.epoch = max(known.epoch, epoch)
            known.asked = time.monotonic()
            return known.epoch

    def _put_markers(self, name: str, epochs: range) -> None:
        """Put markers, unless they exist. Raises StoreError."""
        for at in range(0, len(epochs), WINDOW):
            names = [_marker(name, epoch) for epoch in epochs[at : at + WINDOW]]
            self._store.put_pinned(names, self._buffer.address, MARKER_BYTES)
            # A marker that its writer left incomplete cannot be put again, nor found.
            if not all(self._store.exist(names)):
                raise StoreError(f"a marker of namespace {name} is incomplete in the store")


def markers(name: str, epoch: int) -> list[str]:
    """The markers of this epoch and of the next one."""
    return [_marker(name, epoch), _marker(name, epoch + 1)]


def _marker(name: str, epoch: int) -> str:
    return f"kvferry/{name}/epoch/{epoch}"
