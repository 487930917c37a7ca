"""Registered memory in which encrypted blocks are moved. The host pool has only decrypted ones."""

from __future__ import annotations

import threading

from kvferry.daemon.tiers.base import Blocks
from kvferry.daemon.tiers.block_memory import BounceBuffer
from kvferry.daemon.tiers.mooncake.store_client import StoreClient


class CiphertextMemory(threading.local):
    """Of the calling thread. least_bytes: to register; more, once a call has more."""

    def __init__(self, store: StoreClient, least_bytes: int) -> None:
        self._store, self._least_bytes = store, least_bytes
        # The last one is used. The others stay registered, so they must stay mapped.
        self._buffers: list[BounceBuffer] = []

    def moved_to(self, blocks: Blocks) -> Blocks:
        """These blocks with addresses in this memory, until the thread's next call."""
        nbytes = blocks.nbytes * len(blocks.keys)
        if not self._buffers or self._buffers[-1].nbytes < nbytes:
            buffer = BounceBuffer(max(nbytes, self._least_bytes))
            self._store.register(buffer.address, buffer.nbytes)
            self._buffers.append(buffer)
        begin = self._buffers[-1].address
        return blocks._replace(addresses=range(begin, begin + nbytes, blocks.nbytes))
