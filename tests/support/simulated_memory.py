"""Simulated virtual memory of a device: the driver calls, performed with memfds and mmap."""

from __future__ import annotations

import ctypes
import mmap
import os
from itertools import count
from typing import Any

GRANULE = 1 << 16
NAME = "simulated-device-memory"
_NO_ACCESS, _FIXED, _NORESERVE = 0, 0x10, 0x4000
_libc = ctypes.CDLL(None)
_libc.mmap.restype = ctypes.c_size_t
_libc.mmap.argtypes = [ctypes.c_size_t, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_size_t, ctypes.c_size_t]


class Refusal(Exception):
    """The driver call returns an error because of its arguments."""


class SimulatedMemory:
    def __init__(self) -> None:
        # The memfd of each handle.
        self._physical: dict[int, int] = {}
        self._reserved: dict[int, int] = {}
        self._numbers = count(1)

    def call(self, name: str, *arguments: Any) -> bool:
        """Perform a call. False if it is not a call for virtual memory. Raises Refusal."""
        match name, arguments:
            case "cuMemGetAllocationGranularity", (granule, _, 0):
                granule._obj.value = GRANULE
            case "cuMemCreate", (handle, nbytes, properties, 0):
                created = properties._obj
                assert (created.type, created.handle_types, created.location.type) == (1, 1, 1)
                _require(nbytes > 0 and nbytes % GRANULE == 0)
                descriptor = os.memfd_create(NAME)
                os.ftruncate(descriptor, nbytes)
                handle._obj.value = self._hold(descriptor)
            case "cuMemRelease", (handle,):
                os.close(self._physical.pop(handle.value))
            case "cuMemExportToShareableHandle", (descriptor, handle, 1, 0):
                descriptor._obj.value = os.dup(self._physical[handle.value])
            case "cuMemImportFromShareableHandle", (handle, descriptor, 1):
                _require(NAME in os.readlink(f"/proc/self/fd/{descriptor}"))
                handle._obj.value = self._hold(os.dup(descriptor))
            case "cuMemGetAllocationPropertiesFromHandle", (properties, handle):
                assert handle.value in self._physical
                properties._obj.location.type = 1
            case _:
                return self._call_mapping(name, *arguments)
        return True

    def _call_mapping(self, name: str, *arguments: Any) -> bool:
        match name, arguments:
            case "cuMemAddressReserve", (address, nbytes, 0, 0, 0):
                _require(nbytes % GRANULE == 0)
                address._obj.value = _mmap(0, nbytes, _NO_ACCESS, -1)
                self._reserved[address._obj.value] = nbytes
            case "cuMemAddressFree", (address, nbytes):
                assert self._reserved.pop(address) == nbytes
                _libc.munmap(address, nbytes)
            case "cuMemMap", (address, nbytes, 0, handle, 0):
                descriptor = self._physical[handle.value]
                assert self._reserved[address] == nbytes
                _require(nbytes <= os.fstat(descriptor).st_size)
                _mmap(address, nbytes, _NO_ACCESS, descriptor)
            case "cuMemUnmap", (address, nbytes):
                _mmap(address, nbytes, _NO_ACCESS, -1)
            case "cuMemSetAccess", (address, nbytes, access, 1):
                assert (access._obj.location.type, access._obj.flags) == (1, 3)
                _libc.mprotect(
                    ctypes.c_size_t(address),
                    ctypes.c_size_t(nbytes),
                    mmap.PROT_READ | mmap.PROT_WRITE,
                )
            case _:
                return False
        return True

    def _hold(self, descriptor: int) -> int:
        number = next(self._numbers)
        self._physical[number] = descriptor
        return number


def _require(condition: bool) -> None:
    if not condition:
        raise Refusal


def _mmap(address: int, nbytes: int, access: int, descriptor: int) -> int:
    """Map a descriptor, or anonymous memory if it is -1. Replaces mappings at a given address."""
    flags = mmap.MAP_SHARED if descriptor >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    flags |= _NORESERVE | (_FIXED if address else 0)
    found = int(_libc.mmap(address, nbytes, access, flags, descriptor, 0))
    assert found != ctypes.c_size_t(-1).value
    return found
