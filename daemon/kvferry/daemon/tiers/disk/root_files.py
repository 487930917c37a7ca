"""What in the root of a disk tier belongs to the tier: nothing else is opened or deleted."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from kvferry.daemon.tiers.disk import recovery
from kvferry.daemon.tiers.disk.namespace_store import INDEX, META
from kvferry.daemon.tiers.drop_markers import PREFIX
from kvferry.proto.errors import Code, Refused

LOCK = "lock"

_NAME = re.compile(r"[0-9A-Za-z_-]{1,64}")
_TRASH = re.compile(r"trash-[0-9A-Za-z_-]{1,64}-\d+")
_FILE = re.compile(rf"({META}|{META}\.new|{INDEX}|{INDEX}-lock|{recovery.REBUILDING}|slab-\d+)")


def check_root(root: Path) -> None:
    """Raise Refused (BAD_CONFIG) if a directory is neither empty nor the root of a tier."""
    names = {path.name for path in root.iterdir()}
    if names & {LOCK, recovery.STATE}:
        return
    foreign = sorted(name for name in names - {"lost+found"} if not name.startswith(PREFIX))
    if foreign:
        message = (
            f"tiers.disk.path {root} contains {foreign[0]!r}, and no disk tier; name a directory "
            "that is empty or does not exist"
        )
        raise Refused(Code.BAD_CONFIG, message, str(root))


def is_namespace_name(name: str) -> bool:
    """Whether a namespace of this name can have a directory."""
    return _NAME.fullmatch(name) is not None and _TRASH.fullmatch(name) is None


def namespace_directories(root: Path) -> list[Path]:
    """The directories of namespaces: those with files of a tier, and with nothing else."""
    return sorted(
        path for path in root.iterdir() if is_namespace_name(path.name) and _has_only_ours(path)
    )


def move_to_trash(directory: Path) -> None:
    """Make a namespace's directory unreachable, durably. Raises OSError."""
    with suppress(FileNotFoundError):
        directory.rename(directory.with_name(f"trash-{directory.name}-{time.time_ns()}"))
        recovery.sync_directory(directory.parent)


def remove_trash(root: Path) -> None:
    for path in _trash(root):
        shutil.rmtree(path, ignore_errors=True)


def _trash(root: Path) -> Iterator[Path]:
    for path in root.glob("trash-*"):
        # One that was partly deleted may be empty.
        if _TRASH.fullmatch(path.name) and _has_only_ours(path, least=0):
            yield path


def _has_only_ours(path: Path, least: int = 1) -> bool:
    if path.is_symlink() or not path.is_dir():
        return False
    names = [each.name for each in path.iterdir()]
    return len(names) >= least and all(_FILE.fullmatch(name) for name in names)
