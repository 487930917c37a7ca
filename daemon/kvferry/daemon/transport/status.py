"""The status of the daemon, assembled from what its parts have counted. Event loop only."""

from __future__ import annotations

from kvferry.daemon.core.core import Core
from kvferry.proto.status import (
    CopyStatus,
    DaemonStatus,
    HealthStatus,
    PoolStatus,
    TierStatus,
    VerificationStatus,
)


class StatusAssembler:
    """Assembles a DaemonStatus.

    registered_bytes: of the pool, so far. copying: the result of the calibration.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self.registered_bytes = 0
        self.copying: CopyStatus | None = None

    def assemble(
        self,
        now: float,
        health: HealthStatus,
        verification: VerificationStatus | None,
        tiers: tuple[TierStatus, ...],
    ) -> DaemonStatus:
        """now: time.monotonic() in seconds."""
        core, me = self._core, self._core.identity
        return DaemonStatus(
            version=me.version,
            boot_id=me.boot_id,
            pid=me.pid,
            uptime_seconds=now - me.started,
            device=me.device,
            pool=PoolStatus(
                core.pool_bytes - core.own_bytes,
                max(0, self.registered_bytes - core.own_bytes),
                core.reserved_bytes,
            ),
            sessions=len(core.sessions),
            engines=core.engines(),
            totals=core.totals(),
            errors=dict(core.errors),
            copying=self.copying,
            health=health,
            verification=verification,
            tiers=tiers,
        )
