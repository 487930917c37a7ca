"""Decides which users may connect: root, the daemon's own user, and the members of one POSIX group.

The kernel reports which user and groups the process at the other end of a Unix socket had when it
connected. Both sockets call `Admission.check_process`. The file modes of the runtime directory
(runtime_directory.py) exclude other users, too; for events.sock they are the only check. Event loop
only.
"""

from __future__ import annotations

import contextlib
import grp
import os
import socket
import struct
from dataclasses import dataclass

from kvferry.proto.errors import Code, Refused

# (gid_t) -1 is not a group: for chown it means "do not change the group".
MAX_ID = (1 << 32) - 2
# Linux, include/uapi/asm-generic/socket.h; Python has no name for it.
SO_PEERGROUPS = 59
# Python reads at most 1024 bytes of a socket option: 256 groups. A process with more of them is
# checked by its primary group only.
_MAX_OPTION_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Credentials:
    """Credentials of a process when it connected. groups: its supplementary groups."""

    uid: int
    gid: int
    pid: int
    groups: frozenset[int] = frozenset()


def credentials_of(peer: socket.socket) -> Credentials:
    """The credentials of the process at the other end of a Unix socket. Raises OSError."""
    pid, uid, gid = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    groups = b""
    with contextlib.suppress(OSError):
        groups = peer.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, _MAX_OPTION_BYTES)
    return Credentials(
        uid & 0xFFFFFFFF,
        gid & 0xFFFFFFFF,
        pid,
        frozenset(number for (number,) in struct.iter_unpack("I", groups)),
    )


class Admission:
    """Decides which users may connect.

    group: name or number of the group whose members may connect; "" for none.

    Raises Refused (BAD_CONFIG) for an unknown group.
    """

    def __init__(self, group: str = "") -> None:
        self.change_group(group)

    def change_group(self, group: str) -> None:
        """Admit this group from now on; connected clients stay.

        If it raises Refused (BAD_CONFIG), nothing has changed.
        """
        self.gid = gid_of(group) if group else None
        self.group = group

    def check_process(self, process: Credentials) -> None:
        """Raise Refused (FORBIDDEN) if this process may not connect."""
        if process.uid in (0, os.geteuid()):
            return
        if self.gid is None or self.gid not in {process.gid} | process.groups:
            raise Refused(
                Code.FORBIDDEN,
                f"user {process.uid} may not connect; run the engine as the daemon's user, or in "
                "the group of access.group",
                process.uid,
            )


def gid_of(group: str) -> int:
    """The number of a group. Raises Refused (BAD_CONFIG)."""
    if group.isdecimal():
        if int(group) > MAX_ID:
            message = f"group {group} in access.group is above {MAX_ID}; use an existing group"
            raise Refused(Code.BAD_CONFIG, message, group)
        return int(group)
    try:
        return grp.getgrnam(group).gr_gid
    except (KeyError, ValueError) as error:
        message = f"unknown group {group!r} in access.group; create it, or name another one"
        raise Refused(Code.BAD_CONFIG, message, group) from error
