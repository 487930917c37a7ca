"""The scheduler's side: vLLM's OffloadingManager, over ours. Nothing here waits or fails.

While a daemon is away everything is a miss and nothing is stored. What was pinned or offered by
then is completed by vLLM later all the same, and means nothing to the manager that came after.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from vllm.v1.kv_offload import base as vllm

from kvferry.client.manager import OffloadingManager
from kvferry.client.vllm.lasting import Lasting
from kvferry.client.vllm.place import (
    TIMEOUT,
    daemon_of,
    engine_name,
    namespace_options,
)
from kvferry.proto.errors import Refused
from kvferry.proto.keys import Lookup
from kvferry.proto.status import Fingerprint

_HIT, _MISS = vllm.LookupResult.HIT, vllm.LookupResult.MISS
_OTHERS = {
    Lookup.HIT_PENDING: vllm.LookupResult.HIT_PENDING,
    Lookup.RETRY: vllm.LookupResult.RETRY,
}


@dataclass
class KeysSpec(vllm.LoadStoreSpec):
    """Host blocks by key, on their way to the workers. generations: one a rank; none for a load."""

    keys: tuple[bytes, ...]
    generations: tuple[int, ...] = ()

    def generation(self, rank: int) -> int:
        return self.generations[rank] if self.generations else 0


class Manager(vllm.OffloadingManager):
    """`config` is vLLM's OffloadingConfig."""

    def __init__(self, config: Any, fingerprint: Fingerprint, *, events: bool) -> None:
        self._config, self._fingerprint, self._events = config, fingerprint, events
        self._lasting = Lasting("the scheduler's connection", self._open)
        self._manager = self._lasting.current
        """As of the last step's end: lookups are many."""
        self._kept_by: OffloadingManager | None = None
        self._kept: Counter[bytes] = Counter()
        """Pinned by the manager that there is now, and to be released."""
        self._loaded: list[Collection[bytes]] = []
        """To be released once the step is scheduled: a request waits for that."""

    def lookup(self, key: bytes, req_context: Any) -> Any:
        if self._manager is None:
            return _MISS
        found = self._manager.lookup(key)
        return _HIT if found is Lookup.HIT else _MISS if found is Lookup.MISS else _OTHERS[found]

    def prepare_load(self, keys: Collection[bytes], req_context: Any) -> KeysSpec:
        """A key that went since it was looked up makes the load fail, which is a miss."""
        keys, manager = tuple(keys), self._lasting.current
        if manager is not None:
            if manager is not self._kept_by:
                self._kept_by, self._kept = manager, Counter()
            try:
                manager.prepare_load(keys)
                self._kept.update(keys)
            except Refused:
                pass
        return KeysSpec(keys)

    def complete_load(self, keys: Collection[bytes], req_context: Any) -> None:
        self._loaded.append(keys)

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        if (manager := self._lasting.current) is not None:
            manager.touch(keys)

    def prepare_store(self, keys: Collection[bytes], req_context: Any) -> Any:
        manager = self._lasting.current
        output = None if manager is None else manager.prepare_store(keys)
        if output is None:
            return None
        generations = tuple(spec.generation for spec in output.store_specs)
        spec = KeysSpec(output.keys_to_store, generations)
        return vllm.PrepareStoreOutput(list(output.keys_to_store), spec, [])

    def complete_store(
        self, keys: Collection[bytes], req_context: Any, success: bool = True
    ) -> None:
        if (manager := self._lasting.current) is not None:
            manager.complete_store(keys, success)

    def on_new_request(self, req_context: Any) -> Any:
        return vllm.RequestOffloadingContext()

    def on_schedule_end(self, context: Any) -> None:
        self._manager = manager = self._lasting.current
        if manager is not None:
            manager.flush()
            if manager is self._kept_by:
                self._release(manager)
        self._loaded.clear()

    def take_events(self) -> Iterable[Any]:
        manager = self._lasting.current
        events = manager.take_events() if manager is not None and self._events else ()
        return [vllm.OffloadingEvent(list(e.keys), e.medium, e.removed) for e in events]

    def reset_cache(self) -> None:
        if (manager := self._lasting.current) is not None:
            manager.reset_cache()

    def shutdown(self) -> None:
        self._lasting.close()

    def _release(self, manager: OffloadingManager) -> None:
        for keys in self._loaded:
            held = [key for key in keys if self._kept[key] > 0]
            self._kept.subtract(held)
            manager.complete_load(held)
        if self._loaded:
            self._kept = +self._kept  # without those at zero

    def _open(self) -> OffloadingManager:
        config, extra = self._config, self._config.extra_config
        return OffloadingManager.open(
            [daemon_of(rank, extra) for rank in range(config.parallel.world_size)],
            engine=engine_name(config),
            fingerprint=self._fingerprint,
            events=self._events,
            timeout=TIMEOUT,
            **namespace_options(config),
        )
