"""The scheduler's side: the methods of vLLM's OffloadingManager, over ours. None waits or raises.

Called in the scheduler's thread. No vLLM is needed here: its lookup codes come as `LookupCodes`,
and a class of a few lines makes this one of its managers (spec.py).

While a daemon is away everything is a miss and nothing is stored, and polling reconnects (the
clients of the manager do it: kvferry.client.reconnect). Pins and resets are restored then.

A request waits for what is done here, key by key. So a lookup only looks into the sets that the
mirrors keep; a step's first lookup takes in what has arrived. What nobody waits for (touches,
unpins) is sent at the end of the step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar

from kvferry.client.manager import OffloadingManager
from kvferry.client.residency_events import OffloadingEvent
from kvferry.client.vllm.engine_config import TIMEOUT, EngineConfig
from kvferry.proto.errors import Code, KVFerryError, Refused
from kvferry.proto.keys import Lookup, OffloadKey

log = logging.getLogger("kvferry")

P = ParamSpec("P")
R = TypeVar("R")

LOOKUP_TIMEOUT = 2.0
"""Seconds that a request waits for stores on their way, and for a mirror that is not whole."""
MAX_LOADS = 8
"""A request that loaded so often computes: what it finds may be what cannot be loaded."""
TOUCH_INTERVAL = 1.0
"""Seconds that a touch of the same keys by the same request is good for."""
UNDECIDED = Lookup.HIT_PENDING, Lookup.RETRY
Keys: TypeAlias = tuple[OffloadKey, ...]

NO_KEYS: tuple[Set[OffloadKey], ...] = (frozenset(),)
"""Before a step's first lookup, and while there is no daemon."""


@dataclass(frozen=True, slots=True)
class LookupCodes:
    """vLLM's constants for the answers to a lookup."""

    hit: Any
    miss: Any
    pending: Any
    retry: Any


@dataclass(slots=True)
class KeysSpec:
    """Host blocks by key, on their way to the workers.

    Of a store only: generations, one a rank, and keys to keep (KeyLoadStoreSpec).
    """

    keys: tuple[OffloadKey, ...]
    generations: tuple[int, ...] = ()
    keep: tuple[OffloadKey, ...] = ()

    def generation(self, rank: int) -> int:
        return self.generations[rank] if self.generations else 0


@dataclass(frozen=True, slots=True)
class StoreOutput:
    """As vLLM's PrepareStoreOutput."""

    keys_to_store: list[OffloadKey]
    store_spec: KeysSpec
    evicted_keys: list[OffloadKey]


@dataclass(slots=True)
class RequestState:
    """A request that looks keys up: since when, and how often it loaded.

    touched: lists of keys by the last and the number of them, and when.
    """

    since: float
    loads: int = 0
    touched: dict[tuple[OffloadKey, int], float] = field(default_factory=dict)

    def touches(self, keys: Sequence[OffloadKey]) -> bool:
        """Whether it is to be said; a key stands for all before it."""
        now, what = time.monotonic(), (keys[-1], len(keys))
        if now - self.touched.get(what, 0.0) < TOUCH_INTERVAL:
            return False
        self.touched = {old: at for old, at in self.touched.items() if now - at < TOUCH_INTERVAL}
        self.touched[what] = now
        return True


def catch_errors(
    method: Callable[Concatenate[SchedulerSide, P], R],
) -> Callable[Concatenate[SchedulerSide, P], R | None]:
    """A method whose errors end the session, and not the engine."""

    @wraps(method)
    def attempt(self: SchedulerSide, /, *args: P.args, **kwargs: P.kwargs) -> R | None:
        try:
            return method(self, *args, **kwargs)
        except KVFerryError as error:
            self.give_up(error)
            return None

    return attempt


class SchedulerSide:
    def __init__(self, config: EngineConfig, codes: LookupCodes, *, events: bool) -> None:
        self._config, self._events = config, events
        self._hit = codes.hit
        self._codes = {
            Lookup.HIT: codes.hit,
            Lookup.MISS: codes.miss,
            Lookup.HIT_PENDING: codes.pending,
            Lookup.RETRY: codes.retry,
        }
        # False once vLLM's keys turned out to be none of this namespace.
        self._usable = True
        self._manager = self._open()
        self._ready = NO_KEYS
        self._hits = 0
        self._requests: dict[str, RequestState] = {}
        self._request = RequestState(0.0)
        """Whose lookups these are."""
        self._hurry = False
        """Whether a load of this step is still to be submitted."""
        # The pinned keys of a request's load; it has one at a time.
        self._loads: dict[str, Keys] = {}
        # Keys of loads that ended in this step, and in the step before: these are unpinned next.
        self._ended: list[Keys] = []
        self._due: list[Keys] = []

    def begin_lookups(self, request: str) -> None:
        """The lookups that follow are of this request."""
        self._request = self._requests.setdefault(request, RequestState(time.monotonic()))
        if self._request.loads >= MAX_LOADS:
            self._ready = NO_KEYS

    def on_request_finished(self, req_context: Any) -> None:
        self._requests.pop(req_context.req_id, None)

    def lookup(self, key: OffloadKey, req_context: Any) -> Any:
        for ready in self._ready:
            if key not in ready:
                return self._codes[self._look(key) or Lookup.MISS]
        self._hits += 1
        return self._hit

    def prepare_load(self, keys: Collection[OffloadKey], req_context: Any) -> KeysSpec:
        """A key that went since it was looked up makes the load fail, which is a miss."""
        keys = tuple(keys)
        self._keep(keys, req_context.req_id)
        self._request.loads += 1
        self._hurry = True
        return KeysSpec(keys)

    def complete_load(self, keys: Collection[OffloadKey], req_context: Any) -> None:
        if (pinned := self._loads.pop(req_context.req_id, None)) is not None:
            self._ended.append(pinned)

    @catch_errors
    def touch(self, keys: Sequence[OffloadKey], req_context: Any) -> None:
        """A request that waits touches all its keys in every step."""
        state = self._requests.get(req_context.req_id)
        if self._usable and keys and (state is None or state.touches(keys)):
            self._manager.touch(keys)

    def prepare_store(self, keys: Collection[OffloadKey], req_context: Any) -> StoreOutput:
        """Nothing to store, where nothing can be: of None vLLM would offer all again each step."""
        return self._offer(keys) or StoreOutput([], KeysSpec(()), [])

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: Any, success: bool = True
    ) -> None:
        self._manager.complete_store(keys, success)

    def on_schedule_end(self, context: Any = None) -> None:
        self._ready = NO_KEYS
        hurry, self._hurry = self._hurry, False
        if self._due or not hurry:
            self._flush()
        self._due += self._ended
        self._ended.clear()

    def has_pending_work(self) -> bool:
        """Whether vLLM must make another step: keys are to be let go."""
        return bool(self._due or self._ended)

    @catch_errors
    def reset_cache(self) -> None:
        """vLLM forgets its loads, and completes none of them.

        A daemon that is away does the reset before it answers anything again.
        """
        self._ready = NO_KEYS
        self._ended += self._loads.values()
        self._loads.clear()
        self._manager.reset_cache()

    def shutdown(self) -> None:
        self._manager.close()

    @catch_errors
    def events(self) -> list[OffloadingEvent]:
        """What became a HIT and what ceased to be one, where vLLM publishes events."""
        return self._manager.take_events() if self._events else []

    def give_up(self, error: KVFerryError) -> None:
        """Begin new sessions. If keys are not this namespace's, they never will be: turn off."""
        self._ready = NO_KEYS
        if error.code == Code.BAD_KEY:
            if self._usable:
                log.error(
                    "kvferry: offloading is off: vLLM's block hashes are not as long as those of "
                    "its algorithm, %s: %s",
                    self._config.fingerprint.hash_algorithm,
                    error,
                )
            self._usable = False
            self._manager.close()
        elif self._usable:
            log.warning("kvferry: the scheduler's sessions are begun anew: %s", error)
            self._manager.abandon()

    @catch_errors
    def _look(self, key: OffloadKey) -> Lookup:
        """What the manager says; the sets are as fresh as that from now on."""
        state, manager = self._request, self._manager
        if not self._usable or state.loads >= MAX_LOADS:
            return Lookup.MISS
        found = manager.lookup(key)
        self._ready = manager.ready_keys
        if found in UNDECIDED and time.monotonic() - state.since > LOOKUP_TIMEOUT:
            return Lookup.MISS
        return found

    @catch_errors
    def _offer(self, keys: Collection[OffloadKey]) -> StoreOutput | None:
        output = self._manager.prepare_store(keys) if self._usable else None
        if output is None or not output.keys_to_store:
            return None
        generations = tuple(spec.generation for spec in output.store_specs)
        spec = KeysSpec(output.keys_to_store, generations, output.store_spec.keep)
        return StoreOutput(list(output.keys_to_store), spec, [])

    @catch_errors
    def _keep(self, keys: tuple[OffloadKey, ...], request: str) -> None:
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
        """Send what nobody waits for; while a daemon is away, reconnect."""
        due, self._due = self._due, []
        if not self._usable:
            return
        manager = self._manager
        if manager.gone is not None:
            manager.poll()
        manager.count_hits(self._hits)
        self._hits = 0
        manager.flush()
        for keys in due:
            manager.complete_load(keys)

    def _open(self) -> OffloadingManager:
        """A manager that waits for daemons which are there now, and for no others."""
        config = self._config
        ranks = [config.of(rank) for rank in range(config.world_size)]
        manager = OffloadingManager.connect(
            [rank.daemon for rank in ranks],
            engine=config.engine,
            fingerprint=config.fingerprint,
            events=self._events,
            timeout=TIMEOUT,
            wait=False,
            **config.options,
        )
        try:
            for rank in ranks:
                rank.daemon()
            manager.wait_connected(TIMEOUT)
        except KVFerryError as error:
            log.warning("kvferry: the scheduler goes on without its daemon for now: %s", error)
        return manager
