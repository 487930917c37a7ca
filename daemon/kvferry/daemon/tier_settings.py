"""The tiers that the configuration names, fastest first. Called by app.py at start."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

from kvferry.daemon.config import (
    Config,
    CustomTierConfig,
    DiskTierConfig,
    MooncakeTierConfig,
    TiersConfig,
)
from kvferry.daemon.tiers.composition import TierSettings
from kvferry.daemon.tiers.tier_process import TierSpec
from kvferry.proto.sizes import parse_bytes

DISK_MODULE = "kvferry.daemon.tiers.disk"
MOONCAKE_MODULE = "kvferry.daemon.tiers.mooncake"
# Whether other hosts can load the blocks of a tier. That of a custom tier is not known.
LOCALITIES = {"disk": "LOCAL", "mooncake": "REMOTE"}

TierConfig: TypeAlias = DiskTierConfig | CustomTierConfig | MooncakeTierConfig


def tier_settings(config: Config, runtime_directory: Path) -> tuple[TierSettings, ...]:
    """runtime_directory: that of the daemon's device."""
    return tuple(
        TierSettings(
            spec,
            section.write,
            section.admit_after,
            parse_bytes(section.rate),
            _markers(spec, runtime_directory),
            LOCALITIES.get(spec.name),
        )
        for section, spec in _configured(config.tiers)
    )


def _configured(tiers: TiersConfig) -> Iterator[tuple[TierConfig, TierSpec]]:
    disk, custom, mooncake = tiers.disk, tiers.custom, tiers.mooncake
    if disk.path:
        options = {"path": str(Path(disk.path).absolute()), "size": parse_bytes(disk.size)}
        yield disk, TierSpec("disk", DISK_MODULE, options)
    if custom.module:
        yield custom, TierSpec("custom", custom.module, dict(custom.options))
    if mooncake.master:
        names = ("master", "protocol", "device", "host")
        options = {name: getattr(mooncake, name) for name in names}
        yield mooncake, TierSpec("mooncake", MOONCAKE_MODULE, options)


def _markers(spec: TierSpec, runtime_directory: Path) -> Path:
    """Where markers of drops survive as long as what the tier stores."""
    if spec.name == "disk":
        return Path(spec.options["path"])
    if state := os.environ.get("STATE_DIRECTORY"):  # set by systemd
        return Path(state.split(":")[0]) / f"drops-{runtime_directory.name}-{spec.name}"
    return runtime_directory / f"drops-{spec.name}"
