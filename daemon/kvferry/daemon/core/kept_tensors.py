"""KV tensors that the daemon allocated and keeps although no engine uses them.

Such tensors take device memory. So they are kept only if the engine requested it, the status shows
them, and they are freed when

    the engine allocates again with another layout (with the same layout it gets them back)
    the engine registers tensors of its own
    the region of its host blocks is given to another owner
    a client requests it (ReleaseKVCaches)

With a descriptor store they outlive the daemon (persistence/kept_tensor_store.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvferry.daemon.core.actions import Action, KeepTensors, ReleaseTensors, TensorsMapped
from kvferry.daemon.core.records import KeptTensorsRecord
from kvferry.daemon.core.region import Region
from kvferry.daemon.core.regions import Regions
from kvferry.daemon.core.registration import Registration, RegistrationRequest
from kvferry.proto.errors import Code, Refused
from kvferry.proto.layout import LayoutArrays
from kvferry.proto.memory import FdAllocation
from kvferry.proto.messages import AllocateKVCaches


@dataclass(slots=True)
class KeptTensors:
    """Memory that the device worker holds under a registration's number."""

    number: int
    layout_arrays: LayoutArrays
    nbytes: int
    region: Region
    uid: int | None = None


class KeptTensorsTable:
    """Kept tensors, at most one set per engine name."""

    def __init__(self, regions: Regions) -> None:
        self._regions = regions
        self._by_engine: dict[str, KeptTensors] = {}

    def bytes_by_engine(self) -> dict[str, int]:
        return {engine: tensors.nbytes for engine, tensors in self._by_engine.items()}

    def match_request(
        self, registration: Registration, request: RegistrationRequest
    ) -> tuple[int | None, list[Action]]:
        """The number under which an engine's kept tensors are held, if the request may reuse them.

        Otherwise release them.
        """
        engine, kept = registration.engine, self._by_engine.get(registration.engine)
        if kept is None:
            return None, []
        same = (kept.region.owner, kept.uid) == (registration.region.owner, registration.uid)
        if same and _may_reuse(kept, registration.layout.layout_arrays, request):
            kept.region = registration.region
            return kept.number, []
        return None, self._release(engine)

    def take_over_allocated(
        self, registration: Registration, report: TensorsMapped
    ) -> list[Action]:
        """An engine has allocated tensors: release its kept ones, and keep the new ones if asked.

        report: of the new tensors.
        """
        released = self._release(registration.engine)
        if not registration.terms.keep:
            return released
        nbytes = registration.kept_bytes = sum(place.size for place in report.allocations)
        engine, layout_arrays = registration.engine, registration.layout.layout_arrays
        record = KeptTensorsRecord(
            engine, layout_arrays, nbytes, registration.region.owner, registration.uid
        )
        return [KeepTensors(registration.number, record, report.held), *released]

    def end_registration(self, registration: Registration) -> list[Action]:
        """Keep the tensors of a registration that was unmapped, or release them."""
        if registration.kept_bytes:
            self._by_engine[registration.engine] = KeptTensors(
                registration.number,
                registration.layout.layout_arrays,
                registration.kept_bytes,
                registration.region,
                registration.uid,
            )
        elif registration.terms.keep:
            return [ReleaseTensors(registration.number)]
        return []

    def restore_tensors(self, record: KeptTensorsRecord, numbers: Iterator[int]) -> int:
        """Hold tensors that an earlier daemon kept, under the next of `numbers`; return it.

        Raises Refused (NOT_REGISTERED) if their engine's host blocks were not restored.
        """
        region = self._regions.get(record.owner)
        if region is None or record.engine in self._by_engine:
            message = f"the host blocks of engine {record.engine!r} were not restored"
            raise Refused(Code.NOT_REGISTERED, message, record.engine)
        number = next(numbers)
        self._by_engine[record.engine] = KeptTensors(
            number, record.layout, record.nbytes, region, record.uid
        )
        return number

    def release_engine(self, engine: str, current: Registration | None) -> tuple[list[Action], int]:
        """Stop keeping an engine's tensors; return the actions and the bytes, 0 if none are kept.

        current: its registration, whose tensors are not kept when it ends.
        """
        nbytes = self._by_engine[engine].nbytes if engine in self._by_engine else 0
        actions = self._release(engine)
        if current is not None and current.kept_bytes:
            actions.append(ReleaseTensors(current.number))
            nbytes, current.kept_bytes = nbytes + current.kept_bytes, 0
        return actions, nbytes

    def release_orphaned(self) -> list[Action]:
        """Release tensors whose region was freed."""
        orphaned = [
            engine
            for engine, tensors in self._by_engine.items()
            if not self._regions.is_owned(tensors.region)
        ]
        return [action for engine in orphaned for action in self._release(engine)]

    def _release(self, engine: str) -> list[Action]:
        kept = self._by_engine.pop(engine, None)
        return [] if kept is None else [ReleaseTensors(kept.number)]


def _may_reuse(
    kept: KeptTensors, layout_arrays: LayoutArrays, request: RegistrationRequest
) -> bool:
    """Whether a request asks for the held tensors, or registers what may be the same memory."""
    if layout_arrays != kept.layout_arrays:
        return False
    if isinstance(request, AllocateKVCaches):
        return True
    return all(isinstance(allocation, FdAllocation) for allocation in request.allocations)
