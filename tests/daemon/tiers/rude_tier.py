"""A tier that does what it is told to: raise, hang, return too little, or write without end.

Its process finds it by PYTHONPATH. options: folder, where a file with a fault's name turns it on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvferry.daemon.tiers.base import Blocks, Fetched, HostMemory, Result, TierUsage
from kvferry.daemon.tiers.block_memory import view_memory
from kvferry.testing.memory_tier import MemoryTier


def open_tier(options: Mapping[str, Any], _memory: HostMemory) -> RudeTier:
    return RudeTier(Path(options["folder"]))


class RudeTier(MemoryTier):
    io_threads = 2

    def __init__(self, folder: Path) -> None:
        super().__init__(1 << 20)
        self._folder = folder

    def contains(self, store: str, keys: Sequence[bytes]) -> Sequence[bool]:
        self._fail("contains")
        if self._is_on("note lookups"):
            for key in keys[:1]:
                (self._folder / f"lookup-{key.hex()}").touch()
        return super().contains(store, keys)[: self._count(keys)]

    def fetch(self, blocks: Blocks, deadline: float) -> Sequence[Fetched]:
        self._fail("fetch")
        if self._is_on("write"):
            (self._folder / "writing").touch()
            while True:
                for address in blocks.addresses:
                    view_memory(address, blocks.nbytes)[:] = b"\xee" * blocks.nbytes
        if self._is_on("paced reads"):
            time.sleep(0.05)
        if self._is_on("slow reads"):
            self._wait_for("slow reads")
            deadline = float("inf")
        if self._is_on("slow second"):
            first = blocks._replace(keys=blocks.keys[:1], addresses=blocks.addresses[:1])
            found = super().fetch(first, deadline)
            while time.monotonic() < deadline:
                time.sleep(0.001)
            return [*found, *(Fetched(Result.LATE) for _ in blocks.keys[1:])]
        return super().fetch(blocks, deadline)[: self._count(blocks.keys)]

    def put(self, blocks: Blocks, checksums: Sequence[int]) -> Sequence[Result]:
        self._wait_for("slow")
        if self._is_on("lie"):
            checksums = [checksum ^ 1 for checksum in checksums]
        return super().put(blocks, checksums)[: self._count(blocks.keys)]

    def usage(self) -> TierUsage:
        self._fail("usage")
        return super().usage()

    def drop(self, store: str, keys: Sequence[bytes] | None = None) -> None:
        self._fail("drop")
        self._wait_for("slow drop")
        super().drop(store, keys)

    def stores(self) -> Sequence[str]:
        self._fail("stores")
        return super().stores()

    def settle(self, epochs: Mapping[str, int]) -> Mapping[str, int]:
        self._fail("settle")
        self._wait_for("slow settle")
        if self._is_on("wrong settle"):
            return dict.fromkeys(epochs)  # type: ignore[return-value]
        return epochs

    def note_used(self, stores: Collection[str]) -> None:
        (self._folder / "used").write_text(" ".join(sorted(stores)))

    def _count(self, keys: Sequence[bytes]) -> int:
        """How many results to return."""
        return len(keys) - self._is_on("too few")

    def _is_on(self, fault: str) -> bool:
        return (self._folder / fault).exists()

    def _wait_for(self, fault: str) -> None:
        if self._is_on(fault):
            (self._folder / f"{fault}-{threading.get_ident()}").touch()
        while self._is_on(fault):
            time.sleep(0.001)

    def _fail(self, call: str) -> None:
        if self._is_on(call):
            raise OSError(5, f"{call} fails")
