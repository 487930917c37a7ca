"""Virtual memory on paper: the driver's calls over plain files and the kernel's own mmap."""

from __future__ import annotations

import ctypes
import mmap
import os
from itertools import count
from typing import Any

GRANULE = 1 << 16
NAME = "paper-device-memory"
_NO_ACCESS, _FIXED, _NORESERVE = 0, 0x10, 0x4000
_libc = ctypes.CDLL(None)
_libc.mmap.restype = ctypes.c_size_t
_libc.mmap.argtypes = [ctypes.c_size_t, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_size_t, ctypes.c_size_t]


class Refusal(Exception):
    """The call answers that its arguments are not right."""


class SimulatedMemory:
    def __init__(self) -> None:
        self._physical: dict[int, int] = {}
        """Handles, and the descriptor of the file that stands for the memory of each."""
        self._reserved: dict[int, int] = {}
        self._numbers = count(1)

    def call(self, name: str, *given: Any) -> bool:
        """Do a call, if it is one of these. Raises Refusal."""
        match name, given:
            case "cuMemGetAllocationGranularity", (granule, _, 0):
                granule._obj.value = GRANULE
            case "cuMemCreate", (handle, nbytes, properties, 0):
                wanted = properties._obj
                assert (wanted.type, wanted.handle_types, wanted.location.type) == (1, 1, 1)
                _demand(nbytes > 0 and nbytes % GRANULE == 0)
                descriptor = os.memfd_create(NAME)
                os.ftruncate(descriptor, nbytes)
                handle._obj.value = self._hold(descriptor)
            case "cuMemRelease", (handle,):
                os.close(self._physical.pop(handle.value))
            case "cuMemExportToShareableHandle", (descriptor, handle, 1, 0):
                descriptor._obj.value = os.dup(self._physical[handle.value])
            case "cuMemImportFromShareableHandle", (handle, descriptor, 1):
                _demand(NAME in os.readlink(f"/proc/self/fd/{descriptor}"))
                handle._obj.value = self._hold(os.dup(descriptor))
            case "cuMemGetAllocationPropertiesFromHandle", (properties, handle):
                assert handle.value in self._physical
                properties._obj.location.type = 1
            case _:
                return self._place(name, *given)
        return True

    def _place(self, name: str, *given: Any) -> bool:
        match name, given:
            case "cuMemAddressReserve", (address, nbytes, 0, 0, 0):
                _demand(nbytes % GRANULE == 0)
                address._obj.value = _mmap(0, nbytes, _NO_ACCESS, -1)
                self._reserved[address._obj.value] = nbytes
            case "cuMemAddressFree", (address, nbytes):
                assert self._reserved.pop(address) == nbytes
                _libc.munmap(address, nbytes)
            case "cuMemMap", (address, nbytes, 0, handle, 0):
                descriptor = self._physical[handle.value]
                assert self._reserved[address] == nbytes
                _demand(nbytes <= os.fstat(descriptor).st_size)
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


def _demand(right: bool) -> None:
    if not right:
        raise Refusal


def _mmap(address: int, nbytes: int, access: int, descriptor: int) -> int:
    """Shared from a descriptor, or nobody's; in place of what is at `address`, if that is given."""
    flags = mmap.MAP_SHARED if descriptor >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    flags |= _NORESERVE | (_FIXED if address else 0)
    found = int(_libc.mmap(address, nbytes, access, flags, descriptor, 0))
    assert found != ctypes.c_size_t(-1).value
    return found
