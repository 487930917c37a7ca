"""DaemonStatus and its parts: what the daemon reports to clients and operators.

A number is declared here, once (status_numbers.py). It is counted where it happens.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, ClassVar

import msgspec

from kvferry.proto.errors import Code, ErrorInfo
from kvferry.proto.fingerprint import Fingerprint
from kvferry.proto.specs import Direction, Part
from kvferry.proto.status_numbers import MetricLabel, counter, gauge

# Error codes with an alert (deploy/alerts.yml).
ALERTED = str(Code.BUSY), str(Code.CORRUPT_BLOCK)


# The hits that a namespace would have with another number of blocks.
HIT_RATE = partial(gauge, metric="expected_hit_ratio", text="")
# What became of the keys of hints.
HINTED_KEYS = partial(counter, metric="hinted_keys", text="")


class DeviceInfo(Part):
    """The device of a daemon.

    kind: "cpu" or "cuda". uuid: "cpu", or "GPU-..." as the driver prints it.

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


class PoolStatus(Part):
    """The host pool. reserved_bytes: of all regions, deserted ones included."""

    metrics_prefix: ClassVar[str] = "pool_"

    size_bytes: int
    pinned_bytes: Annotated[
        int, gauge("Bytes of the host pool that are registered with the device.", text="")
    ]
    reserved_bytes: Annotated[
        int, gauge("Bytes in regions of the host pool.", "bytes", state="reserved", text="")
    ]

    @property
    def free_bytes(self) -> Annotated[int, gauge("Its other bytes.", "bytes", state="free")]:
        return self.size_bytes - self.reserved_bytes


class GroupCopying(Part):
    """The copy modes of a KV cache group: "direct", "staged" or "packed"; "cpu" without a GPU."""

    store: str
    load: str


class EngineStatus(Part):
    """An engine with a registration, a region of the pool or kept tensors.

    kept_bytes: of tensors that are kept, or will be kept when the engine disconnects.
    """

    name: Annotated[str, MetricLabel("engine")]
    present: Annotated[
        bool,
        gauge("Engines with a region: 1 registered, 0 disconnected.", "engine_present", text=""),
    ]
    host_blocks: int
    host_block_bytes: int
    jobs: Annotated[
        int, gauge("Jobs in flight.", "jobs_in_flight", text="{} jobs in flight", top=True)
    ]
    copying: tuple[GroupCopying, ...] = ()
    kept_bytes: int = 0


class NamespaceStatus(Part):
    """A namespace and its blocks: each of `blocks` is free, pending, ready, unverified or orphaned.

    unverified: stored for an earlier daemon, and not yet compared with its checksum.
    orphaned: without a key since a reset or a checksum error, but in use by a job or pinned.
    retained: distinct blocks; they are pinned, too. hints_...: keys of Retain and Release.
    shortfall: why it has less host memory than its engines asked for; empty if it does not.
    """

    metrics_prefix: ClassVar[str] = "namespace_"

    name: Annotated[str, MetricLabel("namespace")]
    fingerprint: Fingerprint
    policy: str
    engines: tuple[str, ...]
    blocks: int
    block_bytes: int
    free: Annotated[int, gauge("Host blocks without a key.", "blocks", state="free")]
    pending: Annotated[int, gauge("Host blocks being written.", "blocks", state="pending")]
    ready: Annotated[int, gauge("Loadable host blocks.", "blocks", state="ready")]
    unverified: Annotated[int, gauge("Host blocks to verify.", "blocks", state="unverified")]
    orphaned: Annotated[int, gauge("In use, without a key.", "blocks", state="orphaned")]
    pinned: Annotated[
        int, gauge("Ready host blocks that are pinned by engines or loads.", "pinned_blocks")
    ]
    # Since the namespace was created.
    hits: Annotated[
        int, counter("Keys that engines looked up and found.", "lookups", result="hit", text="")
    ] = 0
    misses: Annotated[
        int, counter("Keys that they did not find.", "lookups", result="miss", text="")
    ] = 0
    stored: Annotated[int, counter("Blocks that were stored.")] = 0
    stores_skipped: Annotated[
        int,
        counter("Blocks offered and not stored: no room, or store_threshold was not reached."),
    ] = 0
    stores_unpackable: Annotated[
        int, counter("Blocks that were not stored, because their KV cannot be packed.")
    ] = 0
    evictions: Annotated[int, counter("Blocks that were evicted.", text="{} evicted", top=True)] = 0
    shortfall: str = ""
    saved_tokens: Annotated[
        int, counter("Tokens whose KV engines loaded.", text="{} tokens loaded")
    ] = 0
    saved_seconds: Annotated[
        float,
        counter("Time in which engines compute so many tokens.", text="{} of computing saved"),
    ] = 0.0
    # Shares of the keys looked up that pools of other sizes have; None: not known yet.
    hit_rate_half: Annotated[float | None, HIT_RATE("With half the blocks.", pool="0.5")] = None
    hit_rate: Annotated[float | None, HIT_RATE("With as many.", pool="1")] = None
    hit_rate_double: Annotated[float | None, HIT_RATE("With twice as many.", pool="2")] = None
    hit_rate_quadruple: Annotated[float | None, HIT_RATE("With four times.", pool="4")] = None
    retained: Annotated[
        int, gauge("Host blocks that hints keep from eviction.", "retained_blocks")
    ] = 0
    hints_accepted: Annotated[
        int, HINTED_KEYS("Keys that were retained or released.", result="accepted")
    ] = 0
    hints_clipped: Annotated[
        int, HINTED_KEYS("Not retained: a share is used up.", result="clipped")
    ] = 0
    hints_missing: Annotated[
        int, HINTED_KEYS("Not retained: not in host memory.", result="missing")
    ] = 0
    hints_refused: Annotated[
        int,
        HINTED_KEYS("Wrong keys, or released while another engine is there.", result="refused"),
    ] = 0

    @property
    def host_bytes(self) -> int:
        """Bytes of all its blocks."""
        return self.blocks * self.block_bytes

    @property
    def model(self) -> Annotated[str, MetricLabel("model")]:
        return self.fingerprint.model


class CalibrationPoint(Part):
    """Direct copies of fragments of one size, in bytes per second, as measured at start."""

    fragment_bytes: int
    store: float
    load: float


class CopyStatus(Part):
    """How the CUDA engine copies, as its calibration found.

    mode: as configured. contiguous: the speed of one large copy, which is the link's maximum.

    direct_from_store, direct_from_load: fragments of at least this many bytes are copied directly.
    """

    mode: str
    contiguous: CalibrationPoint
    direct: tuple[CalibrationPoint, ...]
    direct_from_store: int
    direct_from_load: int


class Totals(Part):
    """Numbers of jobs and bytes since the start of the daemon.

    The metrics count jobs and bytes themselves, by direction and copy mode.
    """

    stores: int = 0
    loads: int = 0
    stored_bytes: int = 0
    loaded_bytes: int = 0
    failed: int = 0
    cancelled: int = 0


_job_age = partial(gauge, metric="oldest_job_seconds", if_none=0.0, top=True)


class HealthStatus(Part):
    """Whether the daemon is healthy, and the reasons if it is not. All times are in seconds.

    starting: it is not healthy yet, because no probe has ended, and nothing else is wrong.

    A probe copies a small block to the device and back, and compares it. Its values are None before
    the first one, and the ages of jobs if there is no such job.
    """

    healthy: Annotated[
        bool, gauge("Whether the daemon is healthy: 1 or 0; /health has the reasons.", text="")
    ]
    reasons: tuple[str, ...] = ()
    probe_seconds: Annotated[
        float | None, gauge("Duration of the last probe; NaN before the first one.", text="")
    ] = None
    probe_age: Annotated[
        float | None,
        gauge("Time since the last probe; NaN before the first one.", "probe_age_seconds", text=""),
    ] = None
    oldest_job: Annotated[
        float | None,
        _job_age("Age of the oldest other job in flight.", waiting="no", text="oldest job {}"),
    ] = None
    held_job: Annotated[
        float | None,
        _job_age(
            "Age of the oldest job that waits for its engine's timeline.",
            waiting="yes",
            text="waiting for its engine {}",
        ),
    ] = None
    loop_lag: Annotated[
        float,
        gauge(
            "Largest delay of the event loop in the last 10 s.",
            "loop_lag_seconds",
            text="event loop {} late",
        ),
    ] = 0.0
    worker_lag: Annotated[
        float,
        gauge(
            "Longest response time of the device worker in the last 10 s.",
            "worker_lag_seconds",
            text="device worker {} late",
        ),
    ] = 0.0
    starting: bool = False


class VerificationStatus(Part):
    """Progress of the verification of an earlier daemon's host blocks after a restart.

    decided_bytes: the part of `total_bytes` that was compared with its checksum, or overwritten.
    """

    total_bytes: int
    decided_bytes: int


class SiblingStatus(Part):
    """Another daemon of the host, whose blocks this one loads. Numbers count since its start.

    state: "on", or why its blocks are not loaded.
    """

    metrics_prefix: ClassVar[str] = "sibling_"

    directory: Annotated[str, MetricLabel("sibling")]
    state: str
    keys: Annotated[int, gauge("Keys that the sibling has.")] = 0
    loaded: Annotated[
        int, counter("Blocks loaded from the sibling's pool directly.", "blocks", result="loaded")
    ] = 0
    loaded_bytes: Annotated[int, counter("Bytes loaded directly.", text="")] = 0
    mapped_bytes: Annotated[int, gauge("Bytes of the sibling's pool that are mapped.", text="")] = 0

    @property
    def is_on(self) -> Annotated[bool, gauge("Whether its blocks are loaded: 1 or 0.", "on")]:
        return self.state == "on"


_failure = partial(counter, metric="failures", failure=True)


class TierStatus(Part):
    """A tier below the host pool. Numbers of keys and bytes count since the start of the daemon.

    state: "starting", "on", "off" (until the circuit breaker admits a probe, or its process has
        started again) or "probing".
    promotion_seconds: the mean time of a promotion, from the request until its keys were loadable.
    read_only: why nothing can be written.
    failure: why its process has ended, until it has started again.
    """

    metrics_prefix: ClassVar[str] = "tier_"

    name: Annotated[str, MetricLabel("tier")]
    state: str
    capacity_bytes: Annotated[
        int, gauge("Bound of what the tier stores; 0: not known.", text="")
    ] = 0
    used_bytes: Annotated[int, gauge("Bytes used, with all overhead.", text="")] = 0
    keys: Annotated[int, gauge("Keys in the tier.", "stored_keys")] = 0
    hits: Annotated[int, counter("Keys found.", "lookups", result="hit", text="")] = 0
    misses: Annotated[int, counter("Keys not found.", "lookups", result="miss", text="")] = 0
    skipped: Annotated[
        int,
        counter("Found, and not read: computing is faster.", "lookups", result="skipped"),
    ] = 0
    promoted: Annotated[int, counter("Read to the pool.", "keys", result="read", text="")] = 0
    promotion_seconds: float = 0.0
    read_bytes: Annotated[
        int, counter("Read to the pool.", "moved_bytes", direction="read", text="")
    ] = 0
    written: Annotated[int, counter("Written to the tier.", "keys", result="written", text="")] = 0
    written_bytes: Annotated[
        int, counter("Written to the tier.", "moved_bytes", direction="written", text="")
    ] = 0
    dropped_writes: Annotated[
        int,
        counter(
            "Evicted from the pool before they were written: the tier was full, off or behind.",
            "keys",
            result="dropped",
            text="{} writes dropped",
            failure=True,
        ),
    ] = 0
    evictions: Annotated[int, counter("Keys evicted from the tier.", text="{} evicted")] = 0
    checksum_failures: Annotated[
        int, _failure("Wrong checksums.", kind="checksum", text="{} wrong checksums")
    ] = 0
    errors: Annotated[int, _failure("Failed reads and writes.", kind="error")] = 0
    queue_seconds: Annotated[
        float, gauge("Age of the oldest promotion or write in progress.", text="queue {}", top=True)
    ] = 0.0
    openings: Annotated[
        int, _failure("The tier was turned off.", kind="breaker", text="{} times off")
    ] = 0
    deaths: Annotated[
        int, _failure("Its process died.", kind="death", text="{} process deaths")
    ] = 0
    read_only: str = ""
    failure: str = ""

    @property
    def is_on(self) -> Annotated[bool, gauge("Whether the tier gets requests: 1 or 0.", "on")]:
        return self.state == "on"

    @property
    def cannot_write(self) -> Annotated[bool, gauge("Whether it is read-only.", "read_only")]:
        return bool(self.read_only)


class DaemonStatus(Part):
    """refused_engines: why an engine's last request for memory was refused; the latest are last.

    errors: their number by code. rate() ignores the first sample of a series, so those with an
    alert are exported from the start."""

    version: str
    boot_id: str
    pid: int
    uptime_seconds: Annotated[float, gauge("Time since the start of the daemon.", text="")]
    device: DeviceInfo
    pool: PoolStatus
    sessions: Annotated[int, gauge("Connected clients.", text="")]
    engines: tuple[EngineStatus, ...]
    totals: Totals
    errors: Annotated[
        dict[str, int],
        counter("Error replies, by code.", keys=("code",), from_start=ALERTED, text=""),
    ]
    # Result of the calibration; None before it ran, and on the CPU.
    copying: CopyStatus | None = None
    health: HealthStatus | None = None
    # None if there was nothing to verify.
    verification: VerificationStatus | None = None
    tiers: tuple[TierStatus, ...] = ()
    siblings: tuple[SiblingStatus, ...] = ()
    lent: Annotated[
        int, counter("Blocks that siblings have found or loaded here.", "lent_blocks", text="")
    ] = 0
    refused_engines: dict[str, ErrorInfo] = msgspec.field(default_factory=dict)
    # The last host blocks that were found corrupt, each with what became of it before.
    corrupt: tuple[str, ...] = ()

    @property
    def unverified_bytes(self) -> Annotated[int, gauge("Bytes of an earlier daemon to verify.")]:
        left = self.verification
        return 0 if left is None else left.total_bytes - left.decided_bytes

    @property
    def build_info(
        self,
    ) -> Annotated[
        dict[tuple[str, ...], int],
        gauge("Version of the daemon, and its device.", keys=("version", "device", "device_name")),
    ]:
        return {(self.version, self.device.uuid, self.device.name): 1}
