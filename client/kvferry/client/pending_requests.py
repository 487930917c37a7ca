"""Requests sent to the daemon, and its replies until they are taken.

Most requests may be repeated at will: a reply that nobody waits for is dropped. KV caches are
registered once. A caller that asks for that and times out, is cancelled or interrupted leaves a
resumable request, because the daemon may have registered them, or will. The next caller that
registers settles it: with the same arguments it takes the reply, with others the daemon undoes it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from kvferry.proto.errors import Code, Gone, KVFerryError
from kvferry.proto.messages import (
    Allocated,
    AllocateKVCaches,
    Done,
    NamespacesReport,
    NamespacesRequest,
    Opened,
    OpenNamespace,
    Registered,
    RegisterKVCaches,
    Released,
    ReleaseKVCaches,
    Reset,
    StatusReport,
    StatusRequest,
    Wait,
    Waited,
)

RequestMessage: TypeAlias = (
    ReleaseKVCaches | Wait | OpenNamespace | Reset | StatusRequest | NamespacesRequest
)
Reply: TypeAlias = (
    Registered | Allocated | Released | Waited | Opened | Done | StatusReport | NamespacesReport
)


@dataclass(slots=True, eq=False)
class ResumableRequest:
    """what: the arguments, compared with those of the next caller; () if it cannot be resumed.
    memory: what the daemon may map of ours, kept alive. left: nobody waits for it."""

    message: RegisterKVCaches | AllocateKVCaches
    what: tuple[object, ...]
    memory: object
    reply: Reply | KVFerryError | None = None
    left: bool = False

    def received(self) -> Reply | None:
        """The reply, once it is here. Raises the error that came instead."""
        if isinstance(self.reply, KVFerryError):
            raise self.reply
        return self.reply

    def settled(self) -> bool | None:
        """True if there is nothing to wait for; else None."""
        return self.reply is not None or not self.left or None


class PendingRequests:
    def __init__(self) -> None:
        self._pending: set[int] = set()
        self._replies: dict[int, Reply | KVFerryError] = {}
        self._resumable: dict[int, ResumableRequest] = {}

    @contextlib.contextmanager
    def requesting(self, message: RequestMessage) -> Iterator[None]:
        """Keep the reply to a request while this lasts."""
        self._pending.add(message.request_id)
        try:
            yield
        finally:
            self._pending.discard(message.request_id)
            self._replies.pop(message.request_id, None)

    @contextlib.contextmanager
    def resuming(self, request: ResumableRequest) -> Iterator[None]:
        """The request is settled if this succeeds; else it is left, unless it was never sent."""
        request_id = request.message.request_id
        self._resumable[request_id], request.left = request, False
        try:
            yield
        except BaseException as error:
            request.left = True
            timed_out = isinstance(error, Gone) and error.code == Code.TIMEOUT
            if request.reply is None and isinstance(error, KVFerryError) and not timed_out:
                self._resumable.pop(request_id, None)  # it was not sent
            raise
        self._resumable.pop(request_id, None)

    def oldest_left(self) -> ResumableRequest | None:
        """The oldest request that nobody waits for."""
        return next((request for request in self._resumable.values() if request.left), None)

    def resolve(self, request_id: int, answer: Reply | KVFerryError) -> bool:
        """Keep a reply, or an error instead of it. Returns whether anybody waits for it."""
        if (request := self._resumable.get(request_id)) is not None:
            request.reply = answer
            if isinstance(answer, KVFerryError):
                del self._resumable[request_id]
        elif request_id in self._pending:
            self._replies[request_id] = answer
        else:
            return False
        return True

    def is_pending(self, request_id: int) -> bool:
        return request_id in self._pending

    def take(self, request_id: int) -> Reply | None:
        """The reply to a request, once. Raises the error that came instead."""
        answer = self._replies.pop(request_id, None)
        if isinstance(answer, KVFerryError):
            raise answer
        return answer

    def lose(self, error: Gone) -> None:
        """The daemon is gone: all pending requests fail."""
        for request_id in self._pending:
            self._replies.setdefault(request_id, error)
        for request in self._resumable.values():
            request.reply = request.reply or error
        self._resumable.clear()
