"""References in vLLM's block pool to the GPU blocks of stores, from their creation to their end.

vLLM's model runner v2 sets a step's new blocks to zero and copies Mamba states into them before it
lets a connector wait for stores from these blocks. A referenced block is not allocated, so it keeps
its bytes until all ranks have reported the end of the store, also of one that failed or was lost.
Only where vLLM writes early (compat.writes_blocks_early): cascade attention of older versions takes
a block for a common prefix if it counts as many references as requests. Called in the scheduler's
thread. Does not import vLLM.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Seconds after which a step waits for a store, and abandons it if the daemon is stopped: else
# requests could wait for its blocks forever.
MAX_HOLD = 10.0


@dataclass(slots=True)
class StoreHold:
    """GPU blocks that a store keeps from being allocated again.

    blocks: vLLM's KVCacheBlocks. pending: ranks that have not reported. since: when created.
    """

    blocks: list[Any]
    pending: int
    since: float


class HeldBlocks:
    """The GPU blocks of all stores that have not ended.

    pool: vLLM's BlockPool. ranks: how many report each store. max_hold: see MAX_HOLD.
    """

    def __init__(self, pool: Any, ranks: int, max_hold: float = MAX_HOLD) -> None:
        self._pool, self._ranks, self._max_hold = pool, ranks, max_hold
        self._stores: dict[int, StoreHold] = {}
        self._reset_prefix_cache = pool.reset_prefix_cache
        # vLLM resets only a pool without references, and calls no connector before that.
        pool.reset_prefix_cache = self._reset_unreferenced

    def __len__(self) -> int:
        return len(self._stores)

    def hold(self, store_jobs: Mapping[int, Any]) -> None:
        """store_jobs: the stores that this step creates, by job id."""
        now = time.monotonic()
        for job_id, job in store_jobs.items():
            blocks = [self._pool.blocks[block] for block in job.src_spec.block_ids.tolist()]
            self._pool.touch(blocks)
            self._stores[job_id] = StoreHold(blocks, self._ranks, now)

    def jobs_to_wait_for(self, flushed: set[int]) -> set[int]:
        """Of the jobs that vLLM would flush in this step, those that are not held; overdue ones."""
        due = time.monotonic() - self._max_hold
        overdue = {job_id for job_id, store in self._stores.items() if store.since < due}
        return (flushed - self._stores.keys()) | overdue

    def report(self, completed: Mapping[int, int]) -> None:
        """completed: for each job the number of ranks in which it has ended."""
        for job_id, count in completed.items():
            if (store := self._stores.get(job_id)) is not None:
                store.pending -= count
                if store.pending <= 0:
                    # The tail of a prefix is evicted first.
                    self._pool.free_blocks(reversed(self._stores.pop(job_id).blocks))

    def will_free_blocks(self) -> bool:
        """Whether a block has no other references, so that the end of a store frees it."""
        return any(block.ref_cnt == 1 for store in self._stores.values() for block in store.blocks)

    def _reset_unreferenced(self) -> bool:
        """Reset the prefix cache without the references. Nothing is allocated meanwhile."""
        blocks = [block for store in self._stores.values() for block in store.blocks]
        self._pool.free_blocks(blocks)
        try:
            return bool(self._reset_prefix_cache())
        finally:
            self._pool.touch(blocks)
