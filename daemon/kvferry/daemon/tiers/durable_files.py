"""Changes of files that a power cut does not undo. The functions block, and raise OSError."""

from __future__ import annotations

import os
from pathlib import Path

from kvferry.daemon.directories import sync_directory
from kvferry.daemon.tiers.own_files import open_file, remove_entry


def write_file(path: Path, data: bytes) -> None:
    """Replace a file atomically and durably."""
    new = path.with_name(path.name + ".new")
    remove_entry(new)
    descriptor = open_file(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        os.write(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    try:
        new.rename(path)
    except IsADirectoryError:
        path.rmdir()
        new.rename(path)
    sync_directory(path.parent)
