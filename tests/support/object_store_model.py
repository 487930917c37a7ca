"""A model of a Mooncake Store, and of its clients on several hosts."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from kvferry.daemon.tiers.block_memory import view_memory
from kvferry.daemon.tiers.mooncake.store_client import (
    NOT_FOUND,
    TOO_LARGE,
    TRANSFER_FAILED,
    StoreError,
)


class ObjectStoreModel:
    """The objects of a store.

    refusal: the code of each put. unreadable: objects that cannot be read. pointers_put: how often
    a pointer was put.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.refusal = 0
        self.unreadable: set[str] = set()
        self.pointers_put = 0


class ModelClient:
    """The StoreClient of one host. before: called before each operation on an object. is_cut_off:
    the host does not reach the store."""

    def __init__(self, model: ObjectStoreModel) -> None:
        self.model = model
        self.before: Callable[[], None] = lambda: None
        self.is_cut_off = False

    def register(self, address: int, nbytes: int) -> None:
        pass

    def exist(self, names: Sequence[str]) -> list[bool]:
        found = list[bool]()
        for name in names:
            self._reach()
            found.append(name in self.model.objects)
        return found

    def put_pinned(self, name: str, address: int, nbytes: int) -> int:
        return self.put([name], [[address]], [[nbytes]])[0]

    def put(
        self,
        names: Sequence[str],
        addresses: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
    ) -> list[int]:
        for name, *buffers in zip(names, addresses, sizes, strict=True):
            # Nobody asks for a marker before its pointer: until then no host needs a turn.
            pointer, _, incarnation = name.rpartition("/")
            named = self.model.objects.get(pointer, b"").split()
            if not incarnation.isdigit() or incarnation.encode() in named:
                self.before()
            self._check_reach()
            data = b"".join(map(bytes, map(view_memory, *buffers)))
            if not self.model.refusal and name not in self.model.objects:
                self.model.objects[name] = data
                self.model.pointers_put += name.endswith("/epoch")
        return [self.model.refusal] * len(names)

    def get(
        self,
        names: Sequence[str],
        addresses: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
    ) -> list[int]:
        codes = list[int]()
        for name, *buffers in zip(names, addresses, sizes, strict=True):
            self.before()
            if self.is_cut_off or name in self.model.unreadable:
                codes.append(TRANSFER_FAILED)
                continue
            codes.append(_write(self.model.objects.get(name), *buffers))
        return codes

    def size(self, name: str) -> int:
        return len(self.model.objects.get(name, b""))

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            self._reach()
            self.model.objects.pop(name, None)

    def remove_matching(self, pattern: str) -> int:
        self._reach()
        old = [name for name in self.model.objects if re.match(pattern, name)]
        for name in old:
            del self.model.objects[name]
        return len(old)

    def _reach(self) -> None:
        self.before()
        self._check_reach()

    def _check_reach(self) -> None:
        if self.is_cut_off:
            raise StoreError("the store is not reached")


def _write(data: bytes | None, addresses: Sequence[int], sizes: Sequence[int]) -> int:
    """Write an object into buffers. Returns its bytes, or a code."""
    if data is None:
        return NOT_FOUND
    if len(data) > sum(sizes):
        return TOO_LARGE
    at = 0
    for address, nbytes in zip(addresses, sizes, strict=True):
        part = data[at : at + nbytes]
        view_memory(address, len(part))[:] = part
        at += len(part)
    return len(data)
