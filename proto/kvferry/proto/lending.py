"""Messages between siblings: a daemon copies the blocks of another daemon of its host.

    BorrowNamespace   ->
                      <-   NamespaceLent | Error; perhaps Snapshot, KeyEvents
    BorrowPool        ->
                      <-   PoolLent | Error
    LocateBlocks      ->
                      <-   BlocksLocated | Error
    ResetLent         ->
                      <-   Done | Error

The sender is a client of its sibling: they are messages of a session (messages.py).
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta

from kvferry.proto.message import Message
from kvferry.proto.specs import MAX_COUNT, Count, Id, Key, Name, Positive

# Keys of one LocateBlocks, handles of one PoolLent, and offsets of blocks without a place.
MAX_LOCATED, MAX_LENT_CHUNKS = 1024, 64
ABSENT, UNCOMMITTED = -1, -2
Checksum: TypeAlias = Annotated[int, Meta(ge=0)]
Offset: TypeAlias = Annotated[int, Meta(ge=UNCOMMITTED, lt=MAX_COUNT)]
# Far below MAX_COUNT: a sibling chooses it, and the daemon's later resets raise it further.
Generation: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 40)]


class BorrowNamespace(Message):
    """Find a namespace whose blocks the sender, a sibling, wants to copy. Creates none.

    store: name of the namespace and of the composition of its host blocks (Namespace.store_name).
    generation: of the sibling's namespace; one that is behind has missed a reset, and is reset.
    If the session did not borrow this namespace before, or `snapshot` is set, a Snapshot and
    KeyEvents follow the reply.
    """

    request_id: Id
    store: Name
    generation: Generation
    snapshot: bool = False


class BorrowPool(Message):
    """Request the pool's chunks with the borrowed namespace, from chunk `first` on."""

    request_id: Id
    first: Count = 0


class LocateBlocks(Message):
    """Request where the blocks of keys of the borrowed namespace are. Marks them as used."""

    request_id: Id
    keys: Annotated[tuple[Key, ...], Meta(max_length=MAX_LOCATED)]


class ResetLent(Message):
    """Reset the borrowed namespace because the sibling has reset its own. The daemon does not pass
    it on to its siblings."""

    request_id: Id


class NamespaceLent(Message):
    """generation: of the namespace; 0: there is none with this name and composition."""

    request_id: Id
    generation: Count


class PoolLent(Message):
    """Handles of the pool's chunks from number `first` on; their descriptors can only be read.

    All chunks of the pool but the last have `chunk_bytes`. end: after the last chunk with a part of
    the namespace; there may be more chunks than handles. start: of the namespace, in bytes in the
    pool, in the first chunk that is lent. table: handle of its block table, whose versions show
    whether a block has changed; None if it is in no file. page: handle of a page that begins with
    the pool's incarnation, a uint64, which is `incarnation` as long as this daemon has the pool:
    a later daemon changes it before anything writes to the pool. table, page: with `first` only.
    """

    request_id: Id
    chunk_bytes: Positive
    first: Count
    end: Count
    handles: Annotated[tuple[Id, ...], Meta(max_length=MAX_LENT_CHUNKS)]
    start: Count = 0
    table: Id | None = None
    page: Id | None = None
    incarnation: Count = 0


class BlocksLocated(Message):
    """Where the blocks of LocateBlocks are, as of now: nothing holds them.

    offsets: in bytes in the pool; ABSENT, or UNCOMMITTED if the checksum is not computed yet.
    checksums: XXH3 of each block's bytes, seeded with that of its key. versions: in the block
        table. After a copy, the bytes are those of the block only if they have this checksum, or if
        the block table still has this version and the pool its incarnation.
    """

    request_id: Id
    offsets: Annotated[tuple[Offset, ...], Meta(max_length=MAX_LOCATED)]
    checksums: Annotated[tuple[Checksum, ...], Meta(max_length=MAX_LOCATED)]
    versions: Annotated[tuple[Count, ...], Meta(max_length=MAX_LOCATED)] = ()


LendingRequest: TypeAlias = BorrowNamespace | BorrowPool | LocateBlocks | ResetLent
LendingReply: TypeAlias = NamespaceLent | PoolLent | BlocksLocated
