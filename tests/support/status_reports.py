"""What a daemon with a GPU reports of itself and of a namespace, for tests of what shows it."""

from __future__ import annotations

from kvferry.client import Fingerprint
from kvferry.proto.status import (
    CalibrationPoint,
    CopyStatus,
    DaemonStatus,
    DeviceInfo,
    EngineStatus,
    HealthStatus,
    NamespaceStatus,
    PoolStatus,
    Totals,
)

GIB = 1 << 30
FINGERPRINT = Fingerprint(
    "[red]meta-llama/Llama-3.1-70B-Instruct", 2 << 20, extra=(("pages", "16"),)
)
NAMESPACE = NamespaceStatus(
    FINGERPRINT.name,
    FINGERPRINT,
    "lru",
    ("llama-0", "llama-1"),
    blocks=262144,
    block_bytes=2 << 20,
    free=1000,
    pending=4,
    ready=261140,
    unverified=0,
    orphaned=0,
    pinned=12,
    hits=93,
    misses=7,
    stored=300001,
    stores_skipped=2,
    evictions=38861,
)
STATUS = DaemonStatus(
    version="0.1.0",
    boot_id="boot",
    pid=4711,
    uptime_seconds=11520.0,
    device=DeviceInfo("cuda", "GPU-6f1b9c52-0000-0000-0000-000000000000", "NVIDIA H200"),
    pool=PoolStatus(128 * GIB, 96 * GIB, 72 * GIB),
    sessions=3,
    engines=(
        EngineStatus("llama-0", True, 1, 1, 1234),
        EngineStatus("[red]qwen", False, 1, 1, 0),
    ),
    totals=Totals(5, 4, 1 << 35, 1 << 34, 1, 2),
    errors={"busy": 3},
    copying=CopyStatus("auto", CalibrationPoint(1 << 26, 5.5e10, 5.5e10), (), 65536, 65536),
    health=HealthStatus(True, (), 0.000212, 3.2, 0.012, 12.0, 0.0001, 0.0002),
)
