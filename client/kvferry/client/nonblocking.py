"""The verbs that never wait, shared by both clients."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from kvferry.client.comeback import Comeback
from kvferry.client.connection import Connection
from kvferry.client.conversation import Conversation, Place
from kvferry.client.endpoint import check_open, find_daemon, named
from kvferry.client.jobs import TransferResult
from kvferry.client.namespace import Namespace
from kvferry.proto.errors import Code, Gone, Refused
from kvferry.proto.keys import Lookup, OffloadKey
from kvferry.proto.memory import HostRegion
from kvferry.proto.messages import ClientMessage, Pin, Touch, Unpin, Welcome
from kvferry.proto.specs import TransferSpec

if TYPE_CHECKING:
    import torch

    from kvferry.client.tensors.canonical import CanonicalKVCaches

KVCaches: TypeAlias = (
    "CanonicalKVCaches | Mapping[str, torch.Tensor] | Mapping[str, Sequence[torch.Tensor]]"
)

ALIVE_EVERY = 0.02
"""Seconds between looks, while polling, at whether the daemon is still there."""
FRESH = 200e-6
"""Seconds that a lookup does without a look at what has arrived."""


class NonBlocking:
    def __init__(
        self, directory: Path | str | None, engine: str, client: str, reconnect: bool
    ) -> None:
        place = named(Path(directory)) if directory else find_daemon()
        check_open(place)
        self._connection = Connection(place)
        self._conversation = Conversation(engine, client, lasting=reconnect)
        self._comeback = Comeback(self._conversation, self.directory, self._reopen, self._send)
        self._next_look = 0.0
        self._stale_at = 0.0
        _clients.add(self)

    @property
    def directory(self) -> Path:
        return self._connection.directory

    @property
    def engine(self) -> str:
        return self._conversation.engine

    @property
    def daemon(self) -> Welcome:
        """Who the daemon is, and what it allows."""
        assert self._conversation.welcome is not None
        return self._conversation.welcome

    @property
    def connected(self) -> bool:
        """Whether the daemon is there, as far as is known, and all is had of it that was asked."""
        return self._conversation.place is Place.HERE

    @property
    def connecting(self) -> bool:
        """Whether the daemon is away, and it is tried to come back to it."""
        return self.gone is not None and not self._conversation.for_good

    @property
    def gone(self) -> Gone | None:
        """Why the daemon is not there, once that is known; None again when it is back.

        Where one is there that does not take us back, its own error is the `__cause__`.
        """
        return self._conversation.gone

    @property
    def incarnation(self) -> int:
        """1, and one more each time that a daemon came back and all was had of it again.

        Host blocks by number may have lost their bytes then: where `region.reattached` is false,
        and for who registered nothing where it is another daemon. Loads from those that were not
        stored to since are refused (STALE).
        """
        return self._conversation.incarnation

    @property
    def region(self) -> HostRegion | None:
        """The engine's part of the host pool, as told last; None where this client has none."""
        return self._conversation.standing.region

    @property
    def namespace(self) -> Namespace:
        """The namespace that was opened; Refused (UNKNOWN_NAMESPACE) where none was."""
        return self._conversation.namespace

    def transfer_async(self, job_id: int, spec: TransferSpec, wait_for: int = 0) -> None:
        """Submit a transfer and return at once; how it ended comes from get_finished.

        spec: (source, destination). wait_for: the value of the engine's timeline that must be
        reached first; 0 for none. Raises Refused where this side can tell that the job cannot be
        accepted (BAD_SPEC, BAD_KEY, DUPLICATE_JOB, BUSY, STALE, MESSAGE_TOO_LARGE) and Gone while
        the daemon is known to be away; the daemon's own refusal comes as the job's result.
        """
        if self._conversation.gone is not None:
            self._come_back()
        data = self._conversation.submit(job_id, spec, wait_for)
        self._send(data)
        self._conversation.submitted(job_id, spec)

    def get_finished(self) -> list[TransferResult]:
        """Results that are here and were not fetched yet: each once, in order per direction."""
        self._take_in()
        self._look_now_and_then(time.monotonic())
        return self._conversation.jobs.results()

    def cancel(self, job_ids: Collection[int]) -> None:
        """Give jobs up; each still ends once, as cancelled, or done where it was too late."""
        self._send(self._conversation.cancel(job_ids))

    def lookup(self, key: OffloadKey) -> Lookup:
        """What the mirror knows of a key, from what arrived no more than 0.2 ms ago.

        HIT: it can be loaded; it may still go before it is, unless it is pinned: the load fails
        then, and is a miss. RETRY while the mirror is not whole. MISS for everything while the
        daemon is away, and from a reset on until it is done. Raises Refused (UNKNOWN_NAMESPACE)
        where no namespace with a mirror was opened.
        """
        now = time.monotonic()
        if now > self._stale_at:
            self._freshen(now)
        return self._conversation.namespace.mirror.lookup(key)

    def poll(self) -> None:
        """Take in what has arrived; get_finished and lookup do it too."""
        self._freshen(time.monotonic())

    def pin(self, keys: Iterable[OffloadKey]) -> None:
        """Keep keys that are there until `unpin`, as many times as pinned, or until we are gone.

        A daemon that comes back is told of all pins, and keeps again those keys that it has.
        Raises Refused (BAD_KEY, UNKNOWN_NAMESPACE); so do unpin and touch. None of the three needs
        the daemon to be there.
        """
        namespace = self._conversation.namespace
        keys = namespace.checked(keys)
        self._tell(Pin(keys))
        namespace.pin(keys)

    def unpin(self, keys: Iterable[OffloadKey]) -> None:
        """Let keys go again. Refused (NOT_PINNED) where one is not pinned: then none is let go."""
        namespace = self._conversation.namespace
        keys = namespace.checked(keys)
        namespace.check_pinned(keys)
        self._tell(Unpin(keys))
        namespace.unpin(keys)

    def touch(self, keys: Iterable[OffloadKey], hits: int = 0, misses: int = 0) -> None:
        """These were of use: the first becomes the most recent.

        hits, misses: lookups since this was last said, for the daemon's statistics.
        """
        self._tell(Touch(self._conversation.namespace.checked(keys), hits, misses))

    def reset_async(self) -> None:
        """As `reset`, without waiting: everything is absent here at once, there soon.

        A daemon that is away does it when it comes back. Where the daemon refuses it, everything
        stays absent here, and the next call that takes messages in raises why. Raises Gone where
        none will come back.
        """
        request = self._conversation.reset()
        if not self.connecting:
            self._send(self._conversation.request(request))

    def _tell(self, message: ClientMessage) -> None:
        """Send what needs no answer, where anybody is there to hear it."""
        if self._conversation.gone is None:
            self._send(self._conversation.request(message))

    def _send(self, data: bytes) -> None:
        self._connection.send(data)

    def _drain(self) -> None:
        self._take_in()
        self._look()

    def _take_in(self) -> bool:
        """Take in what has arrived; whether that was anything. Raises Gone once we were closed."""
        if self._connection.closed and self._conversation.gone is not None:
            raise self._conversation.gone.with_traceback(None)
        news = self._connection.drain(self._conversation.feed)
        if news and (follow := self._conversation.astray()):
            self._send(follow)
        if self._conversation.gone is not None:
            self._come_back()
        return news

    def _freshen(self, now: float) -> None:
        self._stale_at = now + FRESH
        if not self._conversation.for_good:
            self._take_in()
            self._look_now_and_then(now)

    def _look_now_and_then(self, now: float) -> None:
        if now > self._next_look:
            self._next_look = now + ALIVE_EVERY
            self._look()

    def _look(self) -> None:
        """Notice that the daemon went; what it said before counts."""
        try:
            self._connection.check_alive()
        except Gone as error:
            if self._conversation.linked:
                self._connection.drain(self._conversation.feed)
                self._conversation.lose(error)
        except Refused as error:  # whoever waits to be greeted is told
            self._conversation.not_admitted(error)

    # Coming back

    def _come_back(self) -> None:
        """Do what can be done at once to have a daemon that is away again."""
        if not self._conversation.for_good:
            self._comeback.go_on(time.monotonic())

    def _reopen(self) -> None:
        self._connection.reopen()

    def _leave(self) -> None:
        """Have no daemon again."""
        self._conversation.leave()
        self._comeback.close()

    def _hang_up(self) -> None:
        heard = self._conversation.gone is None
        self._connection.close(heard=heard)
        self._end("this client was closed")

    def _disown(self) -> None:
        """In a fork's child: the session and the socket are those of our parent."""
        self._connection.closed = True
        self._end("this client was made before a fork, by the parent: make one in the child")

    def _end(self, why: str) -> None:
        self._conversation.end(Gone(Code.DAEMON_GONE, why, str(self.directory)))


_clients: weakref.WeakSet[NonBlocking] = weakref.WeakSet()


def _disown_all() -> None:
    for client in _clients:
        client._disown()


os.register_at_fork(after_in_child=_disown_all)
