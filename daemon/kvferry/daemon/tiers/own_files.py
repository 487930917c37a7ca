"""Opens the files of a tier: regular files only, whatever is at their names.

After damage, or because somebody put it there, a link, a FIFO or a directory may be at the name of
a file. Such an entry is never followed, waited for or read: it costs what the file would have held.
The functions block, and raise OSError. Any thread.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

# O_NONBLOCK: a FIFO would wait for its other end.
_ALWAYS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class NotAFileError(OSError):
    """Something else than a regular file is at this path, or a file that is too long."""


def open_file(path: Path, flags: int) -> int:
    """Open a regular file; a new one has mode 0600. Raises NotAFileError if there is another
    entry."""
    try:
        descriptor = os.open(path, flags | _ALWAYS, 0o600)
    except OSError as error:
        if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
            raise _not_a_file(path) from error
        raise
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise _not_a_file(path)


def open_or_replace(path: Path, flags: int) -> int:
    """Open a regular file, in place of another entry if there is one."""
    try:
        return open_file(path, flags | os.O_CREAT)
    except NotAFileError:
        remove_entry(path)
        return open_file(path, flags | os.O_CREAT)


def read_file(path: Path, limit: int) -> bytes:
    """Read a regular file. Raises NotAFileError if it has more than `limit` bytes."""
    descriptor = open_file(path, os.O_RDONLY)
    try:
        data = os.pread(descriptor, limit + 1, 0)
    finally:
        os.close(descriptor)
    if len(data) > limit:
        raise NotAFileError(errno.EFBIG, f"more than {limit} bytes", str(path))
    return data


def remove_entry(path: Path) -> None:
    """Remove a file, link, FIFO or empty directory, if there is one. The target of a link stays."""
    if is_directory(path):
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


def is_removable(path: Path) -> bool:
    """Whether `remove_entry` can remove this entry: it is not a directory that has contents."""
    try:
        return not is_directory(path) or next(path.iterdir(), None) is None
    except OSError:
        return False


def is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _not_a_file(path: Path) -> NotAFileError:
    return NotAFileError(errno.EINVAL, "not a regular file", str(path))
