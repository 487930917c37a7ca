"""The files of a disk tier in its root. The tier opens and deletes no others."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from kvferry.daemon.directories import sync_directory
from kvferry.daemon.tiers.disk.hints import HINTS
from kvferry.daemon.tiers.disk.meta import META
from kvferry.daemon.tiers.durable_files import write_file
from kvferry.daemon.tiers.own_files import (
    NotAFileError,
    is_directory,
    is_removable,
    open_or_replace,
    read_file,
    remove_entry,
)
from kvferry.proto.errors import Code, Refused

LOCK = "lock"
# Identifies the root of a tier, and the format of everything below it.
FORMAT = "format"
FORMAT_NAME = b"kvferry disk tier "
FORMAT_TEXT = FORMAT_NAME + b"2\n"
# Of builds that noted no format.
OLD_FILES = LOCK, "state"

_NAME = re.compile(r"[0-9A-Za-z_-]{1,64}")
_TRASH = re.compile(r"trash-[0-9A-Za-z_-]{1,64}-\d+")
# A drop of a namespace that an earlier build has noted and not done.
_MARKER = re.compile(r"drop-\d+-([0-9A-Za-z_]{1,64})")
_FILE = re.compile(rf"({META}|{META}\.new|{HINTS}|slab-\d+)")
_ROOT_FILES = {LOCK, FORMAT, f"{FORMAT}.new"}


def prepare_root(root: Path) -> None:
    """Create the root of a tier if it does not exist, for this user alone.

    Raises Refused (BAD_CONFIG) if that is not possible, if others may write into it, or if it is
    neither empty nor the root of a tier.
    """
    user = os.geteuid()
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError as error:
        message = f"tiers.disk.path {root} is not a directory; name one, or a path that is free"
        raise Refused(Code.BAD_CONFIG, message, str(root)) from error
    except OSError as error:
        message = (
            f"tiers.disk.path {root} cannot be created: {error.strerror}; create it for user "
            f"{user} (install -d -o {user} -m 700), or name another directory"
        )
        raise Refused(Code.BAD_CONFIG, message, str(root)) from error
    found = root.stat()
    # A user who can write into the root could make this process write elsewhere.
    if found.st_uid != user or found.st_mode & 0o022:
        message = (
            f"tiers.disk.path {root} belongs to user {found.st_uid} with mode "
            f"{found.st_mode & 0o7777:04o}; give it to user {user} alone (chown, chmod 700)"
        )
        raise Refused(Code.BAD_CONFIG, message, str(root))
    if _is_of_another_build(root):
        message = (
            f"tiers.disk.path {root} is the disk tier of another build of kvferry, whose format "
            f"this build does not read; delete it (rm -r {root}), or name another directory"
        )
        raise Refused(Code.BAD_CONFIG, message, str(root))
    if foreign := foreign_entry(root):
        message = (
            f"tiers.disk.path {root} contains {foreign!r}, and no disk tier; name a directory "
            "that is empty or does not exist"
        )
        raise Refused(Code.BAD_CONFIG, message, str(root))


def lock_root(root: Path) -> int:
    """Lock a root until the returned descriptor is closed. Raises OSError; BlockingIOError if
    another process has the lock."""
    descriptor = open_or_replace(root / LOCK, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def foreign_entry(root: Path) -> str | None:
    """The name of something because of which a directory is not the root of a tier.

    A tier has noted its format in its root, or nothing else is there: other programs have files
    named `lock` and `format`, too.
    """
    if _has_format(root):
        return None
    return next(iter(foreign_entries(root)), None)


def _is_of_another_build(root: Path) -> bool:
    """Whether the root has another format, or the files of builds that noted none."""
    try:
        noted = read_file(root / FORMAT, 2 * len(FORMAT_TEXT))
    except (FileNotFoundError, NotAFileError, PermissionError):
        return all((root / name).is_file() for name in OLD_FILES)
    return noted.startswith(FORMAT_NAME) and noted != FORMAT_TEXT


def note_format(root: Path) -> None:
    """Note that a root has this format."""
    if not _has_format(root):
        write_file(root / FORMAT, FORMAT_TEXT)


def _has_format(root: Path) -> bool:
    try:
        return read_file(root / FORMAT, len(FORMAT_TEXT)) == FORMAT_TEXT
    except (FileNotFoundError, NotAFileError, PermissionError):
        return False


def foreign_entries(root: Path) -> list[str]:
    """The entries of a directory that a tier did not make, by name. A tier never changes them."""
    return sorted(path.name for path in root.iterdir() if not _is_ours(path))


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
        sync_directory(directory.parent)


def drop_marked(root: Path) -> None:
    """Do the drops that an earlier build has noted. Raises OSError."""
    for marker in root.glob("drop-*"):
        if (found := _MARKER.fullmatch(marker.name)) is None or not is_removable(marker):
            continue
        for directory in namespace_directories(root):
            if directory.name.partition("-")[0] == found[1]:
                move_to_trash(directory)
        remove_entry(marker)


def remove_trash(root: Path) -> None:
    for path in _trash(root):
        shutil.rmtree(path, ignore_errors=True)


def _trash(root: Path) -> Iterator[Path]:
    for path in root.glob("trash-*"):
        # One that was partly deleted may be empty.
        if _TRASH.fullmatch(path.name) and _has_only_ours(path, least=0):
            yield path


def _is_ours(path: Path) -> bool:
    name = path.name
    if name in _ROOT_FILES or _MARKER.fullmatch(name):
        return is_removable(path)
    if _TRASH.fullmatch(name):
        return _has_only_ours(path, least=0)
    return name == "lost+found" or (is_namespace_name(name) and _has_only_ours(path))


def _has_only_ours(path: Path, least: int = 1) -> bool:
    if not is_directory(path):
        return False
    try:
        found = list(path.iterdir())
        return len(found) >= least and all(
            _FILE.fullmatch(each.name) and is_removable(each) for each in found
        )
    except OSError:  # it may be somebody else's
        return False
