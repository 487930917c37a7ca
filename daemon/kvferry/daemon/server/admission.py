"""Who may connect: one rule, asked at every door.

A process is let in for its user: the daemon's own, root, one of `allow_uids`, or a member of one of
`allow_groups`. Which user and group a process runs as is the kernel's word (SO_PEERCRED), never the
process's. Who is a member is the user database's; it is asked at the door and remembered for a
short while. The files are the first fence (endpoint.py), and the only one of events.sock.
"""

from __future__ import annotations

import grp
import os
import pwd
import time
from collections.abc import Iterable

from kvferry.proto.errors import Code, Refused

REMEMBERED = 10.0
"""Seconds for which a user's groups are not asked for again."""
MAX_REMEMBERED = 1024
MAX_ID = (1 << 32) - 2
"""Of users and groups. The next one, which is -1, has the kernel leave a file's as it is."""


class Admission:
    """uids, groups: who may come in besides the daemon's user and root; groups as gids, in order.

    Raises Refused (BAD_CONFIG) for a group that there is not.
    """

    def __init__(self, uids: Iterable[int] = (), groups: Iterable[str | int] = ()) -> None:
        self.change(uids, groups)

    def change(self, uids: Iterable[int], groups: Iterable[str | int]) -> None:
        """From now on these; who is in stays in. Raises Refused and changes nothing."""
        self.groups = tuple(dict.fromkeys(gid_of(group) for group in groups))
        self.uids = frozenset(uids) - {os.geteuid(), 0}
        self._memberships: dict[int, tuple[float, frozenset[int]]] = {}

    def check(self, uid: int, gid: int) -> None:
        """Raise Refused (FORBIDDEN) where a process of this user and group may not connect."""
        if uid in (0, os.geteuid()) or uid in self.uids:
            return
        if not self.groups or ({gid} | self._groups_of(uid)).isdisjoint(self.groups):
            raise Refused(
                Code.FORBIDDEN,
                f"user {uid} may not connect: run the engine as the daemon's user, or have this "
                "one put into limits.allow_uids or a group of limits.allow_groups",
                uid,
            )

    def _groups_of(self, uid: int) -> frozenset[int]:
        now = time.monotonic()
        until, groups = self._memberships.get(uid, (0.0, frozenset()))
        if until < now:
            if len(self._memberships) >= MAX_REMEMBERED:
                self._memberships.clear()
            groups = memberships(uid)
            self._memberships[uid] = now + REMEMBERED, groups
        return groups


def gid_of(group: str | int) -> int:
    """The number of a group. Raises Refused (BAD_CONFIG)."""
    if isinstance(group, int) or group.isdecimal():
        if not 0 <= int(group) <= MAX_ID:
            message = f"limits.allow_groups: the number of a group is 0 to {MAX_ID}"
            raise Refused(Code.BAD_CONFIG, message, group)
        return int(group)
    try:
        return grp.getgrnam(group).gr_gid
    except (KeyError, ValueError) as error:
        message = "limits.allow_groups names a group that there is not: make it, or mend the name"
        raise Refused(Code.BAD_CONFIG, message, group) from error


def memberships(uid: int) -> frozenset[int]:
    """The groups of a user; none where the user database does not know it."""
    try:
        user = pwd.getpwuid(uid)
        return frozenset(os.getgrouplist(user.pw_name, user.pw_gid))
    except (KeyError, OSError):
        return frozenset()
