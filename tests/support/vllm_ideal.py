"""A connector with ideal copies: the lower bound for any connector that uses vLLM's own.

It copies nothing, so the outputs are wrong. A load ends, to the microsecond, when the link would
have transferred its bytes. A step without requests waits for a load that is about to end, as with
kvferry. The time to the first token beyond that of a GPU hit and of the link is the time that vLLM
needs to process results. Needs vLLM.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from typing import Any

from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    LookupResult,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
    PrepareStoreOutput,
    RequestOffloadingContext,
    TransferResult,
)

from kvferry.client.vllm.load_eta import MAX_WAIT


class IdealSpec(OffloadingSpec):
    """vLLM's OffloadingSpec whose loads take the link's time and copy nothing.

    extra_config: link_gbs; blocks_per_chunk, kvferry's of full attention if not given.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.blocks_per_chunk = int(self.extra_config.get("blocks_per_chunk", 4))

    def get_manager(self) -> OffloadingManager:
        return IdealManager()

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        return IdealWorker(kv_caches, 1e9 * float(self.extra_config["link_gbs"]))


class IdealManager(OffloadingManager):
    """Has every key that was stored."""

    def __init__(self) -> None:
        self._keys: set[bytes] = set()

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        return LookupResult.HIT if key in self._keys else LookupResult.MISS

    def prepare_load(self, keys: Collection[bytes], req_context: Any) -> LoadStoreSpec:
        return LoadStoreSpec()

    def prepare_store(self, keys: Collection[bytes], req_context: Any) -> PrepareStoreOutput:
        new = [key for key in keys if key not in self._keys]
        return PrepareStoreOutput(new, LoadStoreSpec(), [])

    def complete_store(
        self, keys: Collection[bytes], req_context: Any, success: bool = True
    ) -> None:
        self._keys.update(keys)

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        return RequestOffloadingContext()


class IdealWorker(OffloadingWorker):
    def __init__(self, kv_caches: CanonicalKVCaches, rate: float) -> None:
        self._block_bytes = [
            sum(ref.page_size_bytes for ref in refs) for refs in kv_caches.group_data_refs
        ]
        self._rate = rate
        # The time at which each transfer ends. Loads run one after another.
        self._due: list[tuple[float, TransferResult]] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: Any) -> bool:
        self._due.append((0.0, TransferResult(job_id, True, 0, 0.0)))
        return True

    def submit_load(
        self, job_id: int, src_spec: Any, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        sizes = zip(dst_spec.group_sizes, self._block_bytes, strict=True)
        nbytes = sum(blocks * block_bytes for blocks, block_bytes in sizes)
        begins = max([time.perf_counter(), *(due for due, _ in self._due)])
        seconds = nbytes / self._rate
        self._due.append((begins + seconds, TransferResult(job_id, True, nbytes, seconds)))
        return True

    def get_finished(self) -> list[TransferResult]:
        now = time.perf_counter()
        first = min((due for due, _ in self._due if due > now), default=None)
        if first is not None and first - now < MAX_WAIT:
            time.sleep(first - now)
            now = time.perf_counter()
        ended = [result for due, result in self._due if due <= now]
        self._due = [(due, result) for due, result in self._due if due > now]
        return ended

    def wait(self, job_ids: Iterable[int]) -> None:
        """Returns at once, because no transfer touches blocks."""
