"""Tiers in processes, and one with faults."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from kvferry.daemon.tier_config import CustomTierConfig, TierConfig
from kvferry.daemon.tiers.tier_process import DEFAULT_TIMES, TierTimes
from kvferry.testing.tier_subjects import ProcessSubject

SOON_KILLED = TierTimes(grace=0.3, first_off=0.2)


class Start(Protocol):
    def __call__(
        self, config: TierConfig, times: TierTimes = DEFAULT_TIMES, wait: bool = True
    ) -> ProcessSubject: ...


class Rude:
    """A tier with faults, by the name of a file (rude_tier.py)."""

    def __init__(
        self, folder: Path, start: Start, times: TierTimes = SOON_KILLED, *, shared: bool = False
    ) -> None:
        self.folder = folder
        options = {"folder": str(folder)}
        self.tier = start(CustomTierConfig("rude_tier", options, shared=shared), times)

    def on(self, fault: str) -> None:
        (self.folder / fault).touch()

    def off(self, fault: str) -> None:
        (self.folder / fault).unlink()
