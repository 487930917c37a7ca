"""An engine with a real daemon whose blocks are written to tiers and promoted again."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch

from kvferry.client import (
    Fingerprint,
    GPULoadStoreSpec,
    KeyLoadStoreSpec,
    KVLayout,
    LocalDaemon,
    Lookup,
    OffloadClient,
    OffloadingManager,
    Refused,
    TensorLayout,
    TensorRef,
    offload_key,
)
from kvferry.proto.messages import FindInTiers, Opened, OpenNamespace, TiersFound
from kvferry.proto.status import TierStatus
from kvferry.testing.engine import until
from support.raw_client import RawClient
from support.restarting_daemons import RestartingDaemons

PAGE, BLOCKS = 4096, 128
FINGERPRINT = Fingerprint("llama", PAGE, key_bytes=12)
LAYOUT = KVLayout((TensorLayout(BLOCKS, PAGE, PAGE),), ((TensorRef(0, PAGE),),))


def keys(numbers: Sequence[int]) -> tuple[bytes, ...]:
    return tuple(offload_key(number.to_bytes(8, "big")) for number in numbers)


def content(number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(-128, 128, (PAGE,), dtype=torch.int8, generator=generator)


class TieredEngine:
    """An engine in a namespace, and a second session that searches for keys in tiers.

    Key n has `content(n)`.
    """

    def __init__(
        self, daemon: LocalDaemon | RestartingDaemons, stack: ExitStack, **namespace: Any
    ) -> None:
        self.client = stack.enter_context(OffloadClient(daemon.directory, engine="engine"))
        opened = self.client.open_namespace(FINGERPRINT, **namespace)
        self.num_blocks = opened.num_blocks
        (self.pages,) = self.client.allocate_kv_caches(LAYOUT).tensors
        self.manager = OffloadingManager(self.client)
        self._directory, self._stack = daemon.directory, stack
        self.open_raw()
        self._jobs = 0

    def open_raw(self) -> None:
        """Open the second session, again if the daemon has restarted."""
        self.raw = self._stack.enter_context(RawClient(self._directory, "beside"))
        self.opened = self.raw.ask(OpenNamespace(1, FINGERPRINT), Opened)

    def store(self, numbers: Sequence[int]) -> None:
        for at in range(0, len(numbers), BLOCKS):
            part = numbers[at : at + BLOCKS]
            for block, number in enumerate(part):
                self.pages[block] = content(number)
            source = GPULoadStoreSpec(range(len(part)))
            assert self._run((source, KeyLoadStoreSpec(keys(part))))

    def load(self, numbers: Sequence[int]) -> None:
        """Load keys, and check their bytes."""
        assert self.load_resident(numbers)

    def load_resident(self, numbers: Sequence[int]) -> bool:
        """Load keys, and check their bytes. False if some are absent."""
        self.pages.zero_()
        try:
            spec = self.manager.prepare_load(keys(numbers))
        except Refused:
            return False
        success = self._run((spec, GPULoadStoreSpec(range(len(numbers)))))
        self.manager.complete_load(spec.keys)
        for block, number in enumerate(numbers if success else ()):
            assert torch.equal(self.pages[block].cpu(), content(number)), f"key {number}"
        return success

    def find(self, numbers: Sequence[int]) -> TiersFound:
        """Search in the session beside. Then the manager knows the key events of before, too."""
        found = self.raw.ask(FindInTiers(2, keys(numbers)), TiersFound)
        self.client.status()
        return found

    def promote(self, numbers: Sequence[int]) -> None:
        """Wait until the tiers are on, and until they have promoted keys."""

        def loadable() -> bool:
            states = {self.manager.lookup(each) for each in keys(numbers)}
            if Lookup.MISS in states:
                self.find(numbers)
            return states == {Lookup.HIT}

        until(loadable)

    def tier(self) -> TierStatus:
        (tier,) = self.client.status().tiers
        return tier

    def wait_written(self, count: int) -> None:
        until(lambda: self.tier().written >= count)

    def _run(self, spec: Any) -> bool:
        """Whether a transfer has succeeded."""
        self._jobs += 1
        self.client.transfer_async(self._jobs, spec)
        self.client.wait([self._jobs])
        (result,) = self.client.get_finished()
        return result.success
