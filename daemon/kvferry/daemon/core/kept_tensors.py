"""KV tensors that the daemon allocated and keeps although no engine uses them.

Such tensors hold device memory that others miss. So they are kept only if the engine asked for it,
the status shows them, and they are freed when

    the engine allocates again with another layout (with the same layout it gets them back)
    the engine registers tensors of its own
    the region of its host blocks is given to another owner
    a client requests it (ReleaseKVCaches)

With a descriptor store they outlive the daemon (persistence/kept_tensor_store.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvferry.daemon.core.regions import Region, Regions
from kvferry.proto.layout import LayoutArrays


@dataclass(slots=True)
class KeptTensors:
    """Memory that the device worker holds under a registration's number."""

    number: int
    layout: LayoutArrays
    nbytes: int
    region: Region
    uid: int | None = None


class KeptTensorsTable:
    """At most one holding per engine name."""

    def __init__(self, regions: Regions) -> None:
        self._regions = regions
        self._of: dict[str, KeptTensors] = {}

    def __iter__(self) -> Iterator[tuple[str, int]]:
        """(engine, bytes) of each holding."""
        return ((engine, holding.nbytes) for engine, holding in self._of.items())

    def get(self, engine: str) -> KeptTensors | None:
        return self._of.get(engine)

    def put(self, engine: str, holding: KeptTensors) -> None:
        self._of[engine] = holding

    def pop(self, engine: str) -> KeptTensors | None:
        return self._of.pop(engine, None)

    def pop_orphans(self) -> list[KeptTensors]:
        """Remove and return those whose region was freed."""
        gone = [e for e, holding in self._of.items() if not self._regions.holds(holding.region)]
        return [self._of.pop(engine) for engine in gone]
