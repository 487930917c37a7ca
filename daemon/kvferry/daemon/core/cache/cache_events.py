"""Key events of a cache: what became of which keys, kept until they are taken. Event loop only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvferry.proto.keys import EventKind


@dataclass(frozen=True, slots=True)
class CacheEvent:
    kind: EventKind
    keys: tuple[bytes, ...]


class CacheEvents:
    def __init__(self) -> None:
        self._events: list[CacheEvent] = []
        # Called when there is an event to take.
        self.on_event: Callable[[], None] = _ignore

    def add(self, kind: EventKind, keys: Sequence[bytes]) -> None:
        """Add an event, unless it has no keys and is not CLEARED."""
        if keys or kind is EventKind.CLEARED:
            self._events.append(CacheEvent(kind, tuple(keys)))
            self.on_event()

    def end(self) -> None:
        """Nobody takes events of this cache from now on.

        The owner of the hook has the cache. Only a full garbage collection frees such a cycle, and
        the daemon almost never does one.
        """
        self.on_event = _ignore

    def take(self) -> list[CacheEvent]:
        """The events since the last call, in order."""
        events, self._events = self._events, []
        return events


def _ignore() -> None:
    """Do nothing."""
