"""Markers of drops: these namespaces must be dropped in a tier before it is used.

A marker is written before a drop is sent to the tier's process, and removed once that has confirmed
it. The next daemon repeats the marked drops. So the keys of a reset namespace are not found again
if daemon and process end in between. The functions block.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from kvferry.daemon.tier_config import DiskTierConfig, TierConfig
from kvferry.daemon.tiers.durable_files import sync_directory
from kvferry.daemon.tiers.own_files import is_removable, open_or_replace, remove_entry

PREFIX = "drop-"


def marker_directory(tier: TierConfig, runtime_directory: Path) -> Path:
    """A directory whose files survive as long as the blocks of the tier."""
    if isinstance(tier, DiskTierConfig):
        return Path(tier.options["path"])
    if state := os.environ.get("STATE_DIRECTORY"):  # set by systemd
        return Path(state.split(":")[0]) / f"drops-{runtime_directory.name}-{tier.name}"
    return runtime_directory / f"drops-{tier.name}"


def add_marker(directory: Path, store: str, number: int) -> Path:
    """Add the marker of a drop, durably. Raises OSError."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = directory / f"{PREFIX}{number}-{store}"
    os.close(open_or_replace(path, os.O_WRONLY))
    sync_directory(directory)
    return path


def remove_marker(path: Path) -> None:
    """Remove a marker, durably. One that stays drops the namespace at the next start."""
    with suppress(OSError):
        remove_entry(path)
        sync_directory(path.parent)


def marked_stores(directory: Path) -> Iterator[tuple[Path, str]]:
    """Each marker in a directory, and the namespace that it names."""
    for path in directory.glob(f"{PREFIX}*"):
        number, _, store = path.name.removeprefix(PREFIX).partition("-")
        if number.isdecimal() and store and is_removable(path):
            yield path, store
