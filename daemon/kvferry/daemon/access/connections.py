"""Quotas of live and of new connections per user, so that no user can abort the daemon.

libzmq aborts the process if the routing id that ROUTER generates for a new connection equals an id
that a connected peer has chosen. A generated id is a zero byte and a 32-bit counter, which has a
random start and grows by one per connection. Peers may choose ids of that form. If an attacker
spreads the ids of L live connections evenly and opens R connections per second, the counter reaches
one of them after 2**32 / (2 * L * R) seconds on average. libzmq does not report a chosen id before
it accepts it, but it calls the ZAP handler (transport/zap.py) before a connection gets an id. So L
and R are limited, per user and for all users together. Event loop only.
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum

from kvferry.daemon.access.admission import Admission, Credentials, credentials_of


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits of connections. live: at a time. per_second: new ones, after the first `burst`."""

    live: int
    per_second: float
    burst: int


# One user, including root and the daemon's own: an attacker may be root in a container. A collision
# takes 97 days. This is enough for 64 engines with their schedulers, workers and tools, which all
# reconnect at once when the daemon restarts, and for a status command every second.
PER_USER = Quota(live=256, per_second=1.0, burst=4096)
# All users together, because an attacker may have many user ids. A collision takes 24 days.
ALL_USERS = Quota(live=512, per_second=2.0, burst=8192)
# Maximum of users with a bucket. Full buckets are removed, because a new one is full, too.
_MAX_BUCKETS = 1024


class Decision(Enum):
    """The reply to ZAP about a new connection."""

    ADMIT = "admit"
    # The client's libzmq connects again by itself.
    LATER = "later"


class TokenBucket:
    """One token per new connection; a token is added every 1 / per_second seconds."""

    def __init__(self, quota: Quota, now: float) -> None:
        self._quota, self._tokens, self._at = quota, float(quota.burst), now

    def refill_tokens(self, now: float) -> float:
        """Add the tokens since the last call; return the available ones. now: seconds."""
        grown = self._tokens + (now - self._at) * self._quota.per_second
        self._tokens, self._at = min(grown, float(self._quota.burst)), now
        return self._tokens

    def take_token(self) -> None:
        """Use one token for a new connection."""
        self._tokens -= 1


class Connections:
    """All connections of a listening socket, by descriptor number, and the quotas of users.

    clock: seconds, monotonic.
    """

    def __init__(
        self,
        admission: Admission,
        per_user: Quota = PER_USER,
        all_users: Quota = ALL_USERS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._admission, self._clock = admission, clock
        self._per_user, self._all_users = per_user, all_users
        self._by_descriptor: dict[int, Credentials] = {}
        self._live = Counter[int]()
        self._buckets: dict[int, TokenBucket] = {}
        self._bucket = TokenBucket(all_users, clock())

    def add_connection(self, descriptor: int) -> None:
        """Count an accepted connection, and shut it down if it exceeds a quota.

        Otherwise silent connections would use descriptors until libzmq's handshake timeout. The
        number may already belong to a newer connection; the events of that one correct the count.
        """
        self.remove_connection(descriptor)
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as peer:
            if peer.family != socket.AF_UNIX or peer.type != socket.SOCK_STREAM:
                return
            process = self._by_descriptor[descriptor] = credentials_of(peer)
            self._live[process.uid] += 1
            if self._over(process.uid):
                peer.shutdown(socket.SHUT_RDWR)

    def remove_connection(self, descriptor: int) -> None:
        """A connection was closed."""
        process = self._by_descriptor.pop(descriptor, None)
        if process is not None:
            self._live[process.uid] -= 1
            if not self._live[process.uid]:
                del self._live[process.uid]

    def decide_admission(self, uid: int, gid: int, pid: int) -> Decision:
        """Whether a connection of this process may begin. Raises Refused (FORBIDDEN)."""
        groups = self._groups(uid, gid, pid)
        self._admission.check_process(Credentials(uid, gid, pid, groups))
        now = self._clock()
        bucket = self._bucket_of(uid, now)
        enough = bucket.refill_tokens(now) >= 1 and self._bucket.refill_tokens(now) >= 1
        if self._over(uid) or not enough:
            return Decision.LATER
        bucket.take_token()
        self._bucket.take_token()
        return Decision.ADMIT

    def _over(self, uid: int) -> bool:
        return (
            self._live[uid] > self._per_user.live or len(self._by_descriptor) > self._all_users.live
        )

    def _groups(self, uid: int, gid: int, pid: int) -> frozenset[int]:
        """The groups of the connection in a request of libzmq, found by its credentials.

        Processes in other PID namespaces have pid 0: of those that look alike, the common groups.
        """
        alike = [
            process.groups
            for process in self._by_descriptor.values()
            if (process.uid, process.gid, process.pid) == (uid, gid, pid)
        ]
        return frozenset.intersection(*alike) if alike else frozenset()

    def _bucket_of(self, uid: int, now: float) -> TokenBucket:
        bucket = self._buckets.get(uid)
        if bucket is None:
            if len(self._buckets) >= _MAX_BUCKETS:
                full = self._per_user.burst
                kept = {u: b for u, b in self._buckets.items() if b.refill_tokens(now) < full}
                self._buckets = kept
            bucket = self._buckets[uid] = TokenBucket(self._per_user, now)
        return bucket
