"""Host blocks whose last store was lost with its daemon.

A daemon does not know of a store that it had not received when it ended. If the next daemon has the
same host blocks, such a block may hold the bytes of an older store. So this client refuses to load
it by number until a store of it completes.
"""

from __future__ import annotations

from kvferry.proto.errors import Code, Refused
from kvferry.proto.specs import BlockIds, CPULoadStoreSpec, TransferSpec


class LostStores:
    def __init__(self) -> None:
        self._in_flight: dict[int, BlockIds] = {}
        self._undefined: set[int] = set()

    def check(self, spec: TransferSpec) -> None:
        """Raise Refused (STALE) for a load of such a block."""
        if not self._undefined or not isinstance(spec[0], CPULoadStoreSpec):
            return
        for block in spec[0].block_ids.tolist():
            if block in self._undefined:
                message = "the last store of this host block was lost with its daemon: a miss"
                raise Refused(Code.STALE, message, block)

    def submitted(self, job_id: int, spec: TransferSpec) -> None:
        if isinstance(spec[1], CPULoadStoreSpec):
            self._in_flight[job_id] = spec[1].block_ids.copy()  # the caller may change its own

    def ended(self, job_id: int, *, done: bool) -> None:
        """A job ended. If it was a store and completed, its host blocks are defined again."""
        blocks = self._in_flight.pop(job_id, None)
        if blocks is not None and done and self._undefined:
            self._undefined.difference_update(blocks.tolist())

    def lose(self) -> None:
        """The daemon is gone, and the stores in flight with it."""
        for blocks in self._in_flight.values():
            self._undefined.update(blocks.tolist())
        self._in_flight.clear()
