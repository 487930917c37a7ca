"""Epochs of namespaces in the store: a reset on one host is seen on all.

    kvferry/NAMESPACE/epoch                the pointer: "EPOCH INCARNATION", in decimal
    kvferry/NAMESPACE/epoch/INCARNATION    the marker: without it, the incarnation is not valid

The blocks of a namespace are named by its incarnation: a random number that belongs to one epoch,
and is used once. So no host finds a block of another epoch than its own, whatever happens to
pointers and markers. They are pinned, and may be lost with their store or master.

    pointer              this host
    its epoch, valid     uses the incarnation
    a larger epoch       adopts the epoch; until then it asks for none of its blocks
    smaller, or invalid  publishes its epoch: it removes marker and pointer, puts the marker of a
                         new incarnation, then the pointer, and reads which pointer the store has

The store keeps the first pointer that is put. Hosts that publish at once may still remove each
other's pointer. Then one uses an incarnation that the others do not know, until it settles again; a
smaller epoch that is left is published over again. A lookup asks for the marker with its keys, so
that a reset elsewhere is noticed at once. A pointer of earlier builds is the incarnation alone, of
epoch 0.
"""

from __future__ import annotations

import mmap
import secrets
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import structlog

from kvferry.daemon.core.store_name import StoreName
from kvferry.daemon.tiers.block_memory import BounceBuffer
from kvferry.daemon.tiers.mooncake.store_client import (
    NOT_FOUND,
    StoreClient,
    StoreError,
    explain,
)

# Epochs and incarnations are below this.
END_OF_NUMBERS = 1 << 62
OBJECT_BYTES = 64

log = structlog.get_logger()


class Pointer(NamedTuple):
    epoch: int
    incarnation: int


# What a pointer with other contents names.
DAMAGED = Pointer(-1, 0)


class _Found(NamedTuple):
    """A pointer of the store, None if it has none, and whether it has its marker."""

    pointer: Pointer | None
    is_valid: bool


class StoreEpochs:
    """The epochs and incarnations of a store, as far as this host uses them. Any thread."""

    def __init__(self, store: StoreClient) -> None:
        self._store = store
        self._lock = threading.Lock()
        # Of each namespace, the incarnation in use.
        self._settled: dict[str, Pointer] = {}
        # What this host has published, until the blocks of earlier incarnations are removed.
        self._published: dict[str, Pointer] = {}
        # Held while the buffer is in use, which has the contents of pointers and markers.
        self._asking = threading.Lock()
        self._buffer = BounceBuffer(mmap.PAGESIZE)
        store.register(self._buffer.address, self._buffer.nbytes)
        # The reason for which the last `settle` failed, and the reason that was logged last.
        self._reason = self._logged_reason = ""

    def incarnation(self, name: StoreName) -> int | None:
        """The incarnation of a store, once its namespace is settled with its epoch."""
        with self._lock:
            settled = self._settled.get(name.namespace, DAMAGED)
        return settled.incarnation if settled.epoch == name.epoch else None

    def end(self, namespace: str, incarnation: int) -> None:
        """This incarnation is not valid: its marker is gone."""
        with self._lock:
            if self._settled.get(namespace, DAMAGED).incarnation == incarnation:
                del self._settled[namespace]

    def settle(self, epochs: Mapping[str, int]) -> dict[str, int]:
        """See SharedTier."""
        with self._lock:
            self._settled = {name: each for name, each in self._settled.items() if name in epochs}
        agreed, self._reason = dict[str, int](), ""
        with self._asking:
            try:
                found = self._read(list(epochs))
                for namespace, each in found.items():
                    self._compare(namespace, epochs[namespace], each, agreed)
                for namespace in found.keys() - agreed.keys():
                    epoch = epochs[namespace]
                    each = self._publish(namespace, epoch, found[namespace].pointer)
                    self._compare(namespace, epoch, each, agreed)
            except StoreError as error:
                self._reason = str(error)
        if self._reason and self._reason != self._logged_reason:
            log.warning("epochs not settled; the store is not used", reason=self._reason)
        self._logged_reason = self._reason
        return agreed

    def remove_old(self) -> None:
        """Remove the blocks and markers of incarnations that this host has ended."""
        with self._asking, suppress(StoreError):  # which `settle` reports
            for namespace, (pointer, _) in self._read(list(self._published)).items():
                if pointer != (published := self._published.pop(namespace)):
                    continue
                old = rf"(epoch/)?(?!{published.incarnation}\b)[0-9]+"
                removed = self._store.remove_matching(f"^kvferry/{namespace}(-[^/]*)?/{old}")
                if removed < 0:
                    log.warning("old keys not removed", namespace=namespace, error=removed)

    def _compare(self, namespace: str, own: int, found: _Found, agreed: dict[str, int]) -> None:
        """Use the pointer of the store if it is valid, for requests with its epoch. Its epoch goes
        to `agreed` unless this host's must be published."""
        pointer, is_valid = found
        if pointer is None or pointer.epoch < own:
            is_valid = False
        with self._lock:
            ended = self._settled.pop(namespace, None)
            if pointer is not None and is_valid:
                self._settled[namespace] = pointer
        if ended and not is_valid:
            log.info("epoch of namespace has ended", namespace=namespace, epoch=ended.epoch)
        if pointer is not None and (is_valid or pointer.epoch > own):
            agreed[namespace] = pointer.epoch

    def _publish(self, namespace: str, epoch: int, old: Pointer | None) -> _Found:
        """Replace a pointer by one with a new incarnation. Returns which one the store has then.
        Raises StoreError."""
        name = _pointer(namespace)
        if old is not None:
            self._store.remove([marker(namespace, old.incarnation), name])
        ours = Pointer(epoch, 1 + secrets.randbelow(END_OF_NUMBERS - 1))
        text = f"{ours.epoch} {ours.incarnation}"
        self._buffer.view[:OBJECT_BYTES] = text.encode().ljust(OBJECT_BYTES)
        for each in (marker(namespace, ours.incarnation), name):
            if code := self._store.put_pinned(each, self._buffer.address, OBJECT_BYTES):
                raise StoreError.of_call(f"the epoch of {namespace} cannot be put", code)
        found = self._read([namespace]).get(namespace, _Found(None, False))
        if found.pointer != ours:
            self._store.remove([marker(namespace, ours.incarnation)])
        elif old is not None:
            self._published[namespace] = ours
        log.info("epoch published", namespace=namespace, epoch=epoch, won=found.pointer == ours)
        return found

    def _read(self, namespaces: Sequence[str]) -> dict[str, _Found]:
        """The pointers of namespaces, without those that cannot be read. Raises StoreError."""
        found = dict[str, _Found]()
        count = self._buffer.nbytes // OBJECT_BYTES
        for at in range(0, len(namespaces), count):
            pointers = self._read_pointers(namespaces[at : at + count])
            named = {name: each for name, each in pointers.items() if each is not None}
            markers = [marker(name, each.incarnation) for name, each in named.items()]
            valid = dict(zip(named, self._store.exist(markers) if markers else (), strict=True))
            found |= {name: _Found(each, valid.get(name, False)) for name, each in pointers.items()}
        return found

    def _read_pointers(self, namespaces: Sequence[str]) -> dict[str, Pointer | None]:
        """Those that are readable, of as many namespaces as the buffer has room for."""
        places = range(0, len(namespaces) * OBJECT_BYTES, OBJECT_BYTES)
        addresses = [[self._buffer.address + place] for place in places]
        names = [_pointer(namespace) for namespace in namespaces]
        codes = self._store.get(names, addresses, [[OBJECT_BYTES]] * len(names))
        found = dict[str, Pointer | None]()
        for namespace, place, code in zip(namespaces, places, codes, strict=True):
            if code >= 0:
                found[namespace] = _parse(bytes(self._buffer.view[place : place + code]))
            elif code == NOT_FOUND:
                found[namespace] = None
            else:
                self._reason = f"the epoch of {namespace} cannot be read: {explain(code)}"
        return found


def marker(namespace: str, incarnation: int) -> str:
    """The object without which this incarnation is not valid."""
    return f"{_pointer(namespace)}/{incarnation}"


def _pointer(namespace: str) -> str:
    return f"kvferry/{namespace}/epoch"


def _parse(text: bytes) -> Pointer:
    numbers = [int(each) if each.isdigit() else -1 for each in text.split()]
    if len(numbers) in (1, 2) and all(0 <= number < END_OF_NUMBERS for number in numbers):
        pointer = Pointer(numbers[0] if len(numbers) == 2 else 0, numbers[-1])
        return pointer if pointer.incarnation else DAMAGED
    return DAMAGED
