"""Events: which keys became a HIT and which ceased to be one, as vLLM's OffloadingEvent.

Used by OffloadingManager, in its thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.client.key_set import KeySet
from kvferry.client.mirror import HIT, Mirror
from kvferry.client.writers import MirrorsOf
from kvferry.proto.keys import OffloadKey


@dataclass(frozen=True, slots=True)
class OffloadingEvent:
    """Keys that became a HIT, or (removed) ceased to be one."""

    keys: tuple[OffloadKey, ...]
    removed: bool
    medium: str = "CPU"


class ResidencyEvents:
    """Remembers which keys were reported as a HIT, so that events report changes only."""

    def __init__(self, mirrors: Sequence[Mirror]) -> None:
        self._reported = KeySet()
        for mirror in mirrors:
            mirror.track_changes()

    def take_events(
        self, mirrors: Sequence[Mirror], mirrors_of: MirrorsOf
    ) -> list[OffloadingEvent]:
        """The changes since the last call: first removed keys, then stored ones.

        mirrors: all. mirrors_of: those of the daemons that store a key.
        """
        changed = dict.fromkeys(key for mirror in mirrors for key in mirror.take_changed_keys())
        stored: list[OffloadKey] = []
        removed: list[OffloadKey] = []
        for key in changed:
            hit = all(mirror.lookup(key) is HIT for mirror in mirrors_of(key))
            if hit != (key in self._reported):
                (stored if hit else removed).append(key)
        self._reported.discard_keys(removed)
        self._reported.add_keys(stored)
        events = OffloadingEvent(tuple(removed), True), OffloadingEvent(tuple(stored), False)
        return [event for event in events if event.keys]
