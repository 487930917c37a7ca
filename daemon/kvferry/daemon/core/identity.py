"""The identity of a daemon, in Welcome messages and in its status."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.proto.status import DeviceInfo, Limits


@dataclass(frozen=True, slots=True)
class DaemonIdentity:
    """One run of the daemon. started: time.monotonic() at its start, in seconds."""

    version: str
    boot_id: str
    pid: int
    device: DeviceInfo
    limits: Limits
    started: float
