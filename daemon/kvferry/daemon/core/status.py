"""The status report: the daemon, its engines and its pool.

Reports about the daemon itself (the pool, the calibration, its health) and the numbers of errors
are recorded here. Called by the core, on the event loop.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from kvferry.daemon.core.actions import CopyCalibrated, HealthChecked, PoolRegistered
from kvferry.daemon.core.regions import Regions
from kvferry.daemon.core.registration import OWN
from kvferry.daemon.core.registrations import Registrations
from kvferry.daemon.core.transfers import Transfers
from kvferry.proto.status import (
    CopyStatus,
    DaemonStatus,
    DeviceInfo,
    EngineStatus,
    HealthStatus,
    Limits,
    PoolStatus,
    TierStatus,
    Totals,
    VerificationStatus,
)


@dataclass(frozen=True, slots=True)
class DaemonIdentity:
    """This daemon, as Welcome messages and the status report it.

    started: time.monotonic() at its start, in seconds.
    """

    version: str
    boot_id: str
    pid: int
    device: DeviceInfo
    limits: Limits
    started: float


class StatusRecorder:
    def __init__(self, identity: DaemonIdentity) -> None:
        self._identity = identity
        self._errors: Counter[str] = Counter()
        self._registered_bytes = 0
        self._copying: CopyStatus | None = None
        self._health: HealthStatus | None = None
        self._verification: VerificationStatus | None = None
        self._tiers: tuple[TierStatus, ...] = ()

    def count_errors(self, code: str, number: int = 1) -> None:
        self._errors[code] += number

    def record(self, report: PoolRegistered | CopyCalibrated | HealthChecked) -> None:
        match report:
            case PoolRegistered(nbytes):
                self._registered_bytes = nbytes
            case CopyCalibrated(copying):
                self._copying = copying
            case HealthChecked(health, verification, tiers):
                self._health, self._verification, self._tiers = health, verification, tiers

    def status(
        self,
        now: float,
        sessions: int,
        regions: Regions,
        registrations: Registrations,
        transfers: Transfers,
    ) -> DaemonStatus:
        """now: time.monotonic() in seconds. sessions: their number."""
        me = self._identity
        return DaemonStatus(
            version=me.version,
            boot_id=me.boot_id,
            pid=me.pid,
            uptime_seconds=now - me.started,
            device=me.device,
            pool=PoolStatus(
                regions.pool_bytes - regions.own_bytes,
                max(0, self._registered_bytes - regions.own_bytes),
                regions.reserved_bytes,
            ),
            sessions=sessions,
            engines=_engine_statuses(regions, registrations, transfers),
            totals=Totals(**{name: transfers.totals[name] for name in Totals.__struct_fields__}),
            errors=dict(self._errors),
            copying=self._copying,
            health=self._health,
            verification=self._verification,
            tiers=self._tiers,
        )


def _engine_statuses(
    regions: Regions, registrations: Registrations, transfers: Transfers
) -> tuple[EngineStatus, ...]:
    """Engines with a registration, with a deserted region, or only with kept tensors."""
    kept = registrations.kept_bytes_by_engine()
    # (present, host blocks, bytes of a host block) of each engine; the last entry counts.
    hosts = dict.fromkeys(kept, (False, 0, 0))
    for region in regions:
        if region.owner.kind == "engine":
            block_bytes = region.contents.host_block_bytes
            hosts[region.owner.name] = False, region.num_blocks, block_bytes
    for registration in registrations:
        if registration.engine != OWN:
            host = registration.host
            hosts[registration.engine] = True, host.num_blocks, host.block_bytes
    in_flight = transfers.count_by_engine()
    return tuple(
        EngineStatus(
            name,
            *host,
            in_flight[name],
            registrations.copying_of(name),
            kept.get(name, 0),
        )
        for name, host in hosts.items()
    )
