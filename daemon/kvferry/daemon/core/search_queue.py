"""The searches below the host pool: which keys the tiers are asked for next.

A search is asked in parts, and the sessions take turns, so that the searches of one do not delay
those of another. A part ends the search if a key of it is in no tier, because only the prefix
counts. Called by Promotions, on the event loop.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import count

from kvferry.daemon.core.namespace import Namespace
from kvferry.daemon.core.tier_actions import MAX_TIER_KEYS, FindKeys, KeysFound
from kvferry.proto.errors import Code, Refused
from kvferry.proto.keys import OffloadKey
from kvferry.proto.messages import FindInTiers

# Parts in flight. The tiers look for one while the event loop handles the answer to another.
MAX_PARTS = 2
# Limits of one session: searches without a reply, and keys in them. A prompt of a million tokens
# has about half as many.
MAX_SEARCHES, MAX_SEARCHED_KEYS = 256, 1 << 17


@dataclass(eq=False, slots=True)
class KeySearch:
    """One search of a session for absent keys.

    keys: that the tiers are asked for; the first `sent` of them were. store, generation: those of
    the namespace at the beginning. parts: in flight.
    """

    session: str
    message: FindInTiers
    namespace: Namespace
    store: str
    generation: int
    keys: tuple[OffloadKey, ...]
    # As in KeysFound.
    tier_of: list[int] = field(init=False)
    sent: int = 0
    parts: int = 0
    ended: bool = False

    def __post_init__(self) -> None:
        self.tier_of = [-1] * len(self.keys)


class SearchQueue:
    """Searches without a reply, of all sessions. `next_parts` follows every other call."""

    def __init__(self) -> None:
        self._numbers = count(1)
        # Searches with keys that were not sent, by session; the session whose turn is next first.
        self._turns: dict[str, deque[KeySearch]] = {}
        # Parts in flight: the search, and the place of the first key.
        self._parts: dict[int, tuple[KeySearch, int]] = {}
        # Searches and keys of each session.
        self._searches, self._keys = Counter[str](), Counter[str]()

    def add(self, search: KeySearch) -> None:
        """Raises Refused (BUSY) if the session has too many searches or keys in them."""
        session, keys = search.session, len(search.keys)
        if self._searches[session] >= MAX_SEARCHES:
            busy = f"{MAX_SEARCHES} searches of this session are in flight; wait for their replies"
            raise Refused(Code.BUSY, busy, MAX_SEARCHES)
        if (total := self._keys[session] + keys) > MAX_SEARCHED_KEYS:
            busy = (
                f"the searches of this session would have {total} keys, more than "
                f"{MAX_SEARCHED_KEYS}; wait for replies"
            )
            raise Refused(Code.BUSY, busy, total)
        self._searches[session] += 1
        self._keys[session] += keys
        self._turns.setdefault(session, deque()).append(search)

    def next_parts(self) -> list[FindKeys]:
        """The parts to send now."""
        parts = list[FindKeys]()
        while self._turns and len(self._parts) < MAX_PARTS:
            session = next(iter(self._turns))
            searches = self._turns.pop(session)
            search, number = searches[0], next(self._numbers)
            keys = search.keys[search.sent : search.sent + MAX_TIER_KEYS]
            self._parts[number] = search, search.sent
            search.sent += len(keys)
            search.parts += 1
            if search.sent == len(search.keys):
                searches.popleft()
            if searches:
                self._turns[session] = searches
            parts.append(FindKeys(number, search.store, keys))
        return parts

    def end_part(self, report: KeysFound) -> KeySearch | None:
        """The tiers have answered. Returns the search if that ends it."""
        search, first = self._parts.pop(report.search, (None, 0))
        if search is None or search.ended:
            return None
        search.parts -= 1
        search.tier_of[first : first + len(report.tier_of)] = report.tier_of
        if -1 in report.tier_of:
            self._drop_unsent(search)
        if search.parts or search.sent < len(search.keys):
            return None
        session = search.session
        self._searches -= Counter({session: 1})  # drops sessions without a search
        self._keys -= Counter({session: len(search.keys)})
        return search

    def close_session(self, session: str) -> None:
        """The searches of a session end without a reply."""
        self._turns.pop(session, None)
        self._searches.pop(session, None)
        self._keys.pop(session, None)
        for search, _ in self._parts.values():
            search.ended |= search.session == session

    def _drop_unsent(self, search: KeySearch) -> None:
        if search.sent < len(search.keys):
            search.sent = len(search.keys)
            searches = self._turns[search.session]
            searches.remove(search)
            if not searches:
                del self._turns[search.session]
