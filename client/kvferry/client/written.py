"""Host blocks that may be loaded by number, once the bytes of a region are gone.

A daemon that went took the host pool along, and the one that came after it has blocks of the same
numbers, with nothing in them. A caller need not have noticed; so what was not stored since is not
loaded from: that is a miss, not somebody's zeros.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvferry.proto.errors import Code, Refused
from kvferry.proto.specs import CPULoadStoreSpec, TransferSpec

MAX_BLOCKS = 1 << 28
"""A daemon has no more in a region."""


class Written:
    """Host blocks that this client has stored to since the region was lost."""

    def __init__(self) -> None:
        self._blocks: npt.NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)

    def check(self, spec: TransferSpec) -> None:
        """Raise Refused (STALE) for a load from a block that was not stored to."""
        if not isinstance(spec[0], CPULoadStoreSpec):
            return
        ids = spec[0].block_ids
        fine = (ids >= 0) & (ids < len(self._blocks))
        fine[fine] = self._blocks[ids[fine]]
        if not fine.all():
            message = "the daemon that had this host block is gone: take it for a miss"
            raise Refused(Code.STALE, message, int(ids[~fine][0]))

    def note(self, spec: TransferSpec) -> None:
        """A store went out. One that no daemon accepts changes nothing."""
        if not isinstance(spec[1], CPULoadStoreSpec) or not len(ids := spec[1].block_ids):
            return
        least, most = int(ids.min()), int(ids.max())
        if least >= 0 and most < MAX_BLOCKS:
            lacking = most + 1 - len(self._blocks)
            if lacking > 0:
                self._blocks = np.pad(self._blocks, (0, max(lacking, len(self._blocks))))
            self._blocks[ids] = True
