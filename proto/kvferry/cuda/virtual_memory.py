"""Device memory that is shared by file descriptor: the driver's virtual memory (VMM) calls.

The daemon's device worker allocates physical memory (cuMemCreate) and exports it as a file
descriptor. A process that has the descriptor imports the memory, reserves addresses, maps it there
and sets the device's access. The memory lives as long as a process holds a descriptor of it or has
it mapped, so it outlives a killed process, and a process without CUDA can keep it. Unlike a CUDA
IPC handle, a descriptor works after the exporting process has died.

The handle of physical memory is released as soon as it is mapped: the mapping holds the memory.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import byref, c_int, c_size_t, c_ubyte, c_uint64, c_ushort, c_void_p
from dataclasses import dataclass

from kvferry.cuda.driver import Driver, MemoryLocation
from kvferry.proto.errors import Code, Failed, Refused

_PINNED, _DEVICE, _POSIX_DESCRIPTOR, _READ_WRITE = 1, 1, 1, 3


class _Properties(ctypes.Structure):
    """CUmemAllocationProp; the last three fields are its allocFlags."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", MemoryLocation),
        ("win32", c_void_p),
        ("compression", c_ubyte),
        ("gpu_direct", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", MemoryLocation), ("flags", c_int))


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Device memory mapped in this process, `nbytes` from `address` on. `close` unmaps it."""

    driver: Driver
    address: int
    nbytes: int

    def close(self) -> None:
        """Nothing on the device uses the mapping any more."""
        self.driver.call("cuMemUnmap", self.address, self.nbytes)
        self.driver.call("cuMemAddressFree", self.address, self.nbytes)


class VirtualMemory:
    """The memory of one device."""

    def __init__(self, driver: Driver, ordinal: int) -> None:
        self._driver, self._ordinal = driver, ordinal
        self._where = MemoryLocation(_DEVICE, ordinal)
        self._properties = _Properties(
            type=_PINNED, handle_types=_POSIX_DESCRIPTOR, location=self._where
        )

    def whole_granules(self, nbytes: int) -> int:
        """The next size at which memory can be made."""
        granule = c_size_t()
        properties = byref(self._properties)
        self._driver.call("cuMemGetAllocationGranularity", byref(granule), properties, 0)
        return -(-nbytes // granule.value) * granule.value

    def create_memory(self, nbytes: int) -> tuple[DeviceMemory, int]:
        """New memory of whole granules, mapped here; and the descriptor, the caller's, behind it.

        Raises Failed (DRIVER), and nothing stays allocated.
        """
        handle = c_uint64()
        self._driver.call("cuMemCreate", byref(handle), nbytes, byref(self._properties), 0)
        try:
            descriptor = self._export(handle)
            try:
                return self._map(handle, nbytes), descriptor
            except BaseException:
                os.close(descriptor)
                raise
        finally:
            self._driver.call("cuMemRelease", handle)

    def import_memory(self, descriptor: int, nbytes: int) -> DeviceMemory:
        """Map what another process exported; the descriptor stays the caller's.

        Raises Refused (NOT_SHAREABLE) where it is no device memory, Refused (DEVICE_MISMATCH) where
        it is another device's, Failed (MAP_FAILED) where it has fewer bytes; nothing stays mapped.
        """
        handle = self._import(descriptor)
        try:
            self._check_device(handle)
            return self._map(handle, nbytes)
        except Failed as error:
            raise Failed(
                Code.MAP_FAILED,
                f"cannot map {nbytes} bytes of device memory ({error.value}); "
                "export at least as many",
                error.value,
            ) from error
        finally:
            self._driver.call("cuMemRelease", handle)

    def _export(self, handle: c_uint64) -> int:
        descriptor = c_int(-1)
        name = "cuMemExportToShareableHandle"
        self._driver.call(name, byref(descriptor), handle, _POSIX_DESCRIPTOR, 0)
        os.set_inheritable(descriptor.value, False)
        return descriptor.value

    def _import(self, descriptor: int) -> c_uint64:
        """The call takes the descriptor itself where it has a pointer."""
        handle, name = c_uint64(), "cuMemImportFromShareableHandle"
        try:
            self._driver.call(name, byref(handle), descriptor, _POSIX_DESCRIPTOR)
        except Failed as error:
            raise Refused(
                Code.NOT_SHAREABLE,
                f"the registered memory is not GPU memory ({error.value}); register tensors on "
                f"{self._driver.device_uuid(self._ordinal)}",
                error.value,
            ) from error
        return handle

    def _check_device(self, handle: c_uint64) -> None:
        properties, name = _Properties(), "cuMemGetAllocationPropertiesFromHandle"
        self._driver.call(name, byref(properties), handle)
        where = properties.location
        if (where.type, where.id) != (_DEVICE, self._ordinal):
            found = f"location {where.id} of type {where.type}"
            raise Refused(
                Code.DEVICE_MISMATCH,
                f"the registered memory is on another device ({found}); register tensors on "
                f"{self._driver.device_uuid(self._ordinal)}",
                found,
            )

    def _map(self, handle: c_uint64, nbytes: int) -> DeviceMemory:
        call, address, access = self._driver.call, c_uint64(), _Access(self._where, _READ_WRITE)
        call("cuMemAddressReserve", byref(address), nbytes, 0, 0, 0)
        try:
            call("cuMemMap", address.value, nbytes, 0, handle, 0)
            try:
                call("cuMemSetAccess", address.value, nbytes, byref(access), 1)
            except BaseException:
                call("cuMemUnmap", address.value, nbytes)
                raise
        except BaseException:
            call("cuMemAddressFree", address.value, nbytes)
            raise
        return DeviceMemory(self._driver, address.value, nbytes)
