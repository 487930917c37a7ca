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

from kvferry.daemon.core.regions import Region, Regions
from kvferry.proto.layout import LayoutArrays


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

    def __iter__(self) -> Iterator[tuple[str, int]]:
        """(engine, bytes) of each entry."""
        return ((engine, tensors.nbytes) for engine, tensors in self._by_engine.items())

    def find_tensors(self, engine: str) -> KeptTensors | None:
        return self._by_engine.get(engine)

    def add_tensors(self, engine: str, tensors: KeptTensors) -> None:
        self._by_engine[engine] = tensors

    def remove_tensors(self, engine: str) -> KeptTensors | None:
        return self._by_engine.pop(engine, None)

    def remove_orphaned(self) -> list[KeptTensors]:
        """Remove and return those whose region was freed."""
        gone = [
            e
            for e, tensors in self._by_engine.items()
            if not self._regions.is_owned(tensors.region)
        ]
        return [self._by_engine.pop(engine) for engine in gone]
