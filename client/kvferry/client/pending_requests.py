"""Requests that were sent, and their replies until the caller has taken them. Client's thread.

A reply whose caller has ended, because of a timeout or an interrupt, is dropped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TypeAlias

from kvferry.proto.errors import Gone, KVFerryError
from kvferry.proto.hints import ReleaseRetained
from kvferry.proto.lending import BorrowMemory, MemoryLent
from kvferry.proto.messages import (
    Allocated,
    AllocateKVCaches,
    Done,
    NamespacesReport,
    NamespacesRequest,
    Opened,
    OpenNamespace,
    Pin,
    Pinned,
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
    RegisterKVCaches
    | AllocateKVCaches
    | ReleaseKVCaches
    | ReleaseRetained
    | Wait
    | OpenNamespace
    | Pin
    | Reset
    | StatusRequest
    | NamespacesRequest
    | BorrowMemory
)
Reply: TypeAlias = (
    Registered
    | Allocated
    | Released
    | Waited
    | Opened
    | Pinned
    | Done
    | StatusReport
    | NamespacesReport
    | MemoryLent
)


class PendingRequests:
    """The requests whose callers wait, each with its reply once that has arrived."""

    def __init__(self) -> None:
        self._replies: dict[int | None, Reply | KVFerryError | None] = {}

    @contextlib.contextmanager
    def expect_reply(self, message: RequestMessage) -> Iterator[None]:
        """Keep the reply to a request until the context ends."""
        self._replies[message.request_id] = None
        try:
            yield
        finally:
            del self._replies[message.request_id]

    def resolve(self, request_id: int, reply: Reply | KVFerryError) -> bool:
        """Keep a reply or error for its caller. Returns False if there is no caller."""
        if request_id not in self._replies:
            return False
        self._replies[request_id] = reply
        return True

    def reply(self, request_id: int | None) -> Reply | None:
        """The reply to a request; None if there is none yet. Raises an error reply."""
        reply = self._replies[request_id]
        if isinstance(reply, KVFerryError):
            raise reply
        return reply

    def fail_all(self, error: Gone) -> None:
        """The connection was lost: all requests without a reply fail."""
        for request_id, reply in self._replies.items():
            if reply is None:
                self._replies[request_id] = error
