"""The scheduler's side: the verbs of vLLM's OffloadingManager, over ours. Nothing waits or raises.

No vLLM is needed here: what it must be given in its own words comes as `Words`, and a class of a
few lines makes this one of its managers.

While a daemon is away everything is a miss and nothing is stored. What was pinned or offered by
then is completed by vLLM later all the same, and means nothing to the manager that came after.

A request waits for what is done here, key by key. So a lookup is a look into the sets that the
mirrors keep (a step's first lookup takes in what has arrived), and what nobody waits for, which
keys were touched or can be let go, is said when the request is on its way.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from kvferry.client.manager import OffloadingEvent, OffloadingManager
from kvferry.client.vllm.lasting import Lasting
from kvferry.client.vllm.place import TIMEOUT, Place
from kvferry.proto.errors import Code, KVFerryError, Refused
from kvferry.proto.keys import Lookup, OffloadKey

log = logging.getLogger("kvferry")

P = ParamSpec("P")
R = TypeVar("R")

PATIENCE = 2.0
"""Seconds that a request waits for stores on their way, and for a mirror that is not whole."""
LOADS = 8
"""A request that loaded so often computes: what it finds may be what cannot be loaded."""
TOUCHED = 1.0
"""Seconds that a touch of the same keys by the same request is good for."""
WAITING = Lookup.HIT_PENDING, Lookup.RETRY
UNSEEN: tuple[Set[OffloadKey], ...] = (frozenset(),)
"""Before a step's first lookup, and while there is no daemon."""


@dataclass(frozen=True, slots=True)
class Words:
    """What the installed vLLM calls the answers to a lookup."""

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

    @staticmethod
    def medium() -> str:
        """Asked for by vLLM up to 0.25."""
        return "CPU"


@dataclass(frozen=True, slots=True)
class StoreOutput:
    """As vLLM's PrepareStoreOutput."""

    keys_to_store: list[OffloadKey]
    store_spec: KeysSpec
    evicted_keys: list[OffloadKey]


@dataclass(frozen=True, slots=True)
class Load:
    """Keys that a request loads, and the manager that keeps them."""

    manager: OffloadingManager
    keys: tuple[OffloadKey, ...]


@dataclass(slots=True)
class Asker:
    """A request that looks keys up: since when, and how often it loaded.

    touched: lists of keys by the last and the number of them, and when.
    """

    since: float
    loads: int = 0
    touched: dict[tuple[OffloadKey, int], float] = field(default_factory=dict)

    def touches(self, keys: Sequence[OffloadKey]) -> bool:
        """Whether it is to be said; a key stands for all before it."""
        now, what = time.monotonic(), (keys[-1], len(keys))
        if now - self.touched.get(what, 0.0) < TOUCHED:
            return False
        self.touched = {old: at for old, at in self.touched.items() if now - at < TOUCHED}
        self.touched[what] = now
        return True


def harmless(
    verb: Callable[Concatenate[SchedulerSide, P], R],
) -> Callable[Concatenate[SchedulerSide, P], R | None]:
    """A verb that ends the connection where it cannot do what it should, and not the engine."""

    @wraps(verb)
    def attempt(self: SchedulerSide, /, *args: P.args, **kwargs: P.kwargs) -> R | None:
        try:
            return verb(self, *args, **kwargs)
        except KVFerryError as error:
            self.give_up(error)
            return None

    return attempt


class SchedulerSide:
    def __init__(self, place: Place, words: Words, *, events: bool) -> None:
        self._place, self._events = place, events
        self._hit = words.hit
        self._words = {
            Lookup.HIT: words.hit,
            Lookup.MISS: words.miss,
            Lookup.HIT_PENDING: words.pending,
            Lookup.RETRY: words.retry,
        }
        self._usable = True
        self._owed = False
        """Whether a reset was not done by every daemon."""
        self._told: OffloadingManager | None = None
        """Whom that reset was said to."""
        self._said: set[OffloadKey] = set()
        """What all events so far add up to, of whichever manager."""
        self._lasting = Lasting("the scheduler's connection", self._open)
        self._ready = UNSEEN
        self._hits = 0
        self._askers: dict[str, Asker] = {}
        self._asker = Asker(0.0)
        """Whose lookups these are."""
        self._hurry = False
        """Whether a load of this step is still to be submitted."""
        self._loads: dict[str, Load] = {}
        """By request, which has one at a time."""
        self._ended: list[Load] = []
        self._due: list[Load] = []
        """Of the step before: to be let go."""

    def looking_up(self, request: str) -> None:
        """The lookups that follow are of this request."""
        self._asker = self._askers.setdefault(request, Asker(time.monotonic()))
        if self._asker.loads >= LOADS:
            self._ready = UNSEEN

    def on_request_finished(self, req_context: Any) -> None:
        self._askers.pop(req_context.req_id, None)

    def lookup(self, key: OffloadKey, req_context: Any) -> Any:
        for ready in self._ready:
            if key not in ready:
                return self._words[self._look(key) or Lookup.MISS]
        self._hits += 1
        return self._hit

    def prepare_load(self, keys: Collection[OffloadKey], req_context: Any) -> KeysSpec:
        """A key that went since it was looked up makes the load fail, which is a miss."""
        keys = tuple(keys)
        self._keep(keys, req_context.req_id)
        self._asker.loads += 1
        self._hurry = True
        return KeysSpec(keys)

    def complete_load(self, keys: Collection[OffloadKey], req_context: Any) -> None:
        if (load := self._loads.pop(req_context.req_id, None)) is not None:
            self._ended.append(load)

    @harmless
    def touch(self, keys: Sequence[OffloadKey], req_context: Any) -> None:
        """A request that waits touches all its keys in every step."""
        manager, asker = self._manager, self._askers.get(req_context.req_id)
        if manager is not None and keys and (asker is None or asker.touches(keys)):
            manager.touch(keys)

    def prepare_store(self, keys: Collection[OffloadKey], req_context: Any) -> StoreOutput:
        """Nothing to store, where nothing can be: of None vLLM would offer all again each step."""
        return self._offer(keys) or StoreOutput([], KeysSpec(()), [])

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: Any, success: bool = True
    ) -> None:
        if (manager := self._manager) is not None:
            manager.complete_store(keys, success)

    def on_schedule_end(self, context: Any = None) -> None:
        self._ready = UNSEEN
        hurry, self._hurry = self._hurry, False
        if self._due or not hurry:
            self._say_what_is_left()
        self._due += self._ended
        self._ended.clear()

    def has_pending_work(self) -> bool:
        """Whether vLLM must make another step: keys are to be let go."""
        return bool(self._due or self._ended)

    @harmless
    def reset_cache(self) -> None:
        """vLLM forgets its loads, and completes none of them.

        What lies in a pool outlives its daemon: a reset is owed until it is done.
        """
        self._ready = UNSEEN
        self._ended += self._loads.values()
        self._loads.clear()
        self._owed, self._told = True, None
        self._settle(self._lasting.current)

    def shutdown(self) -> None:
        self._lasting.close()

    @harmless
    def events(self) -> list[OffloadingEvent]:
        """What became a HIT and what ceased to be one, where vLLM publishes events."""
        if not self._events:
            return []
        if (manager := self._manager) is not None:
            return manager.take_events()
        removed = tuple(self._said)
        self._said.clear()
        return [OffloadingEvent(removed, True)] if removed else []

    def give_up(self, error: KVFerryError) -> None:
        """The connection does not do. Keys that are not this namespace's will never do."""
        self._ready = UNSEEN
        self._lasting.give_up()
        if error.code == Code.BAD_KEY:
            self._usable = False
            log.error(
                "kvferry: offloading is off: vLLM's block hashes are not as long as those of its "
                "algorithm, %s: %s",
                self._place.fingerprint.hash_algorithm,
                error,
            )
        else:
            log.warning("kvferry: the scheduler's connection is made anew: %s", error)

    @property
    def _manager(self) -> OffloadingManager | None:
        manager = self._lasting.current if self._usable else None
        if not self._owed or manager is None:
            return manager
        return manager if self._settle(manager) else None

    @harmless
    def _settle(self, manager: OffloadingManager | None) -> bool:
        """Have the reset that is owed done, before this manager answers anything."""
        if self._told is not None and not self._told.resetting:
            self._owed, self._told = False, None
        elif manager is not None and manager is not self._told:
            manager.reset_cache()
            self._told = manager
        return True

    @harmless
    def _look(self, key: OffloadKey) -> Lookup:
        """What the manager says; the sets are as fresh as that from now on."""
        asker, manager = self._asker, self._manager
        if manager is None or asker.loads >= LOADS:
            return Lookup.MISS
        found = manager.lookup(key)
        self._ready = manager.ready_keys
        if found in WAITING and time.monotonic() - asker.since > PATIENCE:
            return Lookup.MISS
        return found

    @harmless
    def _offer(self, keys: Collection[OffloadKey]) -> StoreOutput | None:
        manager = self._manager
        output = None if manager is None else manager.prepare_store(keys)
        if output is None:
            return None
        generations = tuple(spec.generation for spec in output.store_specs)
        spec = KeysSpec(output.keys_to_store, generations, output.store_spec.keep)
        return StoreOutput(list(output.keys_to_store), spec, [])

    @harmless
    def _keep(self, keys: tuple[OffloadKey, ...], request: str) -> None:
        if (manager := self._manager) is None:
            return
        try:
            manager.prepare_load(keys)
        except Refused as error:
            if error.code != Code.KEY_ABSENT:
                raise
        else:
            self._loads[request] = Load(manager, keys)

    @harmless
    def _say_what_is_left(self) -> None:
        due, self._due = self._due, []
        if (manager := self._manager) is not None:
            manager.count(self._hits)
            self._hits = 0
            manager.flush()
            for load in due:
                if load.manager is manager:
                    manager.complete_load(load.keys)

    def _open(self) -> OffloadingManager:
        place = self._place
        return OffloadingManager.open(
            [place.of(rank).daemon() for rank in range(place.world_size)],
            engine=place.engine,
            fingerprint=place.fingerprint,
            events=self._events,
            said=self._said,
            timeout=TIMEOUT,
            reconnect=False,  # Lasting makes another
            **place.options,
        )
