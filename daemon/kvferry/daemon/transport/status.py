"""The status of the daemon, assembled from what its parts have counted. Event loop only."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvferry.daemon.core.actions import CopyCalibrated, Pong, PoolRegistered
from kvferry.daemon.core.core import Core
from kvferry.daemon.observability.health import Health
from kvferry.daemon.persistence.region_store import RegionStore
from kvferry.daemon.siblings.peers import SiblingPeers
from kvferry.daemon.tiers.tiering import Tiering
from kvferry.proto.status import (
    CopyStatus,
    DaemonStatus,
    HealthStatus,
    NamespaceStatus,
    PoolStatus,
)


class StatusAssembler:
    """Assembles the status for clients, and for the metrics thread, which has a StatusSource.

    peers: None without siblings. clock: seconds, monotonic.
    """

    def __init__(
        self,
        core: Core,
        health: Health,
        region_store: RegionStore,
        tiering: Tiering,
        peers: SiblingPeers | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core, self._health, self._clock = core, health, clock
        self._region_store, self._tiering, self._peers = region_store, tiering, peers
        self._registered_bytes = 0
        self._copying: CopyStatus | None = None

    def note_report(self, report: Pong | CopyCalibrated | PoolRegistered) -> None:
        """A report that changes nothing but the status."""
        match report:
            case Pong():
                self._health.handle_pong(report)
            case CopyCalibrated(copying):
                self._copying = copying
            case PoolRegistered(nbytes):
                self._registered_bytes = nbytes
                self._health.pool_grew()

    def assemble(self) -> DaemonStatus:
        core, me = self._core, self._core.identity
        return DaemonStatus(
            version=me.version,
            boot_id=me.boot_id,
            pid=me.pid,
            uptime_seconds=self._clock() - me.started,
            device=me.device,
            pool=PoolStatus(
                core.pool_bytes - core.own_bytes,
                max(0, self._registered_bytes - core.own_bytes),
                core.reserved_bytes,
            ),
            sessions=len(core.sessions),
            engines=core.engines(),
            totals=core.totals(),
            errors=dict(core.errors),
            refused_engines=dict(core.refused_engines.errors),
            copying=self._copying,
            health=self._health.status(),
            verification=self._region_store.verification,
            tiers=self._tiering.status(core.tier_counters()),
            siblings=() if self._peers is None else self._peers.status(),
            lent=core.lending.used,
            corrupt=tuple(core.corrupt),
        )

    # As StatusSource of observability/http.py

    async def check_health(self) -> HealthStatus:
        return await self._health.check_health()

    async def status_snapshot(self) -> tuple[DaemonStatus, tuple[NamespaceStatus, ...]]:
        return self.assemble(), self._core.namespaces()
