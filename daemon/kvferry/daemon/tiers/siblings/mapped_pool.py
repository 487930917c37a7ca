"""The pool of a sibling, mapped read-only. Any thread.

The memory of a sibling that dies stays as long as it is mapped, so a link that is lost drops its
pool. It is unmapped when the last copy from it has ended.
"""

from __future__ import annotations

import mmap
import os
from typing import Any

import numpy as np

from kvferry.daemon.tiers.block_memory import view_memory
from kvferry.proto.errors import Code, Refused
from kvferry.shm.memfd import check_sealed


class MappedPool:
    """Chunks of the pool from number `first` on. chunk_bytes: of all but the last of the pool."""

    def __init__(self, chunk_bytes: int, first: int) -> None:
        self._chunk_bytes, self._first = chunk_bytes, first
        self._chunks: list[np.ndarray[Any, np.dtype[np.uint8]]] = []

    def map_chunk(self, descriptor: int) -> None:
        """Map the next chunk. The caller owns the descriptor. Raises Refused or OSError."""
        check_sealed(descriptor, "the sibling's pool memory")
        nbytes = os.fstat(descriptor).st_size
        if not 0 < nbytes <= self._chunk_bytes:
            text = f"a chunk of the sibling's pool has {nbytes} bytes, not up to"
            raise Refused(Code.BAD_LAYOUT, f"{text} {self._chunk_bytes}", nbytes)
        memory = mmap.mmap(descriptor, nbytes, prot=mmap.PROT_READ)
        self._chunks.append(np.frombuffer(memory, np.uint8))

    def copy_block(self, offset: int, nbytes: int, address: int) -> bool:
        """Copy a block to memory of this process. False if it is not in the mapped chunks.

        offset: in bytes in the sibling's pool. Releases the GIL.
        """
        target = np.frombuffer(view_memory(address, nbytes), np.uint8)
        done = 0
        while done < nbytes:
            number, start = divmod(offset + done, self._chunk_bytes)
            if not 0 <= number - self._first < len(self._chunks):
                return False
            part = self._chunks[number - self._first][start : start + nbytes - done]
            if not part.size:
                return False
            target[done : done + part.size] = part
            done += part.size
        return True
