"""The second part of the demo: blocks are written to a disk and promoted by another daemon.

An engine stores the prompt's blocks by key, and a daemon with a disk tier writes them. Another
daemon with an empty pool opens the same directory. Its engine looks up the keys, waits for their
promotion, loads them into other GPU blocks and generates tokens.
"""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import Progress

from kvferry.client import (
    Fingerprint,
    GPULoadStoreSpec,
    KeyLoadStoreSpec,
    LocalDaemon,
    Lookup,
    OffloadClient,
    OffloadingManager,
    offload_key,
)
from kvferry.client.tensors import shared_empty
from kvferry.testing.llama import Array, BlockTable, PagedLlama

TIMEOUT = 60.0
TIER_BYTES = 1 << 30


class DiskDemo:
    """The model, its prompt, and the keys of the prompt's full blocks.

    pool_bytes: of each daemon. daemon_options: for LocalDaemon.
    """

    def __init__(
        self, model: PagedLlama, prompt: bytes, pool_bytes: int, progress: Progress
    ) -> None:
        self._model, self._progress = model, progress
        self._pool_bytes, self._generator = pool_bytes, np.random.default_rng(1)
        size = model.config.block_size
        self._blocks = (len(prompt) - 1) // size
        ends = range(size, self._blocks * size + 1, size)
        self._keys = tuple(offload_key(hashlib.sha256(prompt[:end]).digest()) for end in ends)

    def run(
        self,
        prefill: Callable[[BlockTable, Sequence[Array]], None],
        generate: Callable[[BlockTable, Sequence[Array]], list[int]],
        total_blocks: int,
    ) -> tuple[list[int], float]:
        """Generated tokens, and seconds from the search in the tier until all keys were loadable.

        prefill, generate: called with a block table and the KV tensors. total_blocks: of the
        request.
        """
        with tempfile.TemporaryDirectory(prefix="kvferry-demo-") as folder:
            root = Path(folder, "tier")
            with self._engine(root) as (client, manager, caches):
                table = self._generator.permutation(total_blocks)
                prefill(table, caches)
                output = manager.prepare_store(self._keys)
                assert output is not None
                self._transfer(client, 1, self._gpu(table), output.store_spec)
                manager.complete_store(self._keys)
                self._wait("blocks written to disk", client, len(self._keys))
            with self._engine(root) as (client, manager, caches):
                table = self._generator.permutation(total_blocks)
                begin = time.monotonic()
                self._promote(manager)
                seconds = time.monotonic() - begin
                self._transfer(client, 1, manager.prepare_load(self._keys), self._gpu(table))
                manager.complete_load(self._keys)
                return generate(table, caches), seconds

    @contextmanager
    def _engine(self, root: Path) -> Iterator[tuple[OffloadClient, OffloadingManager, list[Array]]]:
        """A daemon with a disk tier at `root`, and an engine in a namespace of it."""
        config, num_blocks = self._model.config, 2 * self._blocks
        shape = self._model.kv_cache_shape(num_blocks)
        tensors = {f"layer{i}": shared_empty(shape, np.float32) for i in range(config.layers)}
        fingerprint = Fingerprint("demo", config.block_bytes, block_size=config.block_size)
        with (
            LocalDaemon(
                pool_bytes=self._pool_bytes,
                tiers_disk_path=root,
                tiers_disk_size=TIER_BYTES,
                tiers_disk_write="write_through",
            ) as daemon,
            OffloadClient(daemon.directory, engine="demo", timeout=TIMEOUT) as client,
        ):
            client.open_namespace(fingerprint, mirror=True)
            client.register_kv_caches(tensors, num_blocks=num_blocks)
            _until(lambda: client.status().tiers[0].state == "on")
            with OffloadingManager(client) as manager:
                yield client, manager, list(tensors.values())

    def _gpu(self, table: BlockTable) -> GPULoadStoreSpec:
        return GPULoadStoreSpec(table[: self._blocks])

    def _transfer(self, client: OffloadClient, job_id: int, src: Any, dst: Any) -> None:
        assert isinstance(src, KeyLoadStoreSpec) or isinstance(dst, KeyLoadStoreSpec)
        client.transfer_async(job_id, (src, dst))
        client.wait([job_id], timeout=TIMEOUT)
        for result in client.get_finished():
            if result.error is not None:
                raise result.error

    def _promote(self, manager: OffloadingManager) -> None:
        """Have all keys promoted. On a busy machine a search may end before the tier answers."""
        task = self._progress.add_task("blocks promoted", total=len(self._keys))
        search = manager.prefetch(self._keys)

        def promoted() -> bool:
            nonlocal search
            found = [manager.lookup(key) for key in self._keys]
            if search.done and Lookup.MISS in found:
                search = manager.prefetch(self._keys)
            self._progress.update(task, completed=found.count(Lookup.HIT))
            return found.count(Lookup.HIT) == len(found)

        _until(promoted)

    def _wait(self, title: str, client: OffloadClient, count: int) -> None:
        task = self._progress.add_task(title, total=count)

        def written() -> bool:
            done = client.status().tiers[0].written
            self._progress.update(task, completed=done)
            return done >= count

        _until(written)


def _until(condition: Callable[[], bool]) -> None:
    """Wait for a condition. Raises TimeoutError after TIMEOUT seconds."""
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the disk tier did not complete a step within {TIMEOUT:.0f} s")
        time.sleep(0.01)
