"""The operations that never wait, shared by both clients."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, TypeAlias

from kvferry.client.jobs import TransferResult
from kvferry.client.namespace import ClientNamespace
from kvferry.client.reconnecting_client import ReconnectingClient
from kvferry.client.splitting import key_batches
from kvferry.client.tier_searches import TierSearch
from kvferry.proto.keys import Lookup, OffloadKey
from kvferry.proto.memory import HostRegion
from kvferry.proto.messages import ClientMessage, Pin, Touch, Unpin
from kvferry.proto.specs import TransferSpec

if TYPE_CHECKING:
    from kvferry.client.arrays import KVTensors
    from kvferry.client.tensors.canonical import CanonicalKVCaches

KVCaches: TypeAlias = "CanonicalKVCaches | KVTensors"


class NonBlockingClient(ReconnectingClient):
    """The part of a client that never waits."""

    @property
    def region(self) -> HostRegion | None:
        """The engine's region of the host pool, as last reported; None without a registration."""
        return self._session.restore.region

    @property
    def namespace(self) -> ClientNamespace:
        """The opened namespace. Raises Refused (UNKNOWN_NAMESPACE) if there is none."""
        return self._session.namespace

    def transfer_async(self, job_id: int, spec: TransferSpec, wait_for: int = 0) -> None:
        """Submit a transfer and return at once; get_finished returns its result.

        spec: (source, destination). wait_for: the value that the engine's timeline must reach
        before the copy begins; 0 for none. Raises Refused for errors that the client detects
        (BAD_SPEC, BAD_KEY, DUPLICATE_JOB, BUSY, STALE, MESSAGE_TOO_LARGE), and Gone if not
        connected. If the daemon refuses the job, its result has the error.
        """
        if self._session.gone is not None:
            self._advance_reconnect()
        parts = self._session.submit(job_id, spec, wait_for)
        for data in parts:
            self._send(data)
        self._session.submitted(job_id, spec, len(parts))

    def get_finished(self) -> list[TransferResult]:
        """Results that have arrived: each is returned once, in order per direction.

        Never waits, also while the daemon is disconnected or stopped.
        """
        self._receive_messages()
        self._check_connection_if_due(time.monotonic())
        return self._session.jobs.take_results()

    def cancel(self, job_ids: Collection[int]) -> None:
        """Cancel jobs. Each still has one result: cancelled, or done if it was too late."""
        self._send(self._session.cancel(job_ids))

    def lookup(self, key: OffloadKey) -> Lookup:
        """Look a key up in the mirror, which is at most 0.2 ms older than the received messages.

        HIT: it can be loaded. Unless it is pinned it may be evicted before the load, which then
        fails and is a miss. RETRY: the mirror is incomplete. While the client is not connected, and
        from a reset until it is done, every key is a MISS. Raises Refused (UNKNOWN_NAMESPACE) if no
        namespace with a mirror is open.
        """
        now = time.monotonic()
        if now > self._mirror_expires:
            self._refresh_mirror(now)
        return self._session.namespace.lookup(key, now)

    def find_in_tiers(self, keys: Iterable[OffloadKey], compute_seconds: float = 0.0) -> TierSearch:
        """Find keys below the host pool, without waiting, and promote them to it.

        keys: in prefix order. compute_seconds: the time in which the engine computes the tokens of
        one key; keys are promoted only if that is slower. 0: everything found is promoted.
        Until the daemon has answered, lookups of these keys return RETRY instead of MISS. Nothing
        is found while the client is not connected, or if the daemon has no tiers. Raises Refused
        (BAD_KEY, UNKNOWN_NAMESPACE).
        """
        session, namespace = self._session, self._session.namespace
        search = TierSearch(namespace.checked_keys(keys), compute_seconds=compute_seconds)
        if session.gone is not None or not namespace.opened.tiers or not search.keys:
            search.found = 0
            return search
        self._send(session.find_in_tiers(search, time.monotonic()))
        return search

    def pin(self, keys: Iterable[OffloadKey]) -> None:
        """Keep resident keys from eviction until they are unpinned as often, or until `close`.

        Reconnecting restores the pins of keys that the daemon has. Raises Refused (BAD_KEY,
        UNKNOWN_NAMESPACE), as do unpin and touch. None of the three needs a connection.
        """
        namespace = self._session.namespace
        keys = namespace.checked_keys(keys)
        self._send_if_connected(map(Pin, key_batches(keys)))
        namespace.pin(keys)

    def unpin(self, keys: Iterable[OffloadKey]) -> None:
        """Unpin keys. Raises Refused (NOT_PINNED) if one is not pinned, and unpins none."""
        namespace = self._session.namespace
        keys = namespace.checked_keys(keys)
        namespace.check_pinned(keys)
        self._send_if_connected(map(Unpin, key_batches(keys)))
        namespace.unpin(keys)

    def touch(self, keys: Iterable[OffloadKey], hits: int = 0, misses: int = 0) -> None:
        """Mark keys as recently used: the first becomes the most recent.

        hits, misses: lookups since the last call, for the daemon's statistics.
        """
        *tail, head = reversed(key_batches(self._session.namespace.checked_keys(keys)))
        self._send_if_connected((*map(Touch, tail), Touch(head, hits, misses)))

    def reset_async(self) -> None:
        """As `reset`, without waiting: every key is a MISS here at once.

        If the client is not connected, reconnecting does the reset. If the daemon refuses it, every
        key stays a MISS here, and the next call that polls raises the error. Raises Gone if the
        client does not reconnect.
        """
        request = self._session.reset()
        if not self.connecting:
            self._send(self._session.request(request))

    def _send_if_connected(self, messages: Iterable[ClientMessage]) -> None:
        """Send messages that have no reply, if connected."""
        if self._session.gone is None:
            for message in messages:
                self._send(self._session.request(message))
