"""The contents of each GPU block, so that nothing is stored from a block that another request has.

vLLM's offloading scheduler keeps the block ids of each request. It does not learn when a block
leaves a sliding window, when a request is preempted, or when a finished request is freed; it looks
for blocks that it gives to others only at positions that it has not stored yet. After a reset of
the cache, and at a request's end, it stores earlier positions again. So before each step stores
are chosen, ids of blocks that hold something else are set to 0, which vLLM skips. Called in the
scheduler's thread, before vLLM's own methods. Does not import vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple


class BlockPrefix(NamedTuple):
    """The contents of a GPU block: the last tokens of a prefix, in one KV cache group.

    hashes: those of the request, which grow with it. last: index of the prefix's hash.
    """

    group: int
    hashes: Sequence[bytes]
    last: int

    def is_in(self, held: BlockPrefix) -> bool:
        """Whether a block that was allocated for `held` has these contents.

        A block that is not full has no hash: then it must be the same position of the same request.
        """
        if self.group != held.group:
            return False
        if self.hashes is held.hashes and self.last == held.last:
            return True
        if self.last >= len(self.hashes) or held.last >= len(held.hashes):
            return False
        return self.hashes[self.last] == held.hashes[held.last]


class BlockOwners:
    """The contents of each GPU block since it was allocated last: an entry per block at most."""

    def __init__(self) -> None:
        self._contents: dict[int, BlockPrefix] = {}

    def allocate_for_load(self, blocks: Any) -> None:
        """blocks: vLLM's KVCacheBlocks of a request. Those without a hash hold nothing yet."""
        for block in chain.from_iterable(blocks.blocks):
            if not block.is_null and block.block_hash is None:
                self._contents.pop(block.block_id, None)

    def begin_step(self, scheduler: Any, tables: Iterable[tuple[str, Any, bool]]) -> None:
        """tables: of each scheduled request its name, its block ids per group, and whether these
        are its whole table instead of the blocks that this step adds (vLLM's yield_req_data)."""
        for name, block_ids, is_full_table in tables:
            status = scheduler._req_status.get(name)  # noqa: SLF001 - vLLM has no call
            if block_ids and status is not None:
                for config, state in _groups(scheduler, status):
                    new = block_ids[config.group_idx]
                    first = 0 if is_full_table else len(state.block_ids)
                    prefixes = _prefixes(scheduler, status, config, first, first + len(new))
                    self._contents.update(
                        (block, prefix)
                        for block, prefix in zip(new, prefixes, strict=True)
                        if block
                    )

    def drop_foreign_blocks(
        self, scheduler: Any, scheduled: Iterable[str], finished: Iterable[str]
    ) -> None:
        """Set the ids of blocks that hold something else to 0, where vLLM may store from.

        scheduled, finished: the requests of this step. A request that runs stores from its next
        chunk on, and one that ends may store earlier chunks, too.
        """
        for name, ended in chain(((n, False) for n in scheduled), ((n, True) for n in finished)):
            status = scheduler._req_status.get(name)  # noqa: SLF001 - vLLM has no call
            if status is None:
                continue
            per_chunk = scheduler.config.blocks_per_chunk
            tokens = scheduler._calc_num_offloadable_tokens(status, status.req.num_tokens)  # noqa: SLF001 - no call
            for config, state in _groups(scheduler, status):
                first = 0 if ended else state.next_stored_chunk_idx * per_chunk
                ids = state.block_ids
                end = min(len(ids), tokens // config.tokens_per_block)
                if first >= end:
                    continue
                prefixes = _prefixes(scheduler, status, config, first, end)
                for position, prefix in zip(range(first, end), prefixes, strict=True):
                    held = self._contents.get(ids[position])
                    if ids[position] and (held is None or not prefix.is_in(held)):
                        # All of the chunk: vLLM before 0.33 looks at its last block only.
                        begin = position - position % per_chunk
                        count = min(per_chunk, end - begin)
                        ids[begin : begin + count] = [0] * count


def _groups(scheduler: Any, status: Any) -> Iterable[tuple[Any, Any]]:
    return zip(scheduler.config.kv_group_configs, status.group_states, strict=True)


def _prefixes(
    scheduler: Any, status: Any, config: Any, first: int, end: int
) -> Iterable[BlockPrefix]:
    """Of the blocks from `first` to `end` of a request's table."""
    per_block = config.hashes_per_chunk // scheduler.config.blocks_per_chunk
    hashes = status.req.block_hashes
    for position in range(first, end):
        yield BlockPrefix(config.group_idx, hashes, (position + 1) * per_block - 1)
