"""The quay: the memory of registrations, mapped or allocated, and what is held of it.

A berth is made here when a registration's memory was reached, and closed here when it left. Memory
that was allocated for one may be held beyond that, by its descriptors.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, replace

from kvferry.daemon.core.actions import MapTensors, TensorsMapped
from kvferry.daemon.engine.base import CopyEngine, Mapping, Shared
from kvferry.daemon.engine.fd_closer import close_descriptor_later
from kvferry.daemon.engine.memory import Timeline
from kvferry.daemon.lane.berth import Berth
from kvferry.proto.errors import Code, Failed, KVFerryError


@dataclass(frozen=True, slots=True)
class MapOrder:
    """A Map, with the descriptors behind its tickets; the lane closes them."""

    map: MapTensors
    descriptors: tuple[int, ...]
    timeline: int | None


class Quay:
    """Used by whoever has the lane's helm."""

    def __init__(self, engine: CopyEngine) -> None:
        self._engine = engine
        self.berths: dict[int, Berth] = {}
        self._held: dict[int, tuple[int, ...]] = {}
        """Descriptors of memory allocated for a registration that is to outlast it."""

    def hold(self, number: int, *descriptors: int) -> None:
        """Take memory over that an earlier daemon held."""
        self._held[number] = descriptors

    def map(self, order: MapOrder) -> TensorsMapped:
        """Reach the memory of a registration, or tell why not. Closes the order's descriptors."""
        number, session = order.map.registration, order.map.session
        timeline: Timeline | None = None
        try:
            timeline = None if order.timeline is None else Timeline(order.timeline)
            mapping, report = self._reach(order)
            report = replace(report, copying=self._engine.copying(mapping))
        except (KVFerryError, OSError, ValueError, OverflowError) as error:
            if timeline is not None:
                timeline.close()
            return TensorsMapped(number, session, _told(error).info)
        finally:
            for descriptor in (*order.descriptors, order.timeline):
                if descriptor is not None:
                    close_descriptor_later(descriptor)
        self.berths[number] = Berth(mapping, timeline)
        return report

    def _reach(self, order: MapOrder) -> tuple[Mapping, TensorsMapped]:
        """Map an engine's own tensors, or allocate them here."""
        wanted = order.map
        report = TensorsMapped(wanted.registration, wanted.session)
        if wanted.locations is not None:
            return (
                self._engine.open(
                    wanted.geometry, wanted.allocations, wanted.locations, order.descriptors
                ),
                report,
            )
        shared, reused = self._allocate(wanted)
        if wanted.keep:
            self._hold(wanted.registration, shared)
        return shared.mapping, replace(
            report,
            allocations=shared.allocations,
            locations=shared.locations,
            descriptors=shared.descriptors,
            reused=reused,
            held=self._held.get(wanted.registration, ()),
        )

    def _allocate(self, wanted: MapTensors) -> tuple[Shared, bool]:
        """Tensors in the memory that is held for them, or in new memory; and whether in that."""
        held = () if wanted.reuse is None else self._held.get(wanted.reuse, ())
        if held:
            with contextlib.suppress(Failed):
                return self._engine.allocate(wanted.geometry, held), True
        return self._engine.allocate(wanted.geometry), False

    def _hold(self, number: int, shared: Shared) -> None:
        held: list[int] = []
        try:
            for descriptor in shared.descriptors:
                held.append(os.dup(descriptor))
        except OSError:
            self._engine.close(shared.mapping)
            for descriptor in (*held, *shared.descriptors):
                close_descriptor_later(descriptor)
            raise
        self._held[number] = tuple(held)

    def drop(self, number: int) -> None:
        for descriptor in self._held.pop(number, ()):
            close_descriptor_later(descriptor)

    def drop_all(self) -> None:
        """At the end, when nobody waits for the lane any more."""
        for descriptors in self._held.values():
            for descriptor in descriptors:
                os.close(descriptor)
        self._held.clear()

    def close(self, number: int) -> None:
        """Let the memory of a registration go; nothing of it is in flight."""
        berth = self.berths.pop(number)
        self._engine.close(berth.mapping)
        if berth.timeline is not None:
            berth.timeline.close()


def _told(error: Exception) -> KVFerryError:
    """What a client is told of memory that the kernel would not map."""
    if isinstance(error, KVFerryError):
        return error
    return Failed(Code.MAP_FAILED, f"the memory cannot be mapped: {error}")
