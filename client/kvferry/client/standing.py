"""What a client has of its daemon, kept so that it can be had again of the one that comes after."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry.proto.memory import HostRegion
from kvferry.proto.messages import OpenNamespace

if TYPE_CHECKING:
    from kvferry.client.tensors.canonical import CanonicalKVCaches
    from kvferry.client.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Registration:
    """The engine's tensors, which are kept alive by this, and how they were registered."""

    kv_caches: CanonicalKVCaches
    host_bytes: int | None
    timeline: Timeline | None


@dataclass(slots=True)
class Standing:
    opening: OpenNamespace | None = None
    registration: Registration | None = None
    region: HostRegion | None = None
    """As it was told last."""
