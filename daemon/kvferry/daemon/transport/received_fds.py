"""Received file descriptors: what kind of file each is, and how it is closed without blocking.

The event loop itself closes only memfds with little memory (memory/fd_closer.py). No function here
calls a file system, which might not respond. Event loop only.
"""

from __future__ import annotations

import ctypes
import enum
import stat

from kvferry.daemon.memory.fd_closer import close_descriptor_later, close_memory
from kvferry.shm.memfd import read_seals

# Descriptors in one packet: the kernel's SCM_MAX_FD.
MAX_FDS_PER_PACKET = 253
_AT_EMPTY_PATH, _AT_STATX_DONT_SYNC, _STATX_TYPE = 0x1000, 0x4000, 0x1
_STATX_BYTES, _MODE_AT = 256, 28
_libc = ctypes.CDLL(None)


class FdKind(enum.Enum):
    """Kinds of files that clients may send."""

    # A memfd, or a file of tmpfs.
    MEMORY = "memory"
    # A device file or a file without a type: what a driver exports.
    DEVICE = "device"


def fd_kind(descriptor: int) -> FdKind | None:
    """The kind of a descriptor; None if the daemon does not accept such files."""
    if read_seals(descriptor) is not None:
        return FdKind.MEMORY
    kind = _type_of(descriptor)
    return FdKind.DEVICE if kind in (0, stat.S_IFCHR) else None


def _type_of(descriptor: int) -> int | None:
    """The file type as in st_mode, from the kernel's cache: fstat would call the file system."""
    buffer = ctypes.create_string_buffer(_STATX_BYTES)
    flags = _AT_EMPTY_PATH | _AT_STATX_DONT_SYNC
    if _libc.statx(descriptor, b"", flags, _STATX_TYPE, buffer):
        return None
    mode = int.from_bytes(buffer.raw[_MODE_AT : _MODE_AT + 2], "little")
    return stat.S_IFMT(mode)


def close_received_fd(descriptor: int) -> None:
    """Close a descriptor that a client sent, without blocking."""
    if fd_kind(descriptor) is FdKind.MEMORY:
        close_memory(descriptor)
    else:
        close_descriptor_later(descriptor)
