"""A path for its owner and the admitted, and nobody else: modes, and an ACL where they fall short.

A mode knows one group. Where more groups or single users are admitted, the path gets a POSIX access
control list: the bytes of its extended attribute are a version and entries (tag, permissions, id),
sorted, as acl(5) and the kernel's posix_acl_xattr.h have them.
"""

from __future__ import annotations

import contextlib
import os
import struct
from pathlib import Path

from kvferry.daemon.server.admission import Admission
from kvferry.proto.errors import Code, Refused

ATTRIBUTE = "system.posix_acl_access"
VERSION = 2
OWNER, USER, GROUP, OTHER_GROUP, MASK, OTHERS = 0x01, 0x02, 0x04, 0x08, 0x10, 0x20
NOBODY = 0xFFFFFFFF


def fence(path: Path, owner: int, admitted: int, admission: Admission) -> None:
    """Give `path` permissions: `owner` bits for its owner, `admitted` bits for who is let in.

    Raises Refused (BAD_CONFIG) where the file system or our rights do not allow it.
    """
    group, *more = admission.groups or (None,)
    with contextlib.suppress(OSError):  # there was none, or there can be none
        os.removexattr(path, ATTRIBUTE)
    os.chmod(path, owner << 6)
    if group is not None:
        _give_to(path, group)
        os.chmod(path, owner << 6 | admitted << 3)
    if admission.uids or more:
        ours = admitted if group is not None else 0
        _list(path, _entries(owner, ours, admitted, sorted(admission.uids), sorted(more)))


def _give_to(path: Path, group: int) -> None:
    try:
        os.chown(path, -1, group)
    except OSError as error:
        raise Refused(
            Code.BAD_CONFIG,
            f"limits.allow_groups: {path} cannot be given to group {group} ({error.strerror}): "
            "make the daemon's user a member of it",
            group,
        ) from error


def _list(path: Path, entries: bytes) -> None:
    try:
        os.setxattr(path, ATTRIBUTE, entries)
    except OSError as error:
        raise Refused(
            Code.BAD_CONFIG,
            "limits: single users and further groups need a runtime_dir whose file system has "
            f"ACLs ({error.strerror}): set another, or put all of them into one group",
            str(path),
        ) from error


def _entries(owner: int, group: int, admitted: int, users: list[int], groups: list[int]) -> bytes:
    entries = [
        (OWNER, owner, NOBODY),
        *((USER, admitted, uid) for uid in users),
        (GROUP, group, NOBODY),
        *((OTHER_GROUP, admitted, gid) for gid in groups),
        (MASK, admitted, NOBODY),
        (OTHERS, 0, NOBODY),
    ]
    return struct.pack("<I", VERSION) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
