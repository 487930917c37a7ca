"""LateStores: which chunks the scheduler's side stores at once, and which at their eviction.

EvictionStores knows the chunks of the GPU, this class the mode, host memory and the end of the
engine. Called in the scheduler's thread; no method raises. Does not import vLLM.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from kvferry.client.manager import OffloadingManager
from kvferry.client.vllm.engine_end import EngineEnd
from kvferry.client.vllm.eviction_stores import EvictionJob, EvictionStores, NotedChunk
from kvferry.client.vllm.options import StoreMode
from kvferry.client.vllm.scheduler_side import SchedulerSide
from kvferry.proto.keys import OffloadKey


class LateStores:
    """The stores of one engine that wait for evictions.

    side: of the scheduler. noted: the chunks that wait. mode: AUTO or AT_EVICTION.
    """

    def __init__(self, side: SchedulerSide, noted: EvictionStores, mode: StoreMode) -> None:
        self._side, self.noted, self._mode = side, noted, mode
        self._end = EngineEnd()

    @property
    def has_work(self) -> bool:
        """Whether vLLM must run another step for stores."""
        return self._end.allows_steps(bool(self.noted))

    def keys_to_store_now(
        self, request: str, keys: Collection[OffloadKey], epochs: tuple[int, ...]
    ) -> Collection[OffloadKey]:
        """Those of a request's keys that are stored at once. All others are noted."""
        return self._side.attempt(lambda manager: self._now(manager, request, keys, epochs)) or ()

    def note_load(self, request: str, tokens: int) -> None:
        """A request loads the KV of so many tokens into its GPU blocks."""
        if keys := self._side.loaded_keys(request):
            self.noted.note_load(request, keys, tokens, self._side.epochs_of(request))

    def spare_keys(self, keys: Sequence[OffloadKey]) -> None:
        """The GPU has these keys, so host memory need not, unless others wait for them."""
        self._side.attempt(lambda manager: None if manager.is_shared else manager.spare(keys))

    def stores_of_step(self, scheduled: Mapping[str, int]) -> list[tuple[int, EvictionJob]]:
        """The stores, by job id, of chunks that the GPU is about to lose; of all that only the GPU
        has, as far as they fit, if the engine ends. At the end of each step.

        scheduled: tokens of each request that the step computes.
        """
        self.noted.count_allocated(scheduled)
        return self._side.attempt(self._stores) or []

    def report(self, completed: dict[int, int]) -> None:
        """Remove the own jobs from those that ranks have reported. completed: for each job the
        number of ranks in which it has ended."""
        for keys in self.noted.take_completed(completed):
            self._side.complete_store(keys, None)

    def _now(
        self,
        manager: OffloadingManager,
        request: str,
        keys: Collection[OffloadKey],
        epochs: tuple[int, ...],
    ) -> Collection[OffloadKey]:
        if manager.is_resetting:
            return keys
        remaining = self.noted.note_stores(request, keys, epochs)
        has_room = manager.is_shared or manager.usage.free >= len(keys)
        return keys if self._mode is StoreMode.AUTO and has_room else remaining

    def _stores(self, manager: OffloadingManager) -> list[tuple[int, EvictionJob]]:
        ends = self._end.take()
        if manager.is_resetting or manager.gone is not None:
            return []
        is_stored = manager.is_stored
        near = self.noted.all_chunks(is_stored) if ends else self.noted.near_chunks(is_stored)
        if near.resident and not ends:
            manager.keep(tuple(near.resident)[::-1])
        jobs, most = list[tuple[int, EvictionJob]](), max(1, manager.num_blocks // 2)
        lacking = near.lacking[-manager.num_blocks :]
        for at in range(0, len(lacking), most):
            for epochs, chunks in _by_epochs(lacking[at : at + most]).items():
                keys = [chunk.key for chunk in chunks]
                if (output := self._side.offer_keys(keys, epochs, last=True)) is not None:
                    jobs.append(self.noted.add_job(chunks, output))
        return jobs


def _by_epochs(chunks: Sequence[NotedChunk]) -> dict[tuple[int, ...], list[NotedChunk]]:
    """Chunks that one store may have, those evicted last first: of each key one, in the order of
    their groups."""
    found: dict[tuple[int, ...], dict[OffloadKey, NotedChunk]] = {}
    last_first = reversed(chunks)
    for chunk in sorted(last_first, key=lambda chunk: chunk.group):
        found.setdefault(chunk.epochs, {})[chunk.key] = chunk
    return {epochs: list(each.values()) for epochs, each in found.items()}
