"""A memory pool of torch whose memory the daemon maps by file descriptor.

CUDA IPC, which shares what torch allocates by itself, needs the daemon's PID and IPC namespaces and
does not work with memory that a sleep mode unmaps. An ExportedPool allocates with cuMemCreate, so a
file descriptor that is passed over a Unix socket is enough. The bytes of the pool can be released
and allocated again while its tensors keep their addresses, as a sleep mode needs it.

torch calls the allocator in the thread that allocates; all else is called in the client's thread.
"""

from __future__ import annotations

import ctypes
import logging
import os
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

from kvferry.client.arrays import import_torch
from kvferry.client.tensors.device import add_mapping, remove_mapping
from kvferry.cuda.driver import driver
from kvferry.cuda.virtual_memory import DeviceMemory, VirtualMemory
from kvferry.proto.errors import KVFerryError

log = logging.getLogger("kvferry")

# The arguments: bytes, device, stream; address, bytes, device, stream.
_Allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_Free = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)


class SegmentAllocator:
    """Allocates the segments of torch's caching allocator on one device, each exported."""

    def __init__(self, ordinal: int) -> None:
        self._ordinal = ordinal
        # Segments by address.
        self._segments: dict[int, DeviceMemory] = {}
        # Addresses of those whose bytes are released.
        self._released: set[int] = set()

    @property
    def nbytes(self) -> int:
        return sum(segment.nbytes for segment in tuple(self._segments.values()))

    def allocate(self, nbytes: int, _ordinal: int, _stream: int | None) -> int | None:
        """Return the address, or None: torch then reports that the device is out of memory."""
        try:
            with driver().visiting(self._ordinal):
                memory = self._virtual_memory()
                segment, descriptor = memory.create_memory(memory.whole_granules(nbytes))
        except KVFerryError as error:
            log.warning("kvferry: cannot allocate %d bytes of device memory: %s", nbytes, error)
            return None
        self._segments[segment.address] = segment
        add_mapping(segment, descriptor)
        return segment.address

    def free(self, address: int, nbytes: int, _ordinal: int, _stream: int | None) -> None:
        """Kernels that torch launched may still use the memory."""
        segment = self._segments.pop(address)
        try:
            with driver().visiting(self._ordinal) as context:
                driver().drain(context)
                if address in self._released:
                    self._released.remove(address)
                    segment.free_address()
                else:
                    os.close(remove_mapping(address).descriptor)
                    segment.close()
        except KVFerryError as error:
            log.warning("kvferry: cannot free %d bytes of device memory: %s", nbytes, error)

    def release_memory(self) -> None:
        """Release the bytes of all segments; their addresses stay. Nothing may use them.

        The device has the memory back once the daemon has unmapped it, too. Raises Failed (DRIVER).
        """
        with driver().visiting(self._ordinal) as context:
            driver().drain(context)
            for address in self._segments.keys() - self._released:
                os.close(remove_mapping(address).descriptor)
                self._segments[address].unmap()
                self._released.add(address)

    def restore_memory(self) -> None:
        """Allocate the bytes of all segments again, with undefined content.

        Raises Failed (DRIVER) if the device has too little memory; call it again once it has more.
        """
        with driver().visiting(self._ordinal):
            memory = self._virtual_memory()
            for address in tuple(self._released):
                segment = self._segments[address]
                add_mapping(segment, memory.replace_memory(segment))
                self._released.remove(address)

    def _virtual_memory(self) -> VirtualMemory:
        return VirtualMemory(driver(), self._ordinal)


class ExportedPool:
    """The pool of a device; see `exported_pool`. torch keeps freed segments for the next use."""

    def __init__(self, ordinal: int) -> None:
        torch = import_torch()
        self.memory = SegmentAllocator(ordinal)
        functions = _Allocate(self.memory.allocate), _Free(self.memory.free)
        addresses = [ctypes.cast(each, ctypes.c_void_p).value for each in functions]
        allocator = torch._C._cuda_customAllocator(*addresses)  # noqa: SLF001 - torch has no call
        self._pool = torch.cuda.MemPool(allocator)
        # torch frees the pool's memory when the interpreter ends, through the allocator, which may
        # be gone by then. The end of the process frees it, too.
        for each in (*functions, allocator, self._pool):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))

    def allocating(self) -> AbstractContextManager[Any]:
        """In this context, this thread allocates from the pool."""
        context: AbstractContextManager[Any] = import_torch().cuda.use_mem_pool(self._pool)
        return context


@cache
def exported_pool(ordinal: int) -> ExportedPool:
    """The pool of a device in this process."""
    return ExportedPool(ordinal)
