"""Lending: siblings, the other daemons of the host, copy blocks of this daemon's namespaces.

    BorrowNamespace -> NamespaceLent, and once Snapshot and KeyEvents    which keys there are
    BorrowPool      -> PoolLent                                          the memory, to be read only
    LocateBlocks    -> BlocksLocated                                     offsets and checksums
    ResetLent       -> Done                                              the sibling was reset

Nothing is held for a sibling: it copies the bytes, and then compares the checksum, which is seeded
with the key, or the block's version. If a block is evicted, reset or overwritten meanwhile, that is
a miss. So a sibling that dies or misbehaves leaves nothing behind, and cannot keep a block or a
region in use.

Two daemons exchange blocks only while their namespaces have the same generation. Called by the
core, on the event loop.
"""

from __future__ import annotations

import numpy as np

from kvferry.daemon.core.actions import Action, SendMessage, SendStream
from kvferry.daemon.core.block_table import COMMITTED
from kvferry.daemon.core.namespace import Namespace
from kvferry.daemon.core.namespaces import Namespaces
from kvferry.daemon.core.promotions import Promotions
from kvferry.daemon.core.tier_actions import LendPool
from kvferry.proto.errors import Code, Refused
from kvferry.proto.lending import (
    ABSENT,
    UNCOMMITTED,
    BlocksLocated,
    BorrowNamespace,
    BorrowPool,
    LendingRequest,
    LocateBlocks,
    NamespaceLent,
    ResetLent,
)


class Lending:
    """The namespaces that siblings borrow.

    located: number of blocks in the replies to LocateBlocks.
    """

    def __init__(self, namespaces: Namespaces, promotions: Promotions) -> None:
        self.located = 0
        self._namespaces, self._promotions = namespaces, promotions
        self._enabled = False
        # The namespace of each sibling's session.
        self._borrowed: dict[str, Namespace] = {}

    def handle(self, session: str, message: LendingRequest) -> list[Action]:
        """Handle a message of a sibling. Raises Refused."""
        if not self._enabled:
            text = "this daemon lends no blocks; set siblings.enabled = true in its configuration"
            raise Refused(Code.FORBIDDEN, text, "siblings.enabled")
        if isinstance(message, BorrowNamespace):
            return self._lend_namespace(session, message)
        namespace = self._borrowed.get(session)
        if namespace is None or self._namespaces.find_namespace(namespace.name) is not namespace:
            kind = type(message).__name__
            text = f"{kind} needs a borrowed namespace, but this session has none; borrow one first"
            raise Refused(Code.UNKNOWN_NAMESPACE, text, kind)
        match message:
            case BorrowPool(request_id, first):
                region = namespace.region
                owner = region.owner
                return [LendPool(session, request_id, region.start, region.end, first, owner)]
            case LocateBlocks():
                return [self._locate(session, namespace, message)]
            case ResetLent(request_id):
                return self._promotions.reset_for_sibling(
                    namespace, session=session, request_id=request_id
                )

    def close_session(self, session: str) -> None:
        namespace = self._borrowed.pop(session, None)
        if namespace is not None:
            namespace.borrowers.discard(session)
            namespace.subscribers.discard(session)

    def _lend_namespace(self, session: str, message: BorrowNamespace) -> list[Action]:
        namespace = self._namespaces.find_namespace(message.store.partition("-")[0])
        before = self._borrowed.get(session)
        missing = namespace is None or namespace.store_name != message.store
        if namespace is None or missing or before not in (None, namespace):
            # If it was created again, its region is another: the sibling first unmaps the old one.
            self.close_session(session)
            return [SendMessage(session, NamespaceLent(message.request_id, 0))]
        self._borrowed[session] = namespace
        namespace.borrowers.add(session)
        actions = list[Action]()
        if namespace.generation < message.generation:
            actions += self._promotions.reset_for_sibling(namespace, message.generation)
        reply = NamespaceLent(message.request_id, namespace.generation)
        actions.append(SendMessage(session, reply))
        if before is None or message.snapshot:
            namespace.subscribers.add(session)
            actions.append(SendStream(session, namespace.snapshot()))
        return actions

    def _locate(self, session: str, namespace: Namespace, message: LocateBlocks) -> Action:
        namespace.check_keys(message.keys)
        found = namespace.cache.pin_loadable(message.keys)
        located = [block for block in found if block >= 0]
        namespace.cache.unpin_blocks(located)
        self.located += len(located)
        namespace.cache.touch(message.keys)
        table, blocks = namespace.region.table, np.array(found, np.int64)
        offsets = namespace.region.start + blocks * namespace.fingerprint.host_block_bytes
        offsets[~table.among(blocks, COMMITTED)] = UNCOMMITTED
        offsets[blocks < 0] = ABSENT
        sums, versions = table.lines.checksums(blocks), table.lines.versions(blocks)
        columns = (tuple(column.tolist()) for column in (offsets, sums, versions))
        return SendMessage(session, BlocksLocated(message.request_id, *columns))
