"""The status that the server assembles."""

from __future__ import annotations

from typing import Any

from kvferry.daemon.core.actions import (
    CopyCalibrated,
    Pong,
    PoolRegistered,
    SendStatus,
    TensorsUnmapped,
)
from kvferry.daemon.core.core import Core, PoolBounds
from kvferry.daemon.core.identity import DaemonIdentity
from kvferry.daemon.core.ports import Ports
from kvferry.daemon.transport.status import StatusAssembler
from kvferry.proto import messages as wire
from kvferry.proto import status as proto_status
from support.core_fixture import DEVICE, LIMITS, POOL, CoreFixture, store
from support.own_epochs import OwnEpochs

IDENTITY = DaemonIdentity("0.1", "boot", 4711, DEVICE, LIMITS, 100.0)
HEALTH = proto_status.HealthStatus(True)
SIBLINGS = (proto_status.SiblingStatus("/run/kvferry/cpu", "on"),)
TIERS = (proto_status.TierStatus("disk", "on"),)


class OtherPeers:
    """As SiblingPeers."""

    def status(self) -> object:
        return SIBLINGS


class OtherParts:
    """As Health, RegionStore and Tiering."""

    verification = proto_status.VerificationStatus(2, 1)

    def __init__(self) -> None:
        self.noted: list[object] = []

    def status(self, *counted: object) -> object:
        return TIERS if counted else HEALTH

    def pool_grew(self) -> None:
        self.noted.append("pool grew")

    def handle_pong(self, pong: Pong) -> None:
        self.noted.append(pong)


def test_status_has_the_numbers_of_all_parts() -> None:
    fixture = CoreFixture("a/worker", "a/scheduler", "b")
    fixture.start("a/scheduler", 1, store(0))
    fixture.refused("a/worker", 2, store(99))
    fixture.core.close_session("b")
    fixture.report(TensorsUnmapped(2))
    assert fixture.send("a/worker", wire.StatusRequest(5)) == [SendStatus("a/worker", 5)]
    parts: Any = OtherParts()
    peers: Any = OtherPeers()
    assembler = StatusAssembler(fixture.core, parts, parts, parts, peers, clock=lambda: 101.0)
    contiguous = proto_status.CalibrationPoint(1 << 20, 55.0, 54.0)
    copying = proto_status.CopyStatus("auto", contiguous, (), 1, 1)
    pong = Pong(1.0, None, None)
    for report in (PoolRegistered(8192), CopyCalibrated(copying), pong):
        assembler.note_report(report)
    assert parts.noted == ["pool grew", pong]
    assert assembler.assemble() == proto_status.DaemonStatus(
        version="0.1",
        boot_id="boot",
        pid=4711,
        uptime_seconds=1.0,
        device=DEVICE,
        pool=proto_status.PoolStatus(POOL, 8192, 8192),
        sessions=2,
        engines=(
            proto_status.EngineStatus("a", True, 2, 2048, 1),
            proto_status.EngineStatus("b", False, 2, 2048, 0),
        ),
        totals=proto_status.Totals(),
        errors={"block_out_of_range": 1},
        copying=copying,
        health=HEALTH,
        verification=OtherParts.verification,
        tiers=TIERS,
        siblings=SIBLINGS,
    )


def test_the_pool_is_shown_without_the_part_of_the_daemon() -> None:
    parts: Any = OtherParts()
    assembler = StatusAssembler(
        Core(IDENTITY, PoolBounds(POOL, 1000), Ports(OwnEpochs())), parts, parts, parts
    )
    for registered, shown in ((0, 0), (999, 0), (1500, 500), (POOL, POOL - 1000)):
        assembler.note_report(PoolRegistered(registered))
        pool = proto_status.PoolStatus(POOL - 1000, shown, 0)
        assert assembler.assemble().pool == pool
