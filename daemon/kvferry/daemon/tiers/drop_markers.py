"""Markers in the root of a tier: these namespaces must be dropped before the root is used.

A marker is written before a drop is sent to the tier's process, and removed once that has confirmed
it. So the keys of a reset namespace are not found again if daemon and process end in between. The
functions block.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PREFIX = "drop-"


def add_marker(root: Path, store: str, number: int) -> Path | None:
    """Add the marker of a drop, durably; None if the root does not exist. Raises OSError."""
    path = root / f"{PREFIX}{number}-{store}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        os.close(os.open(path, flags, 0o600))
    except FileNotFoundError:
        return None
    _sync_directory(root)
    return path


def remove_marker(path: Path) -> None:
    """Remove a marker. One that stays drops the namespace when the root is opened again."""
    with suppress(OSError):
        path.unlink()


def marked_stores(root: Path) -> Iterator[tuple[Path, str]]:
    """Each marker in a root, and the namespace that it names."""
    for path in root.glob(f"{PREFIX}*"):
        number, _, store = path.name.removeprefix(PREFIX).partition("-")
        if number.isdecimal() and store:
            yield path, store


def _sync_directory(root: Path) -> None:
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
