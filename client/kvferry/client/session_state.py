"""The state that reconnecting restores: the namespace and the registration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry.client.arrays import device_kind
from kvferry.client.validation import check_fields
from kvferry.proto.memory import HostRegion
from kvferry.proto.messages import OpenNamespace
from kvferry.proto.status import Fingerprint

if TYPE_CHECKING:
    from kvferry.client.tensors.canonical import CanonicalKVCaches
    from kvferry.client.timeline import Timeline


@dataclass(frozen=True, slots=True)
class RegistrationState:
    """The engine's tensors, which are kept alive, and how they are registered."""

    kv_caches: CanonicalKVCaches
    host_bytes: int | None
    timeline: Timeline | None


@dataclass(slots=True)
class SessionState:
    """What a client restores when it reconnects.

    opening: the namespace to open. registration: the tensors to register. mirror: whether to mirror
    the resident keys. region: the engine's region of the host pool, as last reported.
    """

    opening: OpenNamespace | None = None
    registration: RegistrationState | None = None
    mirror: bool = False
    region: HostRegion | None = None

    @classmethod
    def of_namespace(
        cls,
        fingerprint: Fingerprint,
        *,
        cpu_bytes_to_use: int | None = None,
        eviction_policy: str = "lru",
        store_threshold: int = 1,
        mirror: bool = True,
        registration: RegistrationState | None = None,
    ) -> SessionState:
        """The state of a client that opens a namespace; arguments: OffloadClient.open_namespace."""
        opening = OpenNamespace(0, fingerprint, cpu_bytes_to_use, eviction_policy, store_threshold)
        return cls(opening, registration, mirror)

    @property
    def block_size_factor(self) -> int | None:
        """GPU blocks of a host block; None without tensors to register."""
        registration = self.registration
        return None if registration is None else registration.kv_caches.layout.block_size_factor

    def check(self) -> None:
        """Raise Refused if no daemon can restore this state."""
        if (opening := self.opening) is not None:
            fields = "fingerprint", "quota_bytes", "policy", "store_threshold"
            check_fields(OpenNamespace, **{name: getattr(opening, name) for name in fields})
        if (wanted := self.registration) is not None and wanted.timeline is not None:
            wanted.timeline.check_device(device_kind(wanted.kv_caches.tensors[0]))
