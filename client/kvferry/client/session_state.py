"""The state that reconnecting restores: the namespace and the registration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict, Unpack

import msgspec

from kvferry.client.arrays import device_kind
from kvferry.client.validation import check_fields
from kvferry.proto.fingerprint import Fingerprint
from kvferry.proto.memory import HostRegion
from kvferry.proto.messages import DEFAULT_POLICY, OpenNamespace
from kvferry.proto.opening import check_opening, policy_name

if TYPE_CHECKING:
    from kvferry.client.tensors.canonical import CanonicalKVCaches
    from kvferry.client.timeline import Timeline


class NamespaceOptions(TypedDict, total=False):
    """How a namespace is created.

    cpu_bytes_to_use: quota of the host pool in bytes; None for the size that the namespace had, or
        the largest part that no engine uses.
    eviction_policy: "lru", "arc" or "s3fifo", in any case.
    store_threshold: a key is stored from its n-th offer on.
    """

    cpu_bytes_to_use: int | None
    eviction_policy: str
    store_threshold: int


def opening_message(
    fingerprint: Fingerprint,
    cpu_bytes_to_use: int | None = None,
    eviction_policy: str = DEFAULT_POLICY,
    store_threshold: int = 1,
) -> OpenNamespace:
    """The request that opens a namespace, without its number.

    Raises Refused (BAD_MESSAGE), and as check_opening for values that every daemon would refuse.
    """
    message = OpenNamespace(0, fingerprint, cpu_bytes_to_use, eviction_policy, store_threshold)
    fields = "fingerprint", "quota_bytes", "policy", "store_threshold"
    check_fields(OpenNamespace, **{name: getattr(message, name) for name in fields})
    check_opening(message)
    return msgspec.structs.replace(message, policy=policy_name(eviction_policy))


@dataclass(frozen=True, slots=True)
class RegistrationState:
    """The engine's tensors, which are kept alive, and how they are registered."""

    kv_caches: CanonicalKVCaches
    host_bytes: int | None
    timeline: Timeline | None


@dataclass(slots=True)
class SessionState:
    """The state that a client restores when it reconnects.

    opening: the namespace to open. registration: the tensors to register. mirror: whether to mirror
    the resident keys. region: the engine's region of the host pool, as last reported.
    Raises Refused if no daemon can restore it.
    """

    opening: OpenNamespace | None = None
    registration: RegistrationState | None = None
    mirror: bool = False
    region: HostRegion | None = None

    def __post_init__(self) -> None:
        if (wanted := self.registration) is not None and wanted.timeline is not None:
            wanted.timeline.check_device(device_kind(wanted.kv_caches.tensors[0]))

    @classmethod
    def of_namespace(
        cls,
        fingerprint: Fingerprint,
        *,
        mirror: bool = True,
        registration: RegistrationState | None = None,
        **options: Unpack[NamespaceOptions],
    ) -> SessionState:
        """The state of a client that opens a namespace, as OffloadClient.open_namespace does."""
        return cls(opening_message(fingerprint, **options), registration, mirror)

    @property
    def block_size_factor(self) -> int | None:
        """GPU blocks of a host block; None without tensors to register."""
        registration = self.registration
        return None if registration is None else registration.kv_caches.layout.block_size_factor
