"""Requests that were sent, and their replies until a caller takes them.

Most requests can be repeated, so a reply without a caller is dropped. KV caches can be registered
only once. If a call that registers them times out, is cancelled or interrupted, its request is kept
as resumable, because the daemon may have registered them, or will. The next call that registers
with the same arguments takes the reply; with other arguments, the registration is undone first.
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
    """A request that registers KV caches, until a call has its reply.

    arguments: compared with those of the next call; () if the request cannot be resumed.
    memory: keeps alive what the daemon may have mapped. abandoned: no call waits for the reply.
    """

    message: RegisterKVCaches | AllocateKVCaches
    arguments: tuple[object, ...]
    memory: object
    reply: Reply | KVFerryError | None = None
    abandoned: bool = False

    def received(self) -> Reply | None:
        """The reply, or None if there is none yet. Raises an error reply."""
        if isinstance(self.reply, KVFerryError):
            raise self.reply
        return self.reply

    def is_settled(self) -> bool | None:
        """True if no reply needs to be awaited; else None."""
        return self.reply is not None or not self.abandoned or None


class PendingRequests:
    """Requests without a reply, and replies that no caller has taken. Client's thread."""

    def __init__(self) -> None:
        self._pending: set[int] = set()
        self._replies: dict[int, Reply | KVFerryError] = {}
        self._resumable: dict[int, ResumableRequest] = {}

    @contextlib.contextmanager
    def expect_reply(self, message: RequestMessage) -> Iterator[None]:
        """Keep the reply to a request until the context ends."""
        self._pending.add(message.request_id)
        try:
            yield
        finally:
            self._pending.discard(message.request_id)
            self._replies.pop(message.request_id, None)

    @contextlib.contextmanager
    def resume(self, request: ResumableRequest) -> Iterator[None]:
        """Remove the request if the context succeeds; else abandon it, unless it was not sent."""
        request_id = request.message.request_id
        self._resumable[request_id], request.abandoned = request, False
        try:
            yield
        except BaseException as error:
            request.abandoned = True
            timed_out = isinstance(error, Gone) and error.code == Code.TIMEOUT
            if request.reply is None and isinstance(error, KVFerryError) and not timed_out:
                self._resumable.pop(request_id, None)  # it was not sent
            raise
        self._resumable.pop(request_id, None)

    def oldest_abandoned(self) -> ResumableRequest | None:
        """The oldest abandoned request."""
        return next((request for request in self._resumable.values() if request.abandoned), None)

    def resolve(self, request_id: int, reply: Reply | KVFerryError) -> bool:
        """Keep a reply or error for its caller. Returns False if there is no caller."""
        if (request := self._resumable.get(request_id)) is not None:
            request.reply = reply
            if isinstance(reply, KVFerryError):
                del self._resumable[request_id]
        elif request_id in self._pending:
            self._replies[request_id] = reply
        else:
            return False
        return True

    def is_pending(self, request_id: int) -> bool:
        return request_id in self._pending

    def take_reply(self, request_id: int) -> Reply | None:
        """The reply to a request, once; None if there is none yet. Raises an error reply."""
        reply = self._replies.pop(request_id, None)
        if isinstance(reply, KVFerryError):
            raise reply
        return reply

    def fail_all(self, error: Gone) -> None:
        """The connection was lost: all pending requests fail."""
        for request_id in self._pending:
            self._replies.setdefault(request_id, error)
        for request in self._resumable.values():
            request.reply = request.reply or error
        self._resumable.clear()
