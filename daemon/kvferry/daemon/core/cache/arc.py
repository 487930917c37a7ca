"""ARC: an eviction policy that balances recency and frequency by the misses it sees.

Keys requested once are in the recent list, keys requested again in the frequent list; `target` is
the desired length of the recent list. An evicted key leaves a ghost in the ghost list of its side.
If a key returns while its ghost exists, it was evicted too early: the target moves in favour of
that side, and the key is inserted into the frequent list. N. Megiddo and D. S. Modha, "ARC: A
Self-Tuning, Low Overhead Replacement Cache", FAST 2003, figure 4.

In the paper a request has one key, every key may be evicted, and ghosts appear only once the cache
is full. An offer of one key to a full cache without pinned keys behaves as in the paper. Beyond it:

- The keys of an offer are inserted one by one, the last first. None is evicted for another.
- Keys that must stay are skipped. If all keys of a list must stay, the other list gives the victim.
- After an offer, the recent list plus its ghosts has at most as many keys as the cache has blocks,
  and so have all ghosts together. The oldest ghosts are dropped.
- A touch of a pending key does not move it to the frequent list: it is the same request.
- A failed store leaves no ghost, because no lookup could have found the key.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from kvferry.daemon.core.cache.lru import Keys

if TYPE_CHECKING:
    from kvferry.daemon.core.cache.policy import EvictableFilter


class ARC:
    def __init__(self, capacity: int, keys: Keys | None = None) -> None:
        self._capacity = capacity
        self._target = 0.0
        self._recent: Keys = OrderedDict() if keys is None else keys
        self._frequent: Keys = OrderedDict()
        self._recent_ghosts: Keys = OrderedDict()
        self._frequent_ghosts: Keys = OrderedDict()

    def __iter__(self) -> Iterator[bytes]:
        return chain(self._recent, self._frequent)

    def take_keys(self) -> Keys:
        recent, frequent = self._recent, self._frequent
        if len(recent) > len(frequent):
            recent.update(frequent)
            return recent
        for key in reversed(recent):
            frequent[key] = None
            frequent.move_to_end(key, last=False)
        return frequent

    def key_tables(self) -> tuple[Keys, ...]:
        return self._recent, self._frequent, self._recent_ghosts, self._frequent_ghosts

    def insert_keys(
        self, keys: Sequence[bytes], room: int, evictable: EvictableFilter
    ) -> list[bytes]:
        returning, victims = self._choose_victims(keys, room, evictable)
        for key in victims:
            del (self._recent if key in self._recent else self._frequent)[key]
        for key in reversed(keys):
            (self._frequent if key in returning else self._recent)[key] = None
        self._trim_ghosts()
        return victims

    def touch_keys(self, keys: Sequence[bytes], pending: Container[bytes]) -> None:
        recent, frequent = self._recent, self._frequent
        for key in reversed(keys):
            if key in frequent:
                frequent.move_to_end(key)
            elif key in recent:
                if key in pending:
                    recent.move_to_end(key)
                else:
                    del recent[key]
                    frequent[key] = None

    def remove_keys(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            del (self._recent if key in self._recent else self._frequent)[key]

    def check_integrity(self) -> None:
        recent, frequent = len(self._recent), len(self._frequent)
        ghosts, frequent_ghosts = len(self._recent_ghosts), len(self._frequent_ghosts)
        assert recent + frequent <= self._capacity, "ARC has more keys than the cache has blocks"
        assert recent + ghosts <= self._capacity, "ARC has too many recent ghosts"
        assert ghosts + frequent_ghosts <= self._capacity, "ARC has too many ghosts"
        assert 0 <= self._target <= self._capacity, "the target of ARC exceeds the capacity"
        lists = (self._recent, self._frequent, self._recent_ghosts, self._frequent_ghosts)
        assert len(set().union(*lists)) == sum(map(len, lists)), "a key is in two lists of ARC"

    def _choose_victims(
        self, keys: Sequence[bytes], room: int, evictable: EvictableFilter
    ) -> tuple[set[bytes], list[bytes]]:
        """The keys that return, and the victims: one for each key after the first `room`.

        Moves the target and adds the ghosts. The caller removes the victims from their lists, which
        are being iterated here.
        """
        recent, frequent = evictable(self._recent), evictable(self._frequent)
        recent_first, frequent_first = chain(recent, frequent), chain(frequent, recent)
        size, returning, victims = len(self._recent), set[bytes](), list[bytes]()
        for number, key in enumerate(reversed(keys)):
            was_frequent = key in self._frequent_ghosts
            if was_frequent or key in self._recent_ghosts:
                self._adapt_target(key, was_frequent)
                returning.add(key)
            if number >= room:
                recent_gives = size > self._target or (was_frequent and size == self._target)
                victim = next(recent_first if recent_gives else frequent_first)
                victims.append(victim)
                size -= self._add_ghost(victim)
            size += key not in returning
        return returning, victims

    def _adapt_target(self, key: bytes, was_frequent: bool) -> None:
        """Move the target for a key that returns, and remove its ghost."""
        recent, frequent = len(self._recent_ghosts), len(self._frequent_ghosts)
        if was_frequent:
            self._target = max(0.0, self._target - max(1.0, recent / frequent))
            del self._frequent_ghosts[key]
        else:
            self._target = min(self._capacity, self._target + max(1.0, frequent / recent))
            del self._recent_ghosts[key]

    def _add_ghost(self, key: bytes) -> bool:
        """Add a ghost of a victim. Returns whether it was in the recent list."""
        was_recent = key in self._recent
        (self._recent_ghosts if was_recent else self._frequent_ghosts)[key] = None
        return was_recent

    def _trim_ghosts(self) -> None:
        recent, frequent = self._recent_ghosts, self._frequent_ghosts
        for _ in range(len(self._recent) + len(recent) - self._capacity):
            recent.popitem(last=False)
        for _ in range(len(recent) + len(frequent) - self._capacity):
            frequent.popitem(last=False)
