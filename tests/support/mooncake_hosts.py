"""Hosts whose Mooncake tiers share a model of a store, with one namespace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from kvferry.daemon.core.store_name import StoreName
from kvferry.daemon.tiers.base import Blocks, Result, SharedTier
from kvferry.daemon.tiers.block_memory import BounceBuffer
from kvferry.daemon.tiers.encryption import CipherOf, no_cipher
from kvferry.daemon.tiers.mooncake.store_client import StoreClient
from kvferry.daemon.tiers.mooncake.tier import MooncakeTier
from support.object_store_model import ModelClient, ObjectStoreModel

NAME = "a" * 16
POINTER = f"kvferry/{NAME}/epoch"
KEY = b"k"


class ModelHost:
    """A host with one namespace, which has this epoch in its page. ciphers: see MooncakeTier."""

    def __init__(
        self,
        model: ObjectStoreModel,
        number: int = 0,
        epoch: int = 0,
        ciphers: CipherOf = no_cipher,
    ) -> None:
        self.number, self.epoch = number, epoch
        self.is_unpublished = False
        self.client = ModelClient(model)
        self.tier: SharedTier = MooncakeTier(cast(StoreClient, self.client), ciphers)
        self._memory = BounceBuffer(64)

    def reset(self, above: int = 0) -> None:
        """Draw an epoch that no other host draws."""
        self.epoch = (max(self.epoch, above) // 16 + 1) * 16 + self.number
        self.is_unpublished = True

    def settle(self) -> int:
        """Do as the daemon does. Returns the epoch of the store, -1 if it is not known."""
        found = self.tier.settle({NAME: self.epoch}).get(NAME, -1)
        if found == self.epoch:
            self.is_unpublished = False
        elif found > self.epoch and self.is_unpublished:
            self.reset(above=found)
        elif found > self.epoch:
            self.epoch = found
        return found

    def put(self, key: bytes = KEY) -> Result:
        """Put a block whose contents are the epoch."""
        self._memory.view[:8] = self.epoch.to_bytes(8, "little")
        return self.tier.put(self._blocks(key), [self.epoch + 1])[0]

    def find(self, key: bytes = KEY) -> int | None:
        """The epoch under which a block was put, if it is found."""
        is_there = self.tier.contains(self._blocks(key).store, [key])[0]
        if not is_there or self.tier.fetch(self._blocks(key), 1e18)[0].result is not Result.OK:
            return None
        return int.from_bytes(self._memory.view[:8], "little")

    def _blocks(self, key: bytes) -> Blocks:
        store = StoreName(NAME, "c", self.epoch)
        return Blocks(str(store), [key], [self._memory.address], 8)


def pointer_of(model: ObjectStoreModel) -> tuple[int, int]:
    *epoch, incarnation = map(int, model.objects[POINTER].split())
    return sum(epoch), incarnation


def check_agreement(model: ObjectStoreModel, hosts: Sequence[ModelHost]) -> None:
    """After two rounds, all have one epoch, and nobody writes a pointer from then on."""
    for host in (*hosts, *hosts):
        host.settle()
    put = model.pointers_put
    largest = max(host.epoch for host in hosts)
    assert {host.settle() for host in hosts} == {largest} == {host.epoch for host in hosts}
    assert (pointer_of(model)[0], model.pointers_put) == (largest, put)
    key = f"new {put}".encode()
    for host in hosts:
        assert host.put(key) is Result.OK
        assert host.find(key) == largest
