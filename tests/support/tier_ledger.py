"""An engine that records which keys a disk tier has, and searches for them after a kill.

The tier's hint file shows which keys are written. Each block contains its key and the
number of resets before it (block_marks.py). So a block with other bytes, or from before a reset, is
detected.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import torch

from kvferry.client import (
    Fingerprint,
    GPULoadStoreSpec,
    KeyLoadStoreSpec,
    KVLayout,
    Lookup,
    OffloadClient,
    OffloadingManager,
    TensorLayout,
    TensorRef,
    TransferSpec,
    offload_key,
)
from kvferry.daemon.core.store_name import StoreName
from kvferry.proto.errors import Code, Refused
from kvferry.proto.status import TierStatus
from kvferry.testing.engine import until
from support.block_marks import Label, Marker
from support.disk_tier_files import keys_in_hints
from support.time_limits import TIMEOUT

OWNER = 0xFFFD
PAGE = 16 << 10
# Keys of one store or search; blocks of the namespace, a quarter of which is promoted at a time.
BATCH, BLOCKS = 16, 64
FINGERPRINT = Fingerprint("ledger", PAGE, key_bytes=12)
LAYOUT = KVLayout((TensorLayout(BATCH, PAGE, PAGE),), ((TensorRef(0, PAGE),),))


def key_of(number: int) -> bytes:
    return offload_key(number.to_bytes(8, "big"))


class TierLedger:
    """An engine that knows which keys it stored, and finds them again after kills.

    root: of the disk tier. Connect it to each daemon in turn.

    stored: the numbers of the keys that were stored since the last reset. errors: describes
    loaded blocks with wrong bytes.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._marker = Marker(PAGE // 8)
        self._resets = 0
        self._connection = ExitStack()
        self._jobs = 0
        self.stored = list[int]()
        self.errors = list[str]()
        self.compared = 0

    def connect(self, directory: Path) -> None:
        """Connect to a daemon, and wait until its tier is on."""
        self.close()
        client = OffloadClient(directory, engine="ledger", timeout=TIMEOUT)
        self._client = self._connection.enter_context(client)
        client.open_namespace(FINGERPRINT, cpu_bytes_to_use=BLOCKS * PAGE)
        (self._pages,) = client.allocate_kv_caches(LAYOUT).tensors
        self._manager = OffloadingManager(client)
        until(lambda: self.tier().state == "on")

    def close(self) -> None:
        """Disconnect; the daemon may be dead."""
        self._connection.close()

    def tier(self) -> TierStatus:
        (tier,) = self._client.status().tiers
        return tier

    def store(self, count: int) -> None:
        """Store new keys, and wait until they are in the pool."""
        for _ in range(0, count, BATCH):
            numbers = range(len(self.stored), len(self.stored) + BATCH)
            blocks = self._marker.make_blocks(self._labels(numbers)).view(np.int8)
            self._pages.copy_(torch.from_numpy(blocks))
            keys = tuple(map(key_of, numbers))
            assert self._transfer((GPULoadStoreSpec(range(BATCH)), KeyLoadStoreSpec(keys)))
            self.stored += numbers

    def written(self) -> set[int]:
        """The stored keys that are in the tier, by its hint file."""
        found = set[int]()
        epoch = self._manager.epochs[0]
        for path in self.directories():
            if StoreName.parse(path.name).epoch != epoch:
                continue  # it is dropped soon
            with suppress(FileNotFoundError):  # it is being created
                keys = keys_in_hints(path, FINGERPRINT.key_bytes)
                found |= {number for number in self.stored if key_of(number) in keys}
        return found

    def directories(self) -> list[Path]:
        """The directories in which the tier keeps the namespace: one for each epoch."""
        return list(self._root.glob(f"{FINGERPRINT.name}-*"))

    def store_and_write(self, count: int) -> None:
        """Store new keys, and wait until they are in the tier, before later keys evict them."""
        for _ in range(0, count, BATCH):
            self.store(BATCH)
            new = self.stored[-BATCH:]
            until(lambda new=new: self.written().issuperset(new))  # type: ignore[misc]

    def prefetch(self, numbers: Iterable[int]) -> None:
        """Begin to promote keys."""
        self._manager.prefetch(map(key_of, numbers))

    def reset(self) -> None:
        """Reset the namespace. When this returns, no key that was stored may be found."""
        self._client.reset()
        self._resets += 1
        self.stored.clear()

    def search(self, numbers: Sequence[int]) -> set[int]:
        """Promote keys, load them and compare their bytes. Returns those that were found."""
        found = set[int]()
        for at in range(0, len(numbers), BATCH):
            left = numbers[at : at + BATCH]
            while left:
                hits = self._load_prefix(left)
                found |= set(left[:hits])
                left = left[hits + 1 :]
        return found

    def search_until_found(self, numbers: Sequence[int]) -> set[int]:
        """Search again for missing keys, because a tier needs time to read headers."""
        found = set[int]()

        def complete() -> bool:
            found.update(self.search([n for n in numbers if n not in found]))
            return len(found) == len(numbers)

        with suppress(TimeoutError):
            until(complete)
        return found

    def _load_prefix(self, numbers: Sequence[int]) -> int:
        """Load the first keys, up to the first that is missing. Returns how many."""
        keys = list(map(key_of, numbers))
        searched = self._manager.prefetch(keys)
        until(lambda: self._poll() and searched.done)
        until(lambda: self._state(keys) not in (Lookup.RETRY, Lookup.HIT_PENDING))
        states = [self._manager.lookup(key) for key in keys]
        hits = next((at for at, state in enumerate(states) if state is not Lookup.HIT), len(keys))
        if not hits:
            return 0
        try:
            spec = self._manager.prepare_load(keys[:hits])
        except Refused:  # they have just been evicted
            return 0
        self._pages.zero_()
        loaded = self._transfer((spec, GPULoadStoreSpec(range(hits))))
        self._manager.complete_load(spec.keys)
        if not loaded:
            return 0
        blocks = self._pages[:hits].cpu().numpy().view(np.uint64)
        self.errors += self._marker.find_errors(blocks, self._labels(numbers[:hits]))
        self.compared += hits
        return hits

    def _poll(self) -> bool:
        self._manager.poll()
        return True

    def _state(self, keys: Sequence[bytes]) -> Lookup:
        """The state of the first key that is no HIT."""
        states = (self._manager.lookup(key) for key in keys)
        return next((state for state in states if state is not Lookup.HIT), Lookup.HIT)

    def _labels(self, numbers: Iterable[int]) -> list[int]:
        return [Label(OWNER, number, self._resets).number for number in numbers]

    def _transfer(self, spec: TransferSpec) -> bool:
        """Run a transfer. Returns False if a key is absent."""
        self._jobs += 1
        self._client.transfer_async(self._jobs, spec)
        self._client.wait([self._jobs])
        (result,) = self._client.get_finished()
        if result.error is not None and result.error.code == Code.KEY_ABSENT:
            return False
        assert result.success, result
        return True
