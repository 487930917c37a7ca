"""Host blocks as requests to a tier name them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from kvferry.daemon.core.layout import Int64s

Checksums: TypeAlias = np.ndarray[Any, np.dtype[np.uint64]]


@dataclass(frozen=True, slots=True, eq=False)
class TierBlocks:
    """Host blocks of one namespace: their keys, and the offset of each in the pool in bytes.

    model: see Blocks.
    """

    namespace: str
    keys: Sequence[bytes]
    offsets: Int64s
    nbytes: int
    model: str = ""

    def fields(self) -> tuple[str, Sequence[bytes], bytes, int]:
        """As a FetchRequest and a PutRequest have them."""
        return self.namespace, self.keys, self.offsets.astype(np.int64).tobytes(), self.nbytes
