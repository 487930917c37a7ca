"""The memory of registrations: mapped or allocated, and held by descriptor after they have ended.

The queues of a registration are created here when its memory is mapped, and removed when it is
unmapped. Only the device worker's thread calls this, except `hold_memory` before that thread
starts.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, replace

from kvferry.daemon.core.actions import MapTensors, TensorsMapped
from kvferry.daemon.device.transfer_queues import RegistrationQueues
from kvferry.daemon.engine.base import AllocatedTensors, CopyEngine, Mapping
from kvferry.daemon.memory.fd_closer import close_descriptor_later
from kvferry.daemon.memory.shared_memory import TimelineReader
from kvferry.proto.errors import Code, Failed, KVFerryError


@dataclass(frozen=True, slots=True)
class MapCommand:
    """A MapTensors action with the descriptors of its handles. The device worker closes them.

    timeline: the descriptor of the timeline page, or None.
    """

    map: MapTensors
    descriptors: tuple[int, ...]
    timeline: int | None


class Mappings:
    """The mapped memory of all registrations.

    queues: of each registration that is mapped, by its number.
    """

    def __init__(self, engine: CopyEngine) -> None:
        self._engine = engine
        self.queues: dict[int, RegistrationQueues] = {}
        # Descriptors of memory that was allocated for a registration and must outlast it.
        self._held: dict[int, tuple[int, ...]] = {}

    def hold_memory(self, number: int, *descriptors: int) -> None:
        """Own the descriptors of memory that an earlier daemon held for a registration."""
        self._held[number] = descriptors

    def map_tensors(self, command: MapCommand) -> TensorsMapped:
        """Map or allocate the memory of a registration; the report has the error if it fails.

        Closes the command's descriptors.
        """
        number, session = command.map.registration, command.map.session
        timeline: TimelineReader | None = None
        try:
            timeline = None if command.timeline is None else TimelineReader(command.timeline)
            mapping, report = self._map(command)
            report = replace(report, copying=self._engine.copying(mapping))
            if timeline is not None:
                mapping.revoked = timeline.is_revoked
        except (KVFerryError, OSError, ValueError, OverflowError) as error:
            if timeline is not None:
                timeline.close()
            return TensorsMapped(number, session, _as_kvferry_error(error).info)
        finally:
            for descriptor in (*command.descriptors, command.timeline):
                if descriptor is not None:
                    close_descriptor_later(descriptor)
        self.queues[number] = RegistrationQueues(mapping, timeline)
        return report

    def _map(self, command: MapCommand) -> tuple[Mapping, TensorsMapped]:
        """Map tensors that the engine has allocated, or allocate them here."""
        wanted = command.map
        report = TensorsMapped(wanted.registration, wanted.session)
        if wanted.locations is not None:
            return (
                self._engine.map_tensors(
                    wanted.layout, wanted.allocations, wanted.locations, command.descriptors
                ),
                report,
            )
        tensors, reused = self._allocate(wanted)
        if wanted.keep:
            self._hold_allocated(wanted.registration, tensors)
        return tensors.mapping, replace(
            report,
            allocations=tensors.allocations,
            locations=tensors.locations,
            descriptors=tensors.descriptors,
            reused=reused,
            held=self._held.get(wanted.registration, ()),
        )

    def _allocate(self, wanted: MapTensors) -> tuple[AllocatedTensors, bool]:
        """Allocate tensors, in held memory if possible. Return them, and whether it was reused."""
        held = () if wanted.reuse is None else self._held.get(wanted.reuse, ())
        if held:
            with contextlib.suppress(Failed):
                return self._engine.allocate_tensors(wanted.layout, held), True
        return self._engine.allocate_tensors(wanted.layout), False

    def _hold_allocated(self, number: int, tensors: AllocatedTensors) -> None:
        held: list[int] = []
        try:
            for descriptor in tensors.descriptors:
                held.append(os.dup(descriptor))
        except OSError:
            self._engine.unmap_tensors(tensors.mapping)
            for descriptor in (*held, *tensors.descriptors):
                close_descriptor_later(descriptor)
            raise
        self._held[number] = tuple(held)

    def release_memory(self, number: int) -> None:
        """Close the descriptors that are held for a registration."""
        for descriptor in self._held.pop(number, ()):
            close_descriptor_later(descriptor)

    def release_all_memory(self) -> None:
        """Close all held descriptors. Called when the worker ends."""
        for descriptors in self._held.values():
            for descriptor in descriptors:
                os.close(descriptor)
        self._held.clear()

    def unmap_tensors(self, number: int) -> None:
        """Unmap the memory of a registration; no chunk of it is in flight."""
        registration = self.queues.pop(number)
        self._engine.unmap_tensors(registration.mapping)
        if registration.timeline is not None:
            registration.timeline.close()


def _as_kvferry_error(error: Exception) -> KVFerryError:
    if isinstance(error, KVFerryError):
        return error
    return Failed(Code.MAP_FAILED, f"the memory cannot be mapped: {error}")
