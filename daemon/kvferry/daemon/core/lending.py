"""Lending: siblings, the other daemons of the host, load blocks of this daemon's namespaces.

    BorrowMemory -> MemoryLent    the memory of a region, to be read only: chunks, table, page
    Uses                          keys that the sibling has found or loaded: they count as used

Nothing is held for a sibling: it searches the key table, copies the bytes, and then compares the
version of the block. If a block is evicted, reset or overwritten meanwhile, that is a miss. So a
sibling that dies or misbehaves leaves nothing behind, and cannot keep a block or a region in use.
Called by the core, on the event loop.
"""

from __future__ import annotations

from kvferry.daemon.core.actions import Action, SendMessage
from kvferry.daemon.core.block_table import HITS
from kvferry.daemon.core.dispatch import MessageTable
from kvferry.daemon.core.namespaces import Namespaces
from kvferry.daemon.core.tier_actions import LendMemory
from kvferry.proto.errors import Code, Refused
from kvferry.proto.lending import BorrowMemory, LendingMessage, MemoryLent, Uses


class Lending:
    """is_enabled: whether this daemon lends. used: number of blocks that siblings have used."""

    def __init__(self, namespaces: Namespaces, *, is_enabled: bool) -> None:
        self.used = 0
        self._namespaces, self._is_enabled = namespaces, is_enabled

    @property
    def messages(self) -> MessageTable:
        return dict.fromkeys((BorrowMemory, Uses), self.handle)

    def handle(self, session: str, message: LendingMessage, _now: float) -> list[Action]:
        """Handle a message of a sibling. Raises Refused."""
        if not self._is_enabled:
            text = "this daemon lends no blocks; set siblings.enabled = true in its configuration"
            raise Refused(Code.FORBIDDEN, text, "siblings.enabled")
        match message:
            case BorrowMemory():
                return [self._lend(session, message)]
            case Uses(name, keys):
                self._count_uses(name, keys)
                return []

    def _lend(self, session: str, message: BorrowMemory) -> Action:
        namespace = self._namespaces.find_namespace(message.namespace)
        contents = None if namespace is None else namespace.contents
        if namespace is None or contents is None or contents.composition != message.composition:
            return SendMessage(session, MemoryLent(message.request_id))
        region, keys = namespace.region, namespace.region.table.count(*HITS)
        return LendMemory(session, message.request_id, region, message.first, keys)

    def _count_uses(self, name: str, keys: tuple[bytes, ...]) -> None:
        namespace = self._namespaces.find_namespace(name)
        if namespace is not None:
            namespace.check_keys(keys)
            namespace.cache.touch(keys)
            self.used += len(keys)
