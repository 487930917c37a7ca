"""Stores at eviction: host memory gets what the GPU is about to lose, not what the GPU has, too.

A chunk that vLLM's scheduler would store is noted instead, if storing it would evict another one.
Blocks without references wait in vLLM's free queue, whose head is allocated next. In each step that
allocates blocks, the chunks with a block near the head are stored if host memory lacks them, and
are marked as used there if it has them.

Nothing is held: a block stays in the queue while it is stored, so the GPU's cache loses no hits and
a step finds as many free blocks as without stores. The block is in vLLM's fence: a step that takes
it waits for the store. vLLM removes a block's hash before it gives the block to something else, and
a block with a hash has been written by the end of the step that is being scheduled. So a noted
chunk is there as long as its blocks have its hashes.

Not for models whose blocks vLLM overwrites before it lets a connector wait (held_blocks.py), and
not for chunks of which a block is missing, such as at the edge of a sliding window: these are
stored at once. Called in the scheduler's thread. Does not import vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeAlias

from kvferry.proto.keys import OffloadKey

IsStored: TypeAlias = Callable[[OffloadKey], bool]

# Blocks at the head of the queue that are looked at, beyond those that the largest load and two
# steps allocate: a store that is submitted in one step is done in the next.
MARGIN = 64
# Each further load or prefill reduces the largest one that is remembered by this factor. A chunk
# that is stored early takes room in both memories, and most requests are short.
FADE = 0.97
# vLLM's keys, and the hashes of its blocks, end in the number of the group.
GROUP_BYTES = 4


@dataclass(eq=False, slots=True)
class NotedChunk:
    """A chunk in GPU blocks. group: its place in vLLM's list. hashes: of the blocks, when they have
    its KV. epochs: in which its request began, one per rank."""

    key: OffloadKey
    group: int
    blocks: tuple[int, ...]
    hashes: tuple[bytes, ...]
    epochs: tuple[int, ...]


@dataclass(slots=True)
class EvictionJob:
    """A store of noted chunks. blocks: in the order of the groups, `sizes` of each. target: the
    keys as the workers get them. pending: ranks that have not reported."""

    keys: list[OffloadKey]
    blocks: list[int]
    sizes: list[int]
    target: Any
    pending: int


@dataclass(slots=True)
class NearChunks:
    """The chunks near the head of the queue, those to be evicted first in front."""

    lacking: list[NotedChunk] = field(default_factory=list)
    resident: dict[OffloadKey, None] = field(default_factory=dict)


class EvictionStores:
    """The noted chunks of an engine, and the stores of those that were about to be evicted.

    scheduler: vLLM's OffloadingConnectorScheduler. pool: its BlockPool.
    """

    def __init__(self, scheduler: Any, pool: Any) -> None:
        self._scheduler, self._pool = scheduler, pool
        # For each GPU block the chunk that was noted last.
        self._noted: dict[int, NotedChunk] = {}
        self._jobs: dict[int, EvictionJob] = {}
        # Resident keys that were near the head in the last look.
        self._near: dict[OffloadKey, None] = {}
        # Blocks that all steps since the last look have allocated, about; and the most that a
        # recent one has computed, and loaded.
        self._allocated = self._most_computed = self._most_loaded = 0
        # Blocks whose chunks are stored with the next look.
        self._wanted: dict[int, None] = {}
        # Tokens that this step loads.
        self._loaded_tokens = 0

    def __bool__(self) -> bool:
        """Whether stores are in flight."""
        return bool(self._jobs)

    # Noting

    def note_stores(
        self, request: str, keys: Iterable[OffloadKey], epochs: tuple[int, ...]
    ) -> list[OffloadKey]:
        """vLLM wants to store chunks of a request. Returns those that cannot be noted."""
        wanted = dict.fromkeys(keys)
        status = self._scheduler._req_status[request]  # noqa: SLF001 - vLLM has no call
        per_chunk, ended = self._scheduler.config.blocks_per_chunk, status.req.is_finished()
        groups = zip(self._scheduler.config.kv_group_configs, status.group_states, strict=True)
        for number, (group, state) in enumerate(groups):
            first = 0 if ended else state.next_stored_chunk_idx
            last = min(len(state.offload_keys), len(state.block_ids) // per_chunk)
            for chunk in range(first, last):
                key = state.offload_keys[chunk]
                if key in wanted:
                    blocks = state.block_ids[chunk * per_chunk : (chunk + 1) * per_chunk]
                    noted = self._chunk_of(status, group, number, key, chunk, blocks, epochs)
                    if all(blocks) and self._is_cached(noted):
                        self._note(noted)
                        del wanted[key]
        return list(wanted)

    def note_load(
        self, request: str, loaded: Sequence[OffloadKey], tokens: int, epochs: tuple[int, ...]
    ) -> None:
        """A request loads chunks into GPU blocks, which have their hashes afterwards. loaded: their
        keys, in order. tokens: that it loads. Chunks of which a part is loaded are not noted."""
        self._loaded_tokens += tokens
        jobs = self._scheduler._current_batch_load_jobs  # noqa: SLF001 - vLLM has no call
        job = next(reversed(jobs.values()))
        status = self._scheduler._req_status[request]  # noqa: SLF001 - vLLM has no call
        per_chunk, target = self._scheduler.config.blocks_per_chunk, job.dst_spec
        keys, first, ids = iter(loaded), 0, target.block_ids.tolist()
        extents = zip(target.group_sizes, target.block_indices, strict=True)
        for number, (size, index) in enumerate(extents):
            group = self._scheduler.config.kv_group_configs[number]
            for at in range(index // per_chunk, -(-(index + size) // per_chunk) if size else 0):
                key, begin = next(keys), at * per_chunk - index
                blocks = ids[first + max(0, begin) : first + min(size, begin + per_chunk)]
                has_hashes = (at + 1) * group.hashes_per_chunk <= len(status.req.block_hashes)
                if len(blocks) == per_chunk and has_hashes:
                    self._note(self._chunk_of(status, group, number, key, at, blocks, epochs))
            first += size

    def store_soon(self, blocks: Iterable[int], keys: Iterable[OffloadKey]) -> None:
        """Store the chunks in these blocks that have one of these keys, in this step."""
        self._wanted.update(dict.fromkeys(self._blocks_with(blocks, keys)))

    def forget_chunks(self, blocks: Iterable[int], keys: Iterable[OffloadKey]) -> None:
        """Do not store the chunks in these blocks that have one of these keys, unless they are
        noted again."""
        for block in self._blocks_with(blocks, keys):
            self._noted.pop(block, None)  # a table names a block twice that a window has left

    def forget(self) -> None:
        """The contents of all blocks are outdated. Stores in flight go on."""
        self._noted.clear()
        self._near.clear()
        self._wanted.clear()

    # In each step

    def count_allocated(self, scheduled: Mapping[str, int]) -> None:
        """A step has allocated blocks. scheduled: tokens of each request that it computes."""
        computed = self._blocks_of(sum(scheduled.values()))
        loaded, self._loaded_tokens = self._blocks_of(self._loaded_tokens), 0
        self._allocated += computed + loaded
        if computed > len(scheduled):  # a prefill
            self._most_computed = max(int(FADE * self._most_computed), computed)
        if loaded:
            self._most_loaded = max(int(FADE * self._most_loaded), loaded)

    def near_chunks(self, is_stored: IsStored) -> NearChunks:
        """The chunks near the head of the free queue, if there is need to look, and those to store
        soon. is_stored: whether host memory has a key."""
        depth = self._most_loaded + 2 * self._most_computed + MARGIN
        slack = depth // 4
        short = self._pool.free_block_queue.num_free_blocks <= depth + slack
        wanted, self._wanted = self._wanted, {}
        if not self._noted or not self._allocated or (self._allocated < slack and not short):
            return self._look(iter(wanted), is_stored) if wanted else NearChunks()
        self._allocated = 0
        return self._look(chain(wanted, self._free_blocks(depth + slack)), is_stored)

    def all_chunks(self, is_stored: IsStored) -> NearChunks:
        """All noted chunks, for an engine that ends: those in use last."""
        free = dict.fromkeys(self._free_blocks(len(self._pool.blocks)))
        return self._look(iter([*free, *(self._noted.keys() - free.keys())]), is_stored)

    def add_job(self, chunks: Sequence[NotedChunk], output: Any) -> tuple[int, EvictionJob]:
        """These chunks are stored, in the order of their groups. Returns the job's id, too.

        output: vLLM's PrepareStoreOutput of their keys.
        """
        scheduler, by_key = self._scheduler, {chunk.key: chunk for chunk in chunks}
        accepted = [by_key[key] for key in output.keys_to_store]
        blocks, sizes = list[int](), list[int]()
        for number in range(len(scheduler.config.kv_group_configs)):
            its = [block for one in accepted if one.group == number for block in one.blocks]
            blocks += its
            sizes.append(len(its))
        job_id = scheduler._generate_job_id()  # noqa: SLF001 - vLLM has no call
        keys = list(output.keys_to_store)
        job = EvictionJob(keys, blocks, sizes, output.store_spec, scheduler.config.num_workers)
        self._jobs[job_id] = job
        for block in blocks:
            scheduler._block_id_to_pending_jobs.setdefault(block, set()).add(job_id)  # noqa: SLF001
        return job_id, job

    def take_completed(self, completed: dict[int, int]) -> Iterator[list[OffloadKey]]:
        """Remove the own jobs from those that ranks have reported; the keys of those that ended.

        completed: for each job the number of ranks in which it has ended.
        """
        fence = self._scheduler._block_id_to_pending_jobs  # noqa: SLF001 - vLLM has no call
        for job_id in completed.keys() & self._jobs.keys():
            job = self._jobs[job_id]
            job.pending -= completed.pop(job_id)
            if job.pending <= 0:
                del self._jobs[job_id]
                for block in job.blocks:  # a reset removes all
                    if (jobs := fence.get(block)) is not None:
                        jobs.discard(job_id)
                        if not jobs:
                            del fence[block]
                yield job.keys

    @property
    def jobs(self) -> list[int]:
        """The ids of the stores in flight."""
        return list(self._jobs)

    def _blocks_of(self, tokens: int) -> int:
        """Blocks of all groups that so many tokens of a request take."""
        groups = self._scheduler.config.kv_group_configs
        return sum(-(-tokens // group.tokens_per_block) for group in groups)

    def _chunk_of(
        self,
        status: Any,
        group: Any,
        number: int,
        key: OffloadKey,
        chunk: int,
        blocks: Sequence[int],
        epochs: tuple[int, ...],
    ) -> NotedChunk:
        per_chunk = self._scheduler.config.blocks_per_chunk
        if per_chunk == 1:
            hashes: tuple[bytes, ...] = (key,)
        else:
            step = group.hashes_per_chunk // per_chunk
            first, suffix = chunk * group.hashes_per_chunk, key[-GROUP_BYTES:]
            its = status.req.block_hashes[first + step - 1 : first + group.hashes_per_chunk : step]
            hashes = tuple(each + suffix for each in its)
        return NotedChunk(key, number, tuple(blocks), hashes, epochs)

    def _blocks_with(self, blocks: Iterable[int], keys: Iterable[OffloadKey]) -> list[int]:
        noted, wanted = self._noted, {*keys}
        return [block for block in blocks if block in noted and noted[block].key in wanted]

    def _note(self, chunk: NotedChunk) -> None:
        for block in chunk.blocks:
            self._noted[block] = chunk

    def _is_cached(self, chunk: NotedChunk) -> bool:
        """Whether all of its blocks still have its KV."""
        blocks, pairs = self._pool.blocks, zip(chunk.blocks, chunk.hashes, strict=True)
        return all(blocks[block].block_hash == its for block, its in pairs)

    def _free_blocks(self, count: int) -> Iterator[int]:
        """The ids of the first blocks of the free queue."""
        block = self._pool.free_block_queue.fake_free_list_head.next_free_block
        for _ in range(count):
            if block is None or block.next_free_block is None:  # the end of the queue
                return
            yield block.block_id
            block = block.next_free_block

    def _look(self, blocks: Iterator[int], is_stored: IsStored) -> NearChunks:
        noted = self._noted
        found = dict.fromkeys(noted[block] for block in blocks if block in noted)
        near, resident = NearChunks(), dict[OffloadKey, None]()
        for chunk in found:
            if not self._is_cached(chunk):
                for block in chunk.blocks:
                    if self._noted.get(block) is chunk:
                        del self._noted[block]
            elif is_stored(chunk.key):
                resident[chunk.key] = None
                if chunk.key not in self._near:
                    near.resident[chunk.key] = None
            else:
                near.lacking.append(chunk)
        self._near = resident
        return near
