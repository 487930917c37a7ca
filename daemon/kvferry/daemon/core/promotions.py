"""Promotion: copying keys from the tiers below into the host pool, before they are requested.

    FindInTiers -> FindKeys ... KeysFound (perhaps in parts) -> FetchBlocks, TiersFound
    ... BlocksFetched (keys become loadable or absent) ... FetchReleased (blocks are released)

Keys that a sibling has are not promoted, but borrowed (borrowed.py), before any tier is asked.
A prefix is promoted only if reading it is expected to be faster than computing it. If it is not,
and the rate of the tier is not known, some of its last keys are read nevertheless, to measure it:
no request waits for them, as the first keys are absent. Called by the core, on the event loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from kvferry.daemon.core.actions import Action, SendMessage
from kvferry.daemon.core.dispatch import MessageTable, ReportTable
from kvferry.daemon.core.layout import Int64s
from kvferry.daemon.core.namespace import Namespace
from kvferry.daemon.core.namespaces import Namespaces
from kvferry.daemon.core.search_queue import KeySearch, SearchQueue
from kvferry.daemon.core.tier_actions import (
    MAX_TIER_KEYS,
    BlocksFetched,
    FetchBlocks,
    FetchReleased,
    KeysFound,
    TierDescription,
)
from kvferry.proto.keys import Lookup, OffloadKey
from kvferry.proto.messages import FindInTiers, TiersFound

# Limits of the deadline of a promotion, in seconds. If a tier stops answering, one request waits so
# long in vain: a quarter of a second is hardly noticed. On a busy machine processes wait for tenths
# of a second, and that must not turn their reads into misses.
MIN_SECONDS, MAX_SECONDS = 0.25, 2.0
# Promotions write at most this part of a namespace's blocks at the same time, so that stores find
# room. Without a promotion, the prompt is computed and stored, which evicts as many blocks.
PROMOTED_PART = 0.5
# Bytes that are read to measure the rate of a tier.
MEASURED_BYTES = 64 << 20


@dataclass(slots=True)
class _Fetch:
    """Blocks that a tier reads into the pool.

    tier: its index. ended: whether BlocksFetched was reported.
    """

    tier: int
    namespace: Namespace
    keys: tuple[OffloadKey, ...]
    blocks: Int64s
    ended: bool = False


class Promotions:
    """Searches and fetches of keys in the tiers.

    tiers: fastest first.
    """

    def __init__(self, namespaces: Namespaces, tiers: tuple[TierDescription, ...]) -> None:
        self.tiers = tiers
        self._namespaces = namespaces
        self._searches = SearchQueue()
        self._fetches: dict[int, _Fetch] = {}
        self._numbers = count(1)
        # Of each tier, the keys that it has and that are computed instead.
        self._skipped = [0] * len(tiers)

    @property
    def messages(self) -> MessageTable:
        return {FindInTiers: self.find_keys}

    @property
    def reports(self) -> ReportTable:
        return {
            KeysFound: self.handle_found,
            BlocksFetched: self.end_fetch,
            FetchReleased: self.release_fetch,
        }

    def counters(self) -> dict[str, dict[str, float]]:
        """Fields of TierStatus by tier. skipped: keys that are computed faster than read.
        dropped_writes: blocks that were evicted before they were written.
        """
        counts = zip(self.tiers, self._skipped, self._namespaces.unwritten(), strict=True)
        return {
            tier.name: {"skipped": skipped, "dropped_writes": unwritten}
            for tier, skipped, unwritten in counts
        }

    def close_session(self, session: str) -> None:
        """The searches of a session end without a reply."""
        self._searches.close_session(session)

    def find_keys(self, session: str, message: FindInTiers, now: float) -> list[Action]:
        """Ask the tiers for the absent keys, or reply at once. Raises Refused."""
        namespace = self._namespaces.require_namespace(session, message)
        namespace.check_keys(message.keys)
        keys, store = message.keys, namespace.store_name
        if not namespace.is_behind:
            namespace.borrowed.search(namespace.contents, keys, now)
        states = namespace.lookups(keys)
        absent = dict.fromkeys(key for key, state in zip(keys, states, strict=True) if not state)
        if not self.tiers or store is None or not absent or namespace.is_behind:
            return [_resident_reply(namespace, session, message)]
        search = KeySearch(session, message, namespace, store, tuple(absent))
        self._searches.add(search)
        return [*self._searches.next_parts()]

    def handle_found(self, report: KeysFound) -> list[Action]:
        """Send the next part of a search; if this one was the last of its search, reply."""
        search = self._searches.end_part(report)
        promoted = [] if search is None else self._promote_found(search, report)
        return [*self._searches.next_parts(), *promoted]

    def end_fetch(self, report: BlocksFetched) -> list[Action]:
        """Keys that were read become loadable, others absent. The blocks stay held."""
        fetch = self._fetches.get(report.fetch)
        if fetch is None or fetch.ended:
            return []
        fetch.ended = True
        fetch.namespace.cache.tier_access.end_promotion(
            fetch.keys, fetch.blocks, np.array(report.ok, np.bool_), self._written_in(fetch.tier)
        )
        return []

    def release_fetch(self, report: FetchReleased) -> list[Action]:
        """Nothing writes into the blocks any longer. Keys that were not read are absent."""
        fetch = self._fetches.get(report.fetch)
        if fetch is None:
            return []
        if not fetch.ended:
            self.end_fetch(BlocksFetched(report.fetch, (False,) * len(fetch.keys)))
        del self._fetches[report.fetch]
        fetch.namespace.promoting -= fetch.blocks.size
        fetch.namespace.cache.tier_access.release_promotion(fetch.blocks)
        self._namespaces.mark_deserted_if_unused(fetch.namespace)
        return []

    def _promote_found(self, search: KeySearch, report: KeysFound) -> list[Action]:
        """Promote the prefix that was found, if that is worth it, and reply to the search.

        report: the last one, with the newest rates.
        """
        namespace, message = search.namespace, search.message
        if namespace.store_name != search.store or namespace.is_behind:
            return [_resident_reply(namespace, search.session, message)]
        tier_of = dict(zip(search.keys, search.tier_of, strict=True))
        found, gained = _found_prefix(message.keys, namespace.lookups(message.keys), tier_of)
        most = max(1, int(PROMOTED_PART * namespace.region.num_blocks))
        if len(found) > (room := max(0, most - namespace.promoting)):
            found = found[:room]
            gained = room
        estimate = _estimate_seconds(namespace, [tier_of[key] for key in found], report)
        computing = message.compute_seconds * gained if found else 0.0
        seconds = _deadline(estimate, computing)
        skips = 0 < computing <= estimate
        if skips:
            for tier, skipped in Counter(tier_of[key] for key in found).items():
                self._skipped[tier] += skipped
            found, seconds = _measured_keys(namespace, found, tier_of, report), MAX_SECONDS
        blocks = namespace.cache.tier_access.prepare_promotion(found, message.keys)
        found = found[: blocks.size]
        prefix = namespace.count_prefix(message.keys)
        promoted = 0 if skips else len(found)
        reply = TiersFound(message.request_id, prefix, promoted, namespace.is_shared)
        return [
            *self._namespaces.take_key_events(),
            *self._start_fetches(namespace, found, blocks, [tier_of[k] for k in found], seconds),
            SendMessage(search.session, reply),
        ]

    def _written_in(self, tier: int) -> list[int]:
        """The tiers into which blocks that were promoted from this tier are not written."""
        others = [place for place in range(tier) if not self.tiers[place].writes_promoted]
        return [*{*others, tier}]

    def _start_fetches(
        self,
        namespace: Namespace,
        keys: Sequence[OffloadKey],
        blocks: Int64s,
        tiers: Sequence[int],
        seconds: float,
    ) -> list[Action]:
        actions, store = list[Action](), namespace.store_name or ""
        nbytes, region = namespace.fingerprint.host_block_bytes, namespace.region
        namespace.promoting += blocks.size
        for tier in sorted(set(tiers)):
            places = [place for place, one in enumerate(tiers) if one == tier]
            for at in range(0, len(places), MAX_TIER_KEYS):
                part = places[at : at + MAX_TIER_KEYS]
                names, its = tuple(keys[place] for place in part), blocks[part]
                number, offsets = next(self._numbers), region.start + its * nbytes
                self._fetches[number] = _Fetch(tier, namespace, names, its)
                actions.append(FetchBlocks(number, tier, store, names, offsets, nbytes, seconds))
        return actions


def _resident_reply(namespace: Namespace, session: str, message: FindInTiers) -> SendMessage:
    prefix = namespace.count_prefix(message.keys)
    return SendMessage(
        session, TiersFound(message.request_id, prefix, is_shared=namespace.is_shared)
    )


def _found_prefix(
    keys: Sequence[OffloadKey], states: Sequence[Lookup | None], tier_of: dict[OffloadKey, int]
) -> tuple[list[OffloadKey], int]:
    """The keys to promote of the longest prefix that is resident or in a tier. Also the number of
    keys that need not be computed then: from the first of these on, all of the prefix."""
    found, gained = dict[OffloadKey, None](), 0
    for key, state in zip(keys, states, strict=True):
        if state is None and tier_of.get(key, -1) >= 0:
            found[key] = None
        elif state is None or state is Lookup.MISS:
            break
        gained += bool(found)
    return list(found), gained


def _estimate_seconds(namespace: Namespace, tiers: Sequence[int], report: KeysFound) -> float:
    """Seconds until the tiers have read one block for each entry of `tiers`."""
    nbytes, seconds = namespace.fingerprint.host_block_bytes, 0.0
    for tier, number in Counter(tiers).items():
        rate = report.rates[tier]
        reading = number * nbytes / rate if rate > 0 else float("inf")
        seconds = max(seconds, report.queues[tier] + reading)
    return seconds


def _deadline(estimate: float, computing: float) -> float:
    """Seconds that a request may wait for a promotion: not more than computing takes, if known."""
    return min(MAX_SECONDS, max(MIN_SECONDS, min(2 * estimate, computing or MAX_SECONDS)))


def _measured_keys(
    namespace: Namespace,
    found: Sequence[OffloadKey],
    tier_of: dict[OffloadKey, int],
    report: KeysFound,
) -> list[OffloadKey]:
    """Keys to read from the tier of the last key, if its rate is not known: none of the first half
    of those found."""
    tier = tier_of[found[-1]]
    if report.known[tier]:
        return []
    most = max(1, MEASURED_BYTES // namespace.fingerprint.host_block_bytes)
    last = found[(len(found) + 1) // 2 :]
    return [key for key in last if tier_of[key] == tier][-most:]
