"""DaemonStatus and its parts: what the daemon reports to clients and operators."""

from __future__ import annotations

import hashlib
from typing import Annotated

import msgspec
from msgspec import Meta

from kvferry.proto.keys import MAX_KEY_BYTES
from kvferry.proto.specs import Count, Direction, Name, Part, Positive


class DeviceInfo(Part):
    """kind: "cpu" or "cuda". uuid: "cpu", or "GPU-..." as the driver prints it.

    staging_bytes: size of the daemon's staging buffer in device memory. An engine that plans the
        device's memory must subtract it.
    """

    kind: str
    uuid: str
    name: str
    staging_bytes: int = 0


class Limits(Part):
    """The limits of one session. A request beyond a limit is refused."""

    max_message_bytes: int
    # GPU blocks of the jobs in flight, of both directions together.
    max_gpu_blocks: int
    # Jobs in flight, of both directions together. Each part of a large job counts.
    max_jobs: int
    # Stores and loads in flight; 0: max_jobs.
    max_stores: int = 0
    max_loads: int = 0

    def max_in_flight(self, direction: Direction) -> int:
        """How many jobs of one direction a session may have in flight."""
        limit = self.max_stores if direction is Direction.STORE else self.max_loads
        return limit or self.max_jobs


class Fingerprint(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Everything that must agree for the bytes of two engines to be exchangeable.

    It identifies a namespace: engines share blocks only if all fields are equal.
    """

    model: Name
    # Bytes of a host block: at least block_size_factor GPU blocks of the largest group.
    host_block_bytes: Positive
    revision: Name = ""
    dtype: Name = ""
    kv_dtype: Name = ""
    kv_layout: Name = ""
    # Tokens in a host block.
    block_size: Count = 0
    rank: Count = 0
    # Number of tensor and pipeline parallel ranks. Each holds its own part of every block.
    world_size: Positive = 1
    hash_algorithm: Name = ""
    hash_seed: Name = ""
    key_bytes: Annotated[int, Meta(ge=1, le=MAX_KEY_BYTES)] = 36
    # Anything else that must agree, by name.
    extra: Annotated[tuple[tuple[Name, Name], ...], Meta(max_length=64)] = ()

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "extra", tuple(sorted(self.extra)))

    @property
    def name(self) -> str:
        """The name of this fingerprint's namespace: a hash of all fields, 16 characters."""
        return hashlib.blake2b(msgspec.msgpack.encode(self), digest_size=8).hexdigest()

    @property
    def nbytes(self) -> int:
        """Its size in bytes when encoded."""
        return len(msgspec.msgpack.encode(self))

    def differences(self, other: Fingerprint) -> list[str]:
        """The fields that differ, each with both values: "kv_dtype: 'fp8' here, 'bf16' there"."""
        here, there = self._fields(), other._fields()
        return [
            f"{name}: {here.get(name)!r} here, {there.get(name)!r} there"
            for name in here | there
            if here.get(name) != there.get(name)
        ]

    def _fields(self) -> dict[str, object]:
        plain = {name: getattr(self, name) for name in self.__struct_fields__ if name != "extra"}
        return plain | dict(self.extra)


class PoolStatus(Part):
    size_bytes: int
    pinned_bytes: int
    # Bytes of all regions, deserted ones included.
    reserved_bytes: int


class GroupCopying(Part):
    """The copy modes of a KV cache group: "direct" or "staged"; "cpu" without a GPU."""

    store: str
    load: str


class EngineStatus(Part):
    """present: whether the engine has a registration. jobs: in flight.

    kept_bytes: of tensors that are kept, or will be kept when the engine disconnects.
    """

    name: str
    present: bool
    host_blocks: int
    host_block_bytes: int
    jobs: int
    copying: tuple[GroupCopying, ...] = ()
    kept_bytes: int = 0


class NamespaceStatus(Part):
    """A namespace and its blocks: each of `blocks` is free, pending, ready, unverified or orphaned.

    unverified: stored for an earlier daemon, and not yet compared with its checksum.
    orphaned: without a key since a reset or a checksum error, but in use by a job or pinned.
    pinned: how many of the ready blocks are pinned.
    """

    name: str
    fingerprint: Fingerprint
    policy: str
    engines: tuple[str, ...]
    blocks: int
    block_bytes: int
    free: int
    pending: int
    ready: int
    unverified: int
    orphaned: int
    pinned: int
    hits: int
    misses: int
    stored: int
    stores_skipped: int
    evictions: int


class CalibrationPoint(Part):
    """Direct copies of fragments of one size, in bytes per second, as measured at start."""

    fragment_bytes: int
    store: float
    load: float


class CopyStatus(Part):
    """mode: as configured. contiguous: the speed of one large copy, which is the link's maximum.

    direct_from_store, direct_from_load: fragments of at least this many bytes are copied directly.
    """

    mode: str
    contiguous: CalibrationPoint
    direct: tuple[CalibrationPoint, ...]
    direct_from_store: int
    direct_from_load: int


class Totals(Part):
    """Numbers of jobs and bytes since the start of the daemon."""

    stores: int = 0
    loads: int = 0
    stored_bytes: int = 0
    loaded_bytes: int = 0
    failed: int = 0
    cancelled: int = 0


class HealthStatus(Part):
    """Whether the daemon is healthy, and the reasons if it is not. All times are in seconds.

    probe_seconds, probe_age: duration of the last probe (a small block copied to the device and
        back, and compared), and time since its end; None before the first one.
    oldest_job: age of the oldest job in flight that does not wait for its engine's timeline;
        held_job: the same of those that wait. None if there is none.
    loop_lag, worker_lag: largest recent delays of the event loop and of the device worker.
    """

    healthy: bool
    reasons: tuple[str, ...] = ()
    probe_seconds: float | None = None
    probe_age: float | None = None
    oldest_job: float | None = None
    held_job: float | None = None
    loop_lag: float = 0.0
    worker_lag: float = 0.0


class VerificationStatus(Part):
    """Progress of the verification of an earlier daemon's host blocks after a restart.

    decided_bytes: the part of `total_bytes` that was compared with its checksum, or overwritten.
    """

    total_bytes: int
    decided_bytes: int


class TierStatus(Part):
    """A tier below the host pool. Numbers of keys and bytes count since the start of the daemon.

    state: "starting", "on", "off" (until the circuit breaker admits a probe, or its process has
        started again) or "probing".
    used_bytes: of `capacity_bytes`, with all overhead; the latter is 0 if it is not known.
    read_only: why nothing can be written.
    failure: why its process has ended, until it has started again.
    promotion_seconds: the mean time of a promotion, from the request until its keys were loadable.
    queue_seconds: age of the oldest promotion or write that has not ended.
    """

    name: str
    state: str
    capacity_bytes: int = 0
    used_bytes: int = 0
    keys: int = 0
    # Keys that FindInTiers asked the tier for, by result.
    hits: int = 0
    misses: int = 0
    # Keys that were found, and not promoted, because computing them is expected to be faster.
    skipped: int = 0
    promoted: int = 0
    promotion_seconds: float = 0.0
    read_bytes: int = 0
    written: int = 0
    written_bytes: int = 0
    # Keys that were evicted before they were written: the tier was full, off or behind.
    dropped_writes: int = 0
    evictions: int = 0
    checksum_failures: int = 0
    errors: int = 0
    queue_seconds: float = 0.0
    # How often the circuit breaker turned the tier off, and how often its process died.
    openings: int = 0
    deaths: int = 0
    read_only: str = ""
    failure: str = ""


class DaemonStatus(Part):
    version: str
    boot_id: str
    pid: int
    uptime_seconds: float
    device: DeviceInfo
    pool: PoolStatus
    sessions: int
    engines: tuple[EngineStatus, ...]
    totals: Totals
    # Number of errors per code since the start.
    errors: dict[str, int]
    # Result of the calibration; None before it ran, and on the CPU.
    copying: CopyStatus | None = None
    health: HealthStatus | None = None
    # None if there was nothing to verify.
    verification: VerificationStatus | None = None
    tiers: tuple[TierStatus, ...] = ()
