"""The namespace that a session has opened: its mirror, pins and pending resets.

While the daemon is disconnected, every lookup is a MISS and pins are counted here only, so that an
engine continues without offloading. Reconnecting sends the pins again (keys that the daemon still
has are pinned), and the resets that were not done. Called in the client's thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvferry.client.mirror import MISS, RETRY, Mirror
from kvferry.client.retentions import Retention, Retentions
from kvferry.client.session_state import SessionState
from kvferry.client.splitting import key_batches
from kvferry.client.tier_searches import SEARCH_TIMEOUT, TierSearch, TierSearches
from kvferry.client.validation import check_fields
from kvferry.client.wire import Wire
from kvferry.proto.codec import encode
from kvferry.proto.errors import Code, Refused
from kvferry.proto.fingerprint import Fingerprint
from kvferry.proto.hints import Retain, Retained
from kvferry.proto.keys import Lookup, OffloadKey
from kvferry.proto.messages import (
    Done,
    FindInTiers,
    KeyEvents,
    Opened,
    OpenNamespace,
    Reset,
    Snapshot,
    Subscribe,
    TiersFound,
)

# In place of a request id: while disconnected, keys are hidden as during a reset.
_DISCONNECTED = -1


class ClientNamespace:
    """The state of an opened namespace.

    opened: the daemon's last reply; before the first one, a namespace without blocks.
    """

    def __init__(self, opening: OpenNamespace, *, mirror: bool = False) -> None:
        self.fingerprint = opening.fingerprint
        name, block_bytes = opening.fingerprint.name, opening.fingerprint.host_block_bytes
        self.opened = Opened(
            0, name, 0, block_bytes, False, opening.policy, opening.store_threshold
        )
        self._mirror: Mirror | None = Mirror() if mirror else None
        self._pins: Counter[OffloadKey] = Counter()
        # Labels of the resets that are not done, by request id.
        self._resets: dict[int, str] = {}
        self._epoch = 0
        # The epoch after the last reset of this client.
        self.reset_epoch = 0
        # The shared tiers that it has not reached.
        self.unpublished: tuple[str, ...] = ()
        self.tier_searches = TierSearches()
        self.retentions = Retentions()
        # See TiersFound.
        self.is_shared = False

    @property
    def mirror(self) -> Mirror:
        """Raises Refused (UNKNOWN_NAMESPACE) if the namespace was opened without a mirror."""
        if self._mirror is None:
            message = "this client has no mirror; call open_namespace(mirror=True)"
            raise Refused(Code.UNKNOWN_NAMESPACE, message, self.opened.name)
        return self._mirror

    @property
    def host_bytes(self) -> int:
        """Bytes of the host pool in its blocks; 0 before the first reply."""
        return self.opened.num_blocks * self.opened.block_bytes

    @property
    def shortfall(self) -> str:
        """Why the daemon gave fewer bytes than were asked for (without `cpu_bytes_to_use`: than the
        whole pool), and what to change. Empty if it did not."""
        return self.opened.shortfall

    @property
    def epoch(self) -> int:
        """Of the namespace's contents, as far as the client knows: another one after each reset."""
        return self._epoch if self._mirror is None else self._mirror.epoch

    @property
    def pinned(self) -> int:
        """How many keys are pinned."""
        return len(self._pins)

    def check_fingerprint(self, fingerprint: Fingerprint) -> None:
        """Raise Refused (NAMESPACE_MISMATCH) if this namespace has another fingerprint."""
        if fingerprint != self.fingerprint:
            message = "this client has opened another namespace; use another client"
            differences = "; ".join(fingerprint.differences(self.fingerprint))
            raise Refused(Code.NAMESPACE_MISMATCH, message, differences)

    def checked_keys(self, keys: Iterable[OffloadKey]) -> tuple[OffloadKey, ...]:
        """`keys` as a tuple. Raises Refused (BAD_KEY) for keys of another length."""
        keys, size = tuple(keys), self.fingerprint.key_bytes
        if not {bytes}.issuperset(map(type, keys)) or not {size}.issuperset(map(len, keys)):
            wrong = next(key for key in keys if type(key) is not bytes or len(key) != size)
            raise Refused(Code.BAD_KEY, f"keys of this namespace have {size} bytes", wrong)
        return keys

    def ensure_mirror(self) -> Mirror:
        """The mirror, created if there is none."""
        if self._mirror is None:
            self._mirror = Mirror()
            if self._resets:
                self._mirror.hide()
        return self._mirror

    def lookup(self, key: OffloadKey, now: float) -> Lookup:
        """Look a key up in the mirror; RETRY if the daemon is searching for it below the pool."""
        found = self.mirror.lookup(key)
        if found is MISS and not self._resets and self.tier_searches.is_searched(key, now):
            return RETRY
        return found

    def apply_message(self, message: Snapshot | KeyEvents) -> bool:
        """Pass a message to the mirror, if any. True if the mirror needs a new snapshot."""
        return self._mirror is not None and self._mirror.apply_message(message)

    # Pins

    def pin(self, keys: Iterable[OffloadKey]) -> None:
        """Count pins that were sent, or will be when the client is connected."""
        self._pins.update(keys)

    def pinned_batches(self) -> list[tuple[OffloadKey, ...]]:
        """The pinned keys, each as often as it is pinned, in batches of a message each."""
        return key_batches(tuple(self._pins.elements())) if self._pins else []

    def check_pinned(self, keys: Iterable[OffloadKey]) -> None:
        """Raise Refused (NOT_PINNED) if a key occurs more often in `keys` than it is pinned."""
        for key, times in Counter(keys).items():
            if self._pins[key] < times:
                raise Refused(
                    Code.NOT_PINNED, "a key is unpinned more often than it was pinned", key
                )

    def unpin(self, keys: Iterable[OffloadKey]) -> None:
        """Remove pins; `check_pinned` must have passed."""
        pins = self._pins
        for key in keys:
            if pins[key] > 1:
                pins[key] -= 1
            else:
                pins.pop(key)

    # Resets

    def reset(self, request_id: int, label: str = "") -> None:
        """A reset is requested: all keys are hidden until it is done."""
        self._resets[request_id] = label
        if self._mirror is not None:
            self._mirror.hide()

    def is_resetting(self, request_id: int) -> bool:
        """Whether this reset is pending."""
        return request_id in self._resets

    def reset_done(self, done: Done) -> None:
        """A reset was done. After the last reset, keys stored since then are
        visible."""
        self._epoch = self.reset_epoch = done.epoch
        self.unpublished = done.unpublished
        if self._mirror is not None:
            self._mirror.clear_after_reset(done.epoch)
        self.reset_ended(done.request_id)

    def reset_ended(self, request_id: int) -> None:
        """A reset is no longer pending. After the last one, keys are visible again."""
        self._resets.pop(request_id, None)
        if not self._resets and self._mirror is not None:
            self._mirror.reveal()

    # Disconnecting and reconnecting

    def connection_lost(self) -> None:
        """Hide all keys until the session is restored."""
        self.tier_searches.end_all()
        self.retentions.end_all()
        self.reset(_DISCONNECTED)

    def reopened(self, opened: Opened) -> None:
        """Another session has opened the namespace. Keys stay hidden until it is restored."""
        self.opened, self._epoch = opened, opened.epoch
        if self._mirror is not None:
            self._mirror.restart()

    @property
    def has_mirror(self) -> bool:
        return self._mirror is not None

    def pending_resets(self) -> dict[int, str]:
        """Labels of the resets that no daemon has done, by request id."""
        return {number: text for number, text in self._resets.items() if number != _DISCONNECTED}

    def session_restored(self) -> None:
        """Show the mirror's keys again, unless a reset is pending."""
        self.reset_ended(_DISCONNECTED)


class OpenedNamespace:
    """The namespace of a session, if it has opened one: its requests, and what arrives of it.

    restore: has the one that reconnecting opens again.
    """

    def __init__(self, wire: Wire, restore: SessionState) -> None:
        self._wire, self._restore = wire, restore
        opening = restore.opening
        # None before a namespace was opened.
        self.if_open = ClientNamespace(opening, mirror=restore.mirror) if opening else None
        self._snapshot_needed = False

    @property
    def namespace(self) -> ClientNamespace:
        """Raises Refused (UNKNOWN_NAMESPACE) if none was opened."""
        if self.if_open is None:
            message = "this client has opened no namespace; call open_namespace first"
            raise Refused(Code.UNKNOWN_NAMESPACE, message)
        return self.if_open

    def find(self, fingerprint: Fingerprint) -> Opened | None:
        """The opened namespace, or None. Raises Refused (NAMESPACE_MISMATCH) for another one."""
        if self.if_open is None:
            return None
        self.if_open.check_fingerprint(fingerprint)
        return self.if_open.opened

    def daemon_opened(self, opening: OpenNamespace, opened: Opened) -> None:
        """The daemon has opened a namespace, for the first time or after reconnecting."""
        if self.if_open is None:
            self.if_open = ClientNamespace(opening)
            self._restore.opening = opening
        self.if_open.reopened(opened)

    def mirror_complete(self) -> bool:
        """Whether the mirror is complete. Raises Gone if not connected."""
        if self._wire.gone is not None:
            raise self._wire.gone.with_traceback(None)
        return self.namespace.mirror.complete

    def check_region(self, host_bytes: int | None) -> None:
        """Raise Refused (BAD_LAYOUT) if a region is requested by a client with a namespace."""
        if self.if_open is not None and host_bytes is not None:
            message = (
                "an engine in a namespace has no host region of its own; leave host_bytes out, and "
                "pass cpu_bytes_to_use to open_namespace"
            )
            raise Refused(Code.BAD_LAYOUT, message, host_bytes)

    # Requests

    def reset(self, label: str = "") -> Reset:
        """The request to remove all keys. Every key is a MISS until it is done. label: see Reset.

        Raises Refused (UNKNOWN_NAMESPACE, BAD_MESSAGE).
        """
        check_fields(Reset, label=label)
        message = Reset(self._wire.next_request_id(), label)
        self.namespace.reset(message.request_id, label)
        return message

    def find_in_tiers(self, search: TierSearch, now: float) -> bytes:
        """Encode the request for the next part of a search. now: time.monotonic() in seconds."""
        number = self._wire.next_request_id()
        data = self._wire.request(FindInTiers(number, search.part, search.compute_seconds))
        search.deadline = now + SEARCH_TIMEOUT
        self.namespace.tier_searches.begin(number, search)
        return data

    def retain(
        self, retention: Retention, keys: tuple[OffloadKey, ...], seconds: float, label: str
    ) -> Retain:
        """The request to retain a part of the keys of a retention."""
        message = Retain(self._wire.next_request_id(), keys, seconds, label)
        self.namespace.retentions.begin(message.request_id, retention, len(keys))
        return message

    def follow_ups(self, now: float) -> list[bytes]:
        """The messages that the received ones require, once.

        These are a Subscribe if the mirror has missed an event, and the next parts of searches.
        now: time.monotonic() in seconds.
        """
        if self.if_open is None:
            return []
        needed = self._snapshot_needed and self._wire.has_socket
        messages = [encode(Subscribe())] if needed else []
        self._snapshot_needed = False
        continuing = self.if_open.tier_searches.take_continuing()
        return messages + [self.find_in_tiers(search, now) for search in continuing]

    # What happens to the session

    def request_refused(self, request_id: int) -> bool:
        """A search or a retain that is refused has ended. Returns whether the request is a reset,
        which may have no caller."""
        if self.if_open is None:
            return False
        self.if_open.tier_searches.end(request_id)
        self.if_open.retentions.answer(request_id, 0, 0, 0)
        return self.if_open.is_resetting(request_id)

    def session_restored(self) -> None:
        if self.if_open is not None:
            self.if_open.session_restored()

    def connection_lost(self) -> None:
        """Hide all keys until the session is restored."""
        if self.if_open is not None:
            self.if_open.connection_lost()

    def receive(self, message: Snapshot | KeyEvents | TiersFound | Retained | Done) -> None:
        match message:
            case Retained(request_id, kept, missing, clipped):
                self.namespace.retentions.answer(request_id, kept, missing, clipped)
            case Snapshot() | KeyEvents():
                if self.if_open is not None and self.if_open.apply_message(message):
                    self._snapshot_needed = True
            case TiersFound(request_id, prefix, promoted, is_shared):
                self.namespace.is_shared = is_shared
                self.namespace.tier_searches.answer(request_id, prefix, promoted)
            case Done(request_id):
                if self.if_open is not None and self.if_open.is_resetting(request_id):
                    self.if_open.reset_done(message)
