"""UseReport: what the engine has used, found and saved, collected until it is sent to the daemons.

They evict by it, and derive from it what another size of the pool would find. Used by
OffloadingManager, in its thread.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.client.nonblocking import NOTHING_SAVED, NonBlockingClient, Saved
from kvferry.client.writers import Writers
from kvferry.proto.keys import OffloadKey

# Keys that are collected before they are sent.
MAX_KEYS = 4096


class UseReport:
    """Of one manager. hits, misses: of all lookups so far."""

    def __init__(self, clients: Sequence[NonBlockingClient], writers: Writers) -> None:
        self._clients, self._writers = clients, writers
        self.hits = self.misses = 0
        # `hits` and `misses` that were sent.
        self._sent = 0, 0
        # Least recent first. Whether no lookup was for the key.
        self._touched: dict[OffloadKey, bool] = {}
        # Keys to be evicted first, the first one of all in front.
        self._spare: dict[OffloadKey, None] = {}
        self._saved = NOTHING_SAVED

    def touch(self, keys: Sequence[OffloadKey], new: int) -> None:
        """See OffloadingManager.touch."""
        old = len(keys) - new
        fresh = {key: at >= old for at, key in reversed([*enumerate(keys)])}
        touched = self._touched
        for key in touched.keys() & fresh.keys():
            del touched[key]
        if len(touched) + len(fresh) > MAX_KEYS:
            self.send()
        self._touched.update(fresh)

    def spare(self, keys: Sequence[OffloadKey]) -> None:
        """Let these keys be evicted first, the last one before the others."""
        self._spare.update(dict.fromkeys(reversed(keys)))
        if len(self._spare) > MAX_KEYS:
            self.send()

    def count_saved(self, tokens: int, seconds: float) -> None:
        self._saved = Saved(self._saved.tokens + tokens, self._saved.seconds + seconds)

    def send(self) -> None:
        """Send the touched keys, the numbers of hits and misses, what loads saved; then the spare
        keys, each to the daemon of its writer, which has the block."""
        counts = self.hits, self.misses
        hits, misses = counts[0] - self._sent[0], counts[1] - self._sent[1]
        if self._touched or hits or misses or self._saved.tokens:
            touched, self._touched = self._touched, {}
            saved, self._saved = self._saved, NOTHING_SAVED
            self._sent = counts
            keys = self._writers.divide(tuple(reversed(touched)))
            for client, own in zip(self._clients, keys, strict=True):
                client.touch(own, hits, misses, sum(map(touched.__getitem__, own)), saved)
        if self._spare:
            spare, self._spare = self._spare, {}
            keys = self._writers.divide(tuple(reversed(spare)))
            for client, own in zip(self._clients, keys, strict=True):
                client.spare(own)

    def forget_keys(self) -> None:
        """The namespace is emptied."""
        self._touched.clear()
        self._spare.clear()
