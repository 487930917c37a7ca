"""vLLM's OffloadingSpec and OffloadingManager, as far as they are the same in every generation.

    0.24         lookup answers True, False or None; a spec gives handlers (handlers.py)
    0.25, 0.26   lookup answers a LookupResult; a spec gives a worker (workers.py)

What the installed vLLM has decides, not its version.
"""

from __future__ import annotations

import logging
from typing import Any

from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs
from vllm.v1.kv_offload import base

from kvferry.client.vllm.place import Blocks, chunk_of, place_of, told
from kvferry.client.vllm.scheduler import SchedulerSide, Words

log = logging.getLogger("kvferry")

if hasattr(base, "LookupResult"):
    _results = base.LookupResult
    WORDS = Words(_results.HIT, _results.MISS, _results.HIT_PENDING, _results.RETRY)
else:
    WORDS = Words(True, False, None, None)


class Manager(SchedulerSide, base.OffloadingManager):
    def on_new_request(self, req_context: Any) -> Any:
        return base.RequestOffloadingContext()

    def take_events(self) -> list[Any]:
        return [
            base.OffloadingEvent(list(e.keys), e.medium, e.removed) for e in self.events() or ()
        ]


class Spec(base.OffloadingSpec):
    """Without the worker's half. `config`: whatever vLLM gives its specs."""

    def __init__(self, *config: Any) -> None:
        super().__init__(*config)
        vllm_config, kv_cache_config = told()
        blocks = self._cut(vllm_config, kv_cache_config)
        self.place = place_of(vllm_config, kv_cache_config, blocks)
        self._manager: Manager | None = None
        if len(kv_cache_config.kv_cache_groups) > 1:
            log.warning(
                "kvferry: this model has several KV cache groups, and vLLM cannot compute again "
                "what failed to load of such a model: an engine whose daemon is killed while it "
                "loads ends"
            )

    def get_manager(self) -> Manager:
        if self._manager is None:
            events = self.kv_events_config.enable_kv_cache_events
            self._manager = Manager(self.place, WORDS, events=events)
        return self._manager

    def _cut(self, vllm_config: Any, kv_cache_config: Any) -> Blocks:
        """How KV caches are cut up, the chunk of our choice, which the scheduler reads off here."""
        names = ("tokens_per_block", "tokens_per_hash", "blocks_per_chunk")
        if not hasattr(self, names[0]):
            names = ("gpu_block_size", "hash_block_size", "block_size_factor")
        tokens, hashed, factor = (getattr(self, name) for name in names)
        said = Blocks(tuple(tokens), hashed, factor)
        kinds = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        full = all(isinstance(one, FullAttentionSpec) for kind in kinds for one in _layers(kind))
        factor = chunk_of(vllm_config, kv_cache_config, said, full=full)
        setattr(self, names[2], factor)
        return Blocks(said.tokens, said.hashed, factor)


def _layers(kind: Any) -> tuple[Any, ...]:
    """Of layers of one type in several widths workers are given all; the scheduler any of them."""
    if isinstance(kind, UniformTypeKVCacheSpecs):
        return tuple(kind.kv_cache_specs.values())
    return (kind,)
