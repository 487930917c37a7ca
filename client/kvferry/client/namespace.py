"""What a session holds of the namespace that it opened: the mirror, its pins, resets on their way.

While the daemon is away the mirror says MISS for everything, and pins are counted here only: an
engine goes on without offloading, and completes what it began. Whoever comes after that daemon is
told of the pins (a key that is still there is kept again), and of resets that were not done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from kvferry.client.mirror import Mirror
from kvferry.proto.errors import Code, Refused
from kvferry.proto.keys import OffloadKey
from kvferry.proto.messages import KeyEvents, Opened, OpenNamespace, Snapshot
from kvferry.proto.specs import MAX_KEYS, check_keys
from kvferry.proto.status import Fingerprint

_AWAY = -1


class Namespace:
    """opened: as the daemon answered last; before the first answer, a namespace of no blocks."""

    def __init__(self, opening: OpenNamespace, *, mirror: bool = False) -> None:
        self.fingerprint = opening.fingerprint
        about = opening.fingerprint.name, 0, opening.fingerprint.host_block_bytes, False
        self.opened = Opened(0, *about, opening.policy, opening.store_threshold)
        self._mirror: Mirror | None = Mirror() if mirror else None
        self._pins: Counter[OffloadKey] = Counter()
        self._resets: set[int] = set()

    @property
    def mirror(self) -> Mirror:
        """Raises Refused (UNKNOWN_NAMESPACE) where none was asked for."""
        if self._mirror is None:
            message = "this client has no mirror of its namespace: open_namespace(mirror=True)"
            raise Refused(Code.UNKNOWN_NAMESPACE, message, self.opened.name)
        return self._mirror

    @property
    def generation(self) -> int:
        """How often the namespace was made or reset, as far as is known here."""
        told = 0 if self._mirror is None else self._mirror.generation
        return max(self.opened.generation, told)

    @property
    def pinned(self) -> int:
        """How many keys are pinned."""
        return len(self._pins)

    def check_is(self, fingerprint: Fingerprint) -> None:
        """Raise Refused (NAMESPACE_MISMATCH) where this is the namespace of another one."""
        if fingerprint != self.fingerprint:
            message = "a client opens one namespace, and this one has: make another client"
            differences = "; ".join(fingerprint.differences(self.fingerprint))
            raise Refused(Code.NAMESPACE_MISMATCH, message, differences)

    def checked(self, keys: Iterable[OffloadKey]) -> tuple[OffloadKey, ...]:
        """`keys` as they travel; Refused (BAD_KEY) where they are none of this namespace's."""
        keys, size = tuple(keys), self.fingerprint.key_bytes
        if not {bytes}.issuperset(map(type, keys)) or not {size}.issuperset(map(len, keys)):
            wrong = next(key for key in keys if type(key) is not bytes or len(key) != size)
            raise Refused(Code.BAD_KEY, f"a key of this namespace is {size} bytes", wrong)
        if len(keys) > MAX_KEYS:
            check_keys(keys)
        return keys

    def follow(self) -> Mirror:
        """The mirror, made where there is none."""
        if self._mirror is None:
            self._mirror = Mirror()
            if self._resets:
                self._mirror.hide()
        return self._mirror

    def feed(self, message: Snapshot | KeyEvents) -> bool:
        """Tell the mirror, if any; whether it is astray now."""
        return self._mirror is not None and self._mirror.feed(message)

    # Pins

    def pin(self, keys: Iterable[OffloadKey]) -> None:
        self._pins.update(keys)

    def pins(self) -> Iterator[tuple[OffloadKey, ...]]:
        """The pinned keys, each as many times as it is pinned, as they travel."""
        keys = tuple(self._pins.elements())
        for at in range(0, len(keys), MAX_KEYS):
            yield keys[at : at + MAX_KEYS]

    def check_pinned(self, keys: Iterable[OffloadKey]) -> None:
        """Raise Refused (NOT_PINNED) where one of them is not pinned as many times."""
        for key, times in Counter(keys).items():
            if self._pins[key] < times:
                raise Refused(Code.NOT_PINNED, "this client has not pinned a key so often", key)

    def unpin(self, keys: Iterable[OffloadKey]) -> None:
        pins = self._pins
        for key in keys:
            if pins[key] > 1:
                pins[key] -= 1
            else:
                pins.pop(key)

    # Resets

    def reset(self, request_id: int) -> None:
        """A reset was asked for: everything is absent until it is done."""
        self._resets.add(request_id)
        if self._mirror is not None:
            self._mirror.hide()

    def resetting(self, request_id: int) -> bool:
        """Whether that is a reset which is not done."""
        return request_id in self._resets

    def done(self, request_id: int) -> None:
        """A reset was done; where it was the last, the mirror shows what came after it."""
        if self._mirror is not None:
            self._mirror.forget()
        self.refused(request_id)

    def refused(self, request_id: int) -> None:
        """A reset was not done; where it was the last, the mirror shows what is there."""
        self._resets.discard(request_id)
        if not self._resets and self._mirror is not None:
            self._mirror.reveal()

    # The daemon goes, and another comes

    def lose(self) -> None:
        """The daemon is away: as after a reset that is not done."""
        self.reset(_AWAY)

    def opened_again(self, opened: Opened) -> None:
        """Another session is in the namespace; it shows nothing until `show`."""
        self.opened = opened
        if self._mirror is not None:
            self._mirror.restart()

    @property
    def followed(self) -> bool:
        return self._mirror is not None

    def undone(self) -> tuple[int, ...]:
        """Resets that no daemon has done."""
        return tuple(self._resets - {_AWAY})

    def show(self) -> None:
        """The daemon is there again."""
        self.refused(_AWAY)
