"""Messages between siblings: a daemon loads blocks from the pool of another one of its host.

    BorrowMemory      ->
                      <-   MemoryLent | Error
    Uses              ->

The sender is a client of its sibling: they are messages of a session (messages.py).
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta

from kvferry.proto.message import Message
from kvferry.proto.specs import Count, Id, Key, Name

# Keys of one Uses, and handles of one MemoryLent.
MAX_USES, MAX_LENT_CHUNKS = 1024, 64
Word: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
# Bytes that name a page of epochs.
PAGE_IDENTITY_BYTES = 16


class BorrowMemory(Message):
    """Request the memory of a namespace. Creates none.

    composition: of its host blocks; another one has no exchangeable blocks. first: number of the
        first chunk of the pool to lend; None: lend nothing, and describe the region.
    """

    request_id: Id
    namespace: Name
    composition: Word
    first: Count | None = None


class Uses(Message):
    """The sender has found or loaded these keys of a namespace. They count as used."""

    namespace: Name
    keys: Annotated[tuple[Key, ...], Meta(max_length=MAX_USES)]


class MemoryLent(Message):
    """The region of a namespace, and descriptors of it, which can only be read.

    region: a number that no other region has; 0: there is none with these blocks. The same number
        after a restart: it is the same memory. start: of the region, in bytes in the pool. All
        chunks of the pool but the last have `chunk_bytes`; those from `first` to `end` - 1 have a
        part of the region.
    handles: of chunks, from the requested one on; there may be more chunks. table, page: handles of
        the block table and of the pool's incarnation page; with chunk `first` only.
    keys: loadable ones. is_kept: whether the memory stays the same over a restart. page_identity:
        of the page of epochs that the daemon uses; empty: it has none.
    """

    request_id: Id
    region: Word = 0
    chunk_bytes: Count = 0
    start: Count = 0
    first: Count = 0
    end: Count = 0
    handles: Annotated[tuple[Id, ...], Meta(max_length=MAX_LENT_CHUNKS)] = ()
    table: Id | None = None
    page: Id | None = None
    keys: Count = 0
    is_kept: bool = False
    page_identity: Annotated[bytes, Meta(max_length=PAGE_IDENTITY_BYTES)] = b""


LendingMessage: TypeAlias = BorrowMemory | Uses
LendingReply: TypeAlias = MemoryLent
