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
from itertools import chain, repeat
from typing import Any, NamedTuple


class RequestBlocks(NamedTuple):
    """The contents of the blocks of a request in one KV cache group, by their position.

    hashes: those of the request, which grow with it. per_block: hashes of a block's tokens.
    """

    group: int
    hashes: Sequence[bytes]
    per_block: int

    def has(self, position: int, contents: tuple[RequestBlocks, int] | None) -> bool:
        """Whether the block at a position has these contents: of another request's position.

        A block that is not full has no hash: then it must be the same position of the same request.
        """
        if contents is None:
            return False
        other, at = contents
        if self.group != other.group:
            return False
        if self.hashes is other.hashes and position == at:
            return True
        mine, theirs = (position + 1) * self.per_block - 1, (at + 1) * other.per_block - 1
        if mine >= len(self.hashes) or theirs >= len(other.hashes):
            return False
        return self.hashes[mine] == other.hashes[theirs]


class BlockOwners:
    """The contents of each GPU block since it was allocated last: an entry per block at most.

    A request with a million tokens that the GPU's cache serves brings 62,500 blocks in one step,
    and no token is computed meanwhile. So entries are made without a Python instruction for each.
    """

    def __init__(self) -> None:
        self._contents: dict[int, tuple[RequestBlocks, int]] = {}
        # For each request of this step and group, the position of the first block that it adds.
        self._added_from: dict[tuple[str, int], int] = {}

    def allocate_for_load(self, blocks: Any) -> None:
        """blocks: vLLM's KVCacheBlocks of a request. Those without a hash hold nothing yet.

        They follow those that the GPU's cache serves, of which there may be thousands.
        """
        for group in blocks.blocks:
            for block in reversed(group):
                if block.is_null:
                    continue
                if block.block_hash is not None:
                    break
                self._contents.pop(block.block_id, None)

    def begin_step(self, scheduler: Any, tables: Iterable[tuple[str, Any, bool]]) -> None:
        """tables: of each scheduled request its name, its block ids per group, and whether these
        are its whole table instead of the blocks that this step adds (vLLM's yield_req_data)."""
        self._added_from.clear()
        for name, block_ids, is_full_table in tables:
            status = scheduler._req_status.get(name)  # noqa: SLF001 - vLLM has no call
            if block_ids and status is not None:
                for config, state in _groups(scheduler, status):
                    new = block_ids[config.group_idx]
                    first = 0 if is_full_table else len(state.block_ids)
                    contents = zip(
                        repeat(_blocks_of(scheduler, status, config)),
                        range(first, first + len(new)),
                    )
                    self._contents.update(zip(new, contents, strict=False))
                    self._added_from[name, config.group_idx] = first
        self._contents.pop(0, None)  # vLLM's null block

    def drop_foreign_blocks(
        self, scheduler: Any, scheduled: Iterable[str], finished: Iterable[str]
    ) -> None:
        """Set the ids of blocks that hold something else to 0, where vLLM may store from.

        scheduled, finished: the requests of this step. A request that runs stores from its next
        chunk on, and one that ends may store earlier chunks, too. The blocks that a step adds to a
        request that it schedules are the request's.
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
                added = self._added_from.get((name, config.group_idx), end)
                wanted, get = _blocks_of(scheduler, status, config), self._contents.get
                for position in range(first, end if ended else min(added, end)):
                    block = ids[position]
                    if block and not wanted.has(position, get(block)):
                        # All of the chunk: vLLM before 0.33 looks at its last block only.
                        begin = position - position % per_chunk
                        count = min(per_chunk, end - begin)
                        ids[begin : begin + count] = [0] * count


def _groups(scheduler: Any, status: Any) -> Iterable[tuple[Any, Any]]:
    return zip(scheduler.config.kv_group_configs, status.group_states, strict=True)


def _blocks_of(scheduler: Any, status: Any, config: Any) -> RequestBlocks:
    per_block = config.hashes_per_chunk // scheduler.config.blocks_per_chunk
    return RequestBlocks(config.group_idx, status.req.block_hashes, per_block)
