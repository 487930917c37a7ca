"""Changes of files that a power cut does not undo. The functions block, and raise OSError."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def write_file(path: Path, data: bytes) -> None:
    """Replace a file atomically and durably."""
    new = path.with_name(path.name + ".new")
    with suppress(FileNotFoundError):
        new.unlink()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(new, flags, 0o600)
    try:
        os.write(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    new.rename(path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make durable which files are in a directory."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
