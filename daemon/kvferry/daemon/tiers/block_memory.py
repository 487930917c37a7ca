"""Views of host memory by address. Used in the process of a tier, on any thread."""

from __future__ import annotations

import ctypes
import mmap

PAGE = mmap.PAGESIZE


def view_memory(address: int, nbytes: int) -> memoryview:
    """A writable view of memory that must stay mapped as long as the view is used."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


class BounceBuffer:
    """Page-aligned memory of one thread, for I/O from and to addresses that are not aligned."""

    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, max(PAGE, nbytes))
        self.nbytes = len(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.view = memoryview(self._map)
