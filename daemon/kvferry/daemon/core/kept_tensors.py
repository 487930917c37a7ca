"""KV tensors allocated here that nobody uses: kept for the engine that asked for it, and went.

Device memory held for nobody is memory that somebody misses, so it is held only where the engine
asked for it, is shown in the status, and goes for any of these reasons:

    the engine allocates again           the same layout gets the memory, another one frees it
    the engine brings tensors of its own
    the region of its host blocks went to somebody else
    somebody asks (ReleaseKVCaches)

A daemon whose service manager stores descriptors leaves them to the next daemon
(persistence/kept_tensor_store.py).
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
    """At most one holding for each engine's name."""

    def __init__(self, regions: Regions) -> None:
        self._regions = regions
        self._of: dict[str, KeptTensors] = {}

    def __iter__(self) -> Iterator[tuple[str, int]]:
        """(engine, bytes) of each."""
        return ((engine, holding.nbytes) for engine, holding in self._of.items())

    def get(self, engine: str) -> KeptTensors | None:
        return self._of.get(engine)

    def put(self, engine: str, holding: KeptTensors) -> None:
        self._of[engine] = holding

    def pop(self, engine: str) -> KeptTensors | None:
        return self._of.pop(engine, None)

    def pop_orphans(self) -> list[KeptTensors]:
        """Take out those whose host blocks are gone."""
        gone = [e for e, holding in self._of.items() if not self._regions.holds(holding.region)]
        return [self._of.pop(engine) for engine in gone]
