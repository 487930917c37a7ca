"""Host blocks whose last store was lost with its daemon.

A daemon does not know of a store that it had not received when it ended. If the next daemon has the
same host blocks, such a block may contain the bytes of an older store. So the client refuses to
load it by number until a store of it completes. Used in the client's thread.
"""

from __future__ import annotations

from kvferry.proto.errors import Code, Refused
from kvferry.proto.specs import BlockIds, CPULoadStoreSpec, TransferSpec


class LostStores:
    """The stores in flight, and the host blocks whose last store was lost."""

    def __init__(self) -> None:
        self._in_flight: dict[int, BlockIds] = {}
        self._undefined: set[int] = set()

    def check(self, spec: TransferSpec) -> None:
        """Raise Refused (STALE) if a load names such a block."""
        if not self._undefined or not isinstance(spec[0], CPULoadStoreSpec):
            return
        for block in spec[0].block_ids.tolist():
            if block in self._undefined:
                message = (
                    "the last store of this host block was lost with its daemon; treat it as a miss"
                )
                raise Refused(Code.STALE, message, block)

    def job_submitted(self, job_id: int, spec: TransferSpec) -> None:
        """A job was sent; remember the host blocks of a store."""
        if isinstance(spec[1], CPULoadStoreSpec):
            self._in_flight[job_id] = spec[1].block_ids.copy()  # the caller may change its array

    def job_completed(self, job_id: int, *, done: bool) -> None:
        """If the job was a successful store, its host blocks are defined again."""
        blocks = self._in_flight.pop(job_id, None)
        if blocks is not None and done and self._undefined:
            self._undefined.difference_update(blocks.tolist())

    def connection_lost(self) -> None:
        """All stores in flight are lost."""
        for blocks in self._in_flight.values():
            self._undefined.update(blocks.tolist())
        self._in_flight.clear()
