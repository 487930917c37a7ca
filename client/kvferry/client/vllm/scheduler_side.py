"""The scheduler's side: the methods of vLLM's OffloadingManager. None raises.

Called in the scheduler's thread. It does not import vLLM: spec.py derives vLLM's class from it.

While a daemon is disconnected, every lookup is a miss, nothing is stored, and polling reconnects;
pins and resets are then restored (kvferry.client.link).

A request waits for its lookups. So a lookup only reads the mirrors' sets; the first lookup of a
step receives messages. For the answer to its search a request waits shortly, and once: else it
would wait for a step of the others. Touches and unpins, for which nobody waits, are sent at the end
of the step.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from kvferry.client.engines.connecting import CONNECT_TIMEOUT, connect_if_running
from kvferry.client.manager import OffloadingManager
from kvferry.client.manager_outputs import ResidencyUsage
from kvferry.client.residency_events import OffloadingEvent
from kvferry.client.vllm.adapters import Adapters
from kvferry.client.vllm.engine_config import EngineConfig
from kvferry.client.vllm.options import StoreMode
from kvferry.client.vllm.request_state import Keys, RequestState
from kvferry.client.vllm.vllm_log import vllm_log
from kvferry.proto.errors import Code, KVFerryError, Refused
from kvferry.proto.keys import Lookup, OffloadKey

if TYPE_CHECKING:
    from kvferry.client.vllm.late_stores import LateStores

log = logging.getLogger("kvferry")

P = ParamSpec("P")
R = TypeVar("R")

# Seconds to wait for pending stores, for an incomplete mirror, and for the answer to a reset.
LOOKUP_TIMEOUT = 2.0
# Seconds to wait for pending keys although computing them is known to take less: it is hardly
# noticed, and on a busy machine processes wait for tenths of a second.
MIN_LOOKUP_TIMEOUT = 0.25
# A request that has loaded so often computes instead: its loads may fail again and again.
MAX_LOADS = 8
# Seconds in which a request does not touch the same keys again.
TOUCH_INTERVAL = 1.0
# Seconds between two looks at the usage of host memory, for vLLM's metrics.
USAGE_INTERVAL = 1.0
# Sizes of stores that are kept for vLLM's metrics, which may be off.
MAX_SIZES = 1024
UNDECIDED = Lookup.HIT_PENDING, Lookup.RETRY
# The ready keys before the first lookup of a step, and without a daemon.
NO_KEYS: tuple[Set[OffloadKey], ...] = (frozenset(),)


@dataclass(slots=True)
class KeysSpec:
    """Host blocks by key, as sent to the workers.

    For stores: epochs, one per rank, keys not to evict (KeyLoadStoreSpec), and the ranks among
    which the keys are divided (PrepareStoreOutput).
    """

    keys: tuple[OffloadKey, ...]
    epochs: tuple[int, ...] = ()
    keep: tuple[OffloadKey, ...] = ()
    writers: int = 1

    def epoch(self, rank: int) -> int | None:
        return self.epochs[rank] if self.epochs else None


@dataclass(frozen=True, slots=True)
class StoreOutput:
    """As vLLM's PrepareStoreOutput."""

    keys_to_store: list[OffloadKey]
    store_spec: KeysSpec
    evicted_keys: list[OffloadKey]


def catch_errors(
    method: Callable[Concatenate[SchedulerSide, P], R],
) -> Callable[Concatenate[SchedulerSide, P], R | None]:
    """Decorator: an error abandons the session, but does not end the engine. Returns None then."""

    @wraps(method)
    def attempt(self: SchedulerSide, /, *args: P.args, **kwargs: P.kwargs) -> R | None:
        try:
            return method(self, *args, **kwargs)
        except KVFerryError as error:
            self.handle_error(error)
            return None

    return attempt


class SchedulerSide:
    """The connector in vLLM's scheduler: lookups, and which blocks are stored and loaded.

    codes: vLLM's values for the results of a lookup. events: whether vLLM publishes events.
    """

    def __init__(self, config: EngineConfig, codes: Mapping[Lookup, Any], *, events: bool) -> None:
        self._config, self._events = config, events
        self._lookup_timeout, self._touch_interval = LOOKUP_TIMEOUT, TOUCH_INTERVAL
        self._codes, self._hit = codes, codes[Lookup.HIT]
        # False after vLLM's keys did not have the namespace's length.
        self._usable = True
        self._manager = self._connect()
        self.adapters = Adapters()
        self._ready = NO_KEYS
        self._hits = 0
        self._requests: dict[str, RequestState] = {}
        # The epochs in which each request began; None: while a reset was in progress.
        self._epochs: dict[str, tuple[int, ...] | None] = {}
        # The request of the current lookups.
        self._request = RequestState()
        self._may_load = config.loads
        # Requests that ended before this step.
        self._ended_requests: Collection[str] = ()
        # Whether the worker has to submit a load of this step: flushing would delay it.
        self._load_pending = False
        # The pinned keys of a request's load; it has one at a time.
        self._loads: dict[str, Keys] = {}
        # Keys of loads that ended in this step, and those to unpin at the end of it.
        self._ended: list[Keys] = []
        self._to_unpin: list[Keys] = []
        self._usage_due = self._reset_due = 0.0
        # If stores wait for evictions. Set by the connector.
        self.late_stores: LateStores | None = None
        # Keys in each store since the last call of take_store_sizes.
        self._store_sizes: deque[int] = deque(maxlen=MAX_SIZES)

    @catch_errors
    def request_arrived(self, request: str, keys: Sequence[OffloadKey], seconds: float) -> None:
        """A request was added; it is scheduled in a later step.

        keys: in prefix order. seconds: that the engine takes to compute one key's tokens, 0 if not
        known. Receives messages before the first lookup has to, and prefetches the keys that are
        below the host pool.
        """
        if self._usable:
            prefetch = self._manager.prefetch(keys if self._config.loads else (), seconds)
            searches = prefetch.searches or self._config.replicated
            if searches or seconds:
                state = self._requests.setdefault(request, RequestState())
                state.computing = seconds * len(keys)
            if searches:
                state.prefetch, state.keys, state.seconds = prefetch, tuple(keys), seconds

    def was_below(self, key: OffloadKey, request: str) -> bool:
        """Whether the request's prefetch has read this key from a tier. Keys that are loaded from a
        sibling's memory are not below."""
        if (state := self._requests.get(request)) is None:
            return False
        if state.found_below is None:
            found = state.prefetch.found_keys if state.prefetch.promotes else ()
            state.found_below = frozenset(found)
        return key in state.found_below

    def begin_lookups(self, request: str, *, may_load: bool = True) -> None:
        """The following lookups belong to this request. may_load: if not, they are misses."""
        self._request = self._requests.setdefault(request, RequestState())
        self._request.since = self._request.since or time.monotonic()
        self._epochs[request] = None if self._manager.is_resetting else self._manager.epochs
        self._may_load = may_load and self._config.loads and self._request.loads < MAX_LOADS
        if not self._may_load:
            self._ready = NO_KEYS

    def on_request_finished(self, req_context: Any) -> None:
        self._requests.pop(req_context.req_id, None)

    def lookup(self, key: OffloadKey, req_context: Any) -> Any:
        for ready in self._ready:
            if key not in ready:
                return self._codes[self._lookup_in_manager(key) or Lookup.MISS]
        self._hits += 1
        return self._hit

    @property
    def store_mode(self) -> StoreMode:
        return self._config.store_mode if self._config.stores else StoreMode.AT_ONCE

    def loaded_keys(self, request: str) -> Keys:
        """The keys that are pinned for a load of this request, in its order."""
        return self._loads.get(request, ())

    def has_key(self, key: OffloadKey) -> bool:
        """Whether a lookup found this key, or would find it, in this step."""
        return all(key in ready for ready in self._ready)

    def prepare_load(self, keys: Collection[OffloadKey], req_context: Any) -> KeysSpec:
        """If a key was evicted since its lookup, the load fails, which is a miss."""
        keys = tuple(keys)
        self._pin(keys, req_context.req_id)
        self._request.loads += 1
        if self._request.searched:
            self._manager.writers.end_search(found=True)
        self._load_pending = True
        return KeysSpec(keys)

    def complete_load(self, keys: Collection[OffloadKey], req_context: Any) -> None:
        if (pinned := self._loads.pop(req_context.req_id, None)) is not None:
            self._ended.append(pinned)

    def touch(self, keys: Sequence[OffloadKey], req_context: Any) -> None:
        """Before 0.31 vLLM touches all keys of a waiting request in every step."""
        self.touch_keys(keys, req_context)

    @catch_errors
    def touch_keys(self, keys: Sequence[OffloadKey], req_context: Any, new: int = 0) -> None:
        """new: see OffloadingManager.touch."""
        state = self._requests.get(req_context.req_id)
        if (
            self._usable
            and keys
            and (state is None or state.should_touch(keys, self._touch_interval))
        ):
            self._manager.touch(keys, new)

    @catch_errors
    def attempt(self, call: Callable[[OffloadingManager], R]) -> R | None:
        """Call a function with the manager, unless offloading is off."""
        return call(self._manager) if self._usable else None

    def prepare_store(self, keys: Collection[OffloadKey], req_context: Any) -> StoreOutput:
        """Empty if nothing can be stored, not None: then vLLM would offer all keys again."""
        if not self.adapters.may_use_keys(req_context.req_id):
            return StoreOutput([], KeysSpec(()), [])
        last = req_context.req_id in self._ended_requests
        epochs = self.epochs_of(req_context.req_id)
        if self.late_stores is not None:
            keys = self.late_stores.keys_to_store_now(req_context.req_id, keys, epochs)
        return self.offer_keys(keys, epochs, last) or StoreOutput([], KeysSpec(()), [])

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: Any, success: bool = True
    ) -> None:
        self._manager.complete_store(keys, success)

    def on_schedule_end(self, context: Any = None) -> None:
        self._ready = NO_KEYS
        for request in self._ended_requests:
            self._epochs.pop(request, None)
        load_pending, self._load_pending = self._load_pending, False
        if self._to_unpin or not load_pending:
            self._flush()
        self._to_unpin += self._ended
        self._ended.clear()

    def has_pending_work(self) -> bool:
        """Whether vLLM must run another step, at whose end keys are unpinned."""
        return bool(self._to_unpin or self._ended)

    @catch_errors
    def reset_cache(self) -> None:
        """Remove all keys. vLLM completes none of its loads afterwards, so they are unpinned.

        If a daemon is disconnected, reconnecting does the reset.
        """
        self.adapters.reset()
        if self.late_stores is not None:
            self.late_stores.noted.forget()
        self._ready = NO_KEYS
        self._ended += self._loads.values()
        self._loads.clear()
        self._reset_due = time.monotonic() + self._lookup_timeout
        self._manager.reset_cache()

    @catch_errors
    def is_resetting(self, ended: Collection[str] = ()) -> bool:
        """Whether a connected daemon has not answered a recent reset; receives its messages if so.

        Until then prepare_store returns no keys, and what it was given must be offered again.
        ended: requests that cannot offer again. Their keys are returned, and may be dropped.
        """
        manager, self._ended_requests = self._manager, ended
        if not self._usable or not manager.is_resetting:
            return False
        manager.poll()
        return manager.is_resetting and manager.gone is None and time.monotonic() < self._reset_due

    def shutdown(self) -> None:
        self._manager.close()

    @catch_errors
    def events(self) -> list[OffloadingEvent]:
        """Keys that became a HIT or ceased to be one, if vLLM publishes events."""
        return self._manager.take_events() if self._events else []

    @catch_errors
    def usage(self) -> ResidencyUsage | None:
        """The usage of host memory; None between two looks, and without a daemon."""
        now = time.monotonic()
        if now < self._usage_due or not self._usable or self._manager.gone is not None:
            return None
        self._usage_due = now + USAGE_INTERVAL
        return self._manager.usage

    def take_store_sizes(self) -> list[int]:
        """The numbers of keys in the stores since the last call, the oldest left out if many."""
        sizes = list(self._store_sizes)
        self._store_sizes.clear()
        return sizes

    def handle_error(self, error: KVFerryError) -> None:
        """Abandon the sessions. Turn offloading off if keys have another length than expected."""
        if error.code == Code.BAD_KEY:
            if self._usable:
                log.error(
                    "kvferry: offloading is off: the length of vLLM's block hashes is not that of "
                    "its algorithm %s: %s",
                    self._config.fingerprint.hash_algorithm,
                    error,
                )
            self._usable = False
            self._manager.close()
        elif self._usable:
            log.warning("kvferry: the scheduler abandons its sessions, and reconnects: %s", error)
            self._manager.abandon()

    @catch_errors
    def _lookup_in_manager(self, key: OffloadKey) -> Lookup:
        """Look a key up in the manager, and use its sets until the end of the step."""
        state, manager = self._request, self._manager
        if not self._usable or not self._may_load:
            return Lookup.MISS
        found = manager.lookup(key)
        if found is Lookup.RETRY and state.wait_search(manager.poll):
            found = manager.lookup(key)
        if found is Lookup.MISS and manager.writers.is_at_writer(key):
            found = state.search_writers(manager.writers, key)
        self._ready = manager.ready_keys
        if found in UNDECIDED and not state.waits(self._lookup_timeout, MIN_LOOKUP_TIMEOUT):
            return Lookup.MISS
        return found

    def epochs_of(self, request: str) -> tuple[int, ...]:
        """The epochs in which a request began: what it computes is valid in no other."""
        epochs = self._epochs.get(request, ())
        if epochs is None:  # this engine's reset was on its way, so nothing of before is in it
            epochs = self._manager.reset_epochs
            if not self._manager.is_resetting:
                self._epochs[request] = epochs
        return epochs

    @catch_errors
    def offer_keys(
        self, keys: Collection[OffloadKey], epochs: tuple[int, ...], last: bool
    ) -> StoreOutput | None:
        """epochs: see `epochs_of`. last: whether these keys are not offered again."""
        if not self._usable or not self._config.stores:
            return None
        if self._manager.is_resetting and not last:
            return None
        output = self._manager.prepare_store(keys, epochs)
        if output is None or not output.keys_to_store:
            return None
        self._store_sizes.append(len(output.keys_to_store))
        epochs = tuple(spec.epoch or 0 for spec in output.store_specs)
        keep, writers = output.store_spec.keep, output.writers
        spec = KeysSpec(output.keys_to_store, epochs, keep, writers)
        return StoreOutput(list(output.keys_to_store), spec, [])

    @catch_errors
    def _pin(self, keys: tuple[OffloadKey, ...], request: str) -> None:
        if not self._usable:
            return
        try:
            self._manager.prepare_load(keys)
        except Refused as error:
            if error.code != Code.KEY_ABSENT:
                raise
        else:
            self._loads[request] = keys

    @catch_errors
    def _flush(self) -> None:
        """Send touches and unpins; if a daemon is disconnected, advance the reconnect."""
        keys_to_unpin, self._to_unpin = self._to_unpin, []
        if not self._usable:
            return
        manager = self._manager
        if manager.gone is not None:
            manager.poll()
        manager.count_lookups(self._hits)
        self._hits = 0
        manager.flush()
        for keys in keys_to_unpin:
            manager.complete_load(keys)

    def _connect(self) -> OffloadingManager:
        """A manager. Waits only for daemons that are running now."""
        config = self._config
        ranks = [config.for_rank(rank) for rank in range(config.world_size)]
        manager = OffloadingManager.connect(
            [rank.find_daemon for rank in ranks],
            engine=config.engine,
            fingerprint=config.fingerprint,
            events=self._events,
            replicated=config.replicated,
            timeout=CONNECT_TIMEOUT,
            wait=False,
            **config.options,
        )
        find_daemons = [rank.find_daemon for rank in ranks]
        connect_if_running("the scheduler", manager, find_daemons, CONNECT_TIMEOUT, vllm_log)
        return manager
