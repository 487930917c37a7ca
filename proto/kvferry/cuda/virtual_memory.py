"""Device memory that is shared by file descriptor: the driver's virtual memory (VMM) calls.

The daemon's device worker allocates physical memory (cuMemCreate) and exports it as a file
descriptor. A process with the descriptor imports the memory, reserves addresses, maps the memory
there and enables access for the device. The memory exists while any process has a descriptor of it
or has it mapped. So it outlives a killed process, and a process without CUDA can keep it. Unlike a
CUDA IPC handle, a descriptor is valid after the exporting process has ended.

The driver's handle of the memory is released after mapping: the mapping keeps the memory.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import byref, c_int, c_size_t, c_ubyte, c_uint64, c_ushort, c_void_p
from dataclasses import dataclass

from kvferry.cuda.driver import Driver, MemoryLocation
from kvferry.proto.errors import Code, Failed, Refused

_PINNED, _DEVICE, _POSIX_DESCRIPTOR, _READ_WRITE = 1, 1, 1, 3
# CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
_GPU_DIRECT_WITH_VMM = 110


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
    """Device memory mapped in this process: `nbytes` from `address` on."""

    driver: Driver
    address: int
    nbytes: int

    def close(self) -> None:
        """Unmap it. Nothing on the device may use the mapping."""
        self.unmap()
        self.free_address()

    def unmap(self) -> None:
        """Release the bytes, and keep the address for `VirtualMemory.replace_memory`."""
        self.driver.call("cuMemUnmap", self.address, self.nbytes)

    def free_address(self) -> None:
        """Free the address of unmapped memory."""
        self.driver.call("cuMemAddressFree", self.address, self.nbytes)


class VirtualMemory:
    """Allocates and imports memory of one device. Its context must be current."""

    def __init__(self, driver: Driver, ordinal: int) -> None:
        self._driver, self._ordinal = driver, ordinal
        self._location = MemoryLocation(_DEVICE, ordinal)
        self._properties = _Properties(
            type=_PINNED,
            handle_types=_POSIX_DESCRIPTOR,
            location=self._location,
            # Without it, no network card can register the memory.
            gpu_direct=driver.device_attribute(_GPU_DIRECT_WITH_VMM, ordinal),
        )

    def whole_granules(self, nbytes: int) -> int:
        """`nbytes` rounded up to the granularity of allocations."""
        granule = c_size_t()
        properties = byref(self._properties)
        self._driver.call("cuMemGetAllocationGranularity", byref(granule), properties, 0)
        return -(-nbytes // granule.value) * granule.value

    def create_memory(self, nbytes: int) -> tuple[DeviceMemory, int]:
        """Allocate and map memory; return it and a file descriptor, which the caller owns.

        nbytes: from `whole_granules`. If it raises Failed (DRIVER), nothing stays allocated.
        """
        address = self._reserve(nbytes)
        memory = DeviceMemory(self._driver, address, nbytes)
        try:
            return memory, self.replace_memory(memory)
        except BaseException:
            memory.free_address()
            raise

    def replace_memory(self, unmapped: DeviceMemory) -> int:
        """Allocate memory and map it at the address of memory that was unmapped.

        Returns a file descriptor, which the caller owns. If it raises Failed (DRIVER), nothing
        stays allocated.
        """
        handle = c_uint64()
        self._driver.call("cuMemCreate", byref(handle), unmapped.nbytes, byref(self._properties), 0)
        try:
            descriptor = self._export(handle)
            try:
                self._map(handle, unmapped.address, unmapped.nbytes)
            except BaseException:
                os.close(descriptor)
                raise
        finally:
            self._driver.call("cuMemRelease", handle)
        return descriptor

    def import_memory(self, descriptor: int, nbytes: int) -> DeviceMemory:
        """Map memory that another process has exported. The caller still owns the descriptor.

        Raises Refused (NOT_SHAREABLE) if it is not device memory, Refused (DEVICE_MISMATCH) if
        it belongs to another device, Failed (MAP_FAILED) if it is too small. Then nothing stays
        mapped.
        """
        handle = self._import(descriptor)
        try:
            self._check_device(handle)
            address = self._reserve(nbytes)
            try:
                self._map(handle, address, nbytes)
            except BaseException:
                self._driver.call("cuMemAddressFree", address, nbytes)
                raise
            return DeviceMemory(self._driver, address, nbytes)
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
        """Import a descriptor. The call takes its number in place of a pointer."""
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
        location = properties.location
        if (location.type, location.id) != (_DEVICE, self._ordinal):
            found = f"location {location.id} of type {location.type}"
            raise Refused(
                Code.DEVICE_MISMATCH,
                f"the registered memory is on another device ({found}); register tensors on "
                f"{self._driver.device_uuid(self._ordinal)}",
                found,
            )

    def _reserve(self, nbytes: int) -> int:
        address = c_uint64()
        self._driver.call("cuMemAddressReserve", byref(address), nbytes, 0, 0, 0)
        return address.value

    def _map(self, handle: c_uint64, address: int, nbytes: int) -> None:
        access = _Access(self._location, _READ_WRITE)
        self._driver.call("cuMemMap", address, nbytes, 0, handle, 0)
        try:
            self._driver.call("cuMemSetAccess", address, nbytes, byref(access), 1)
        except BaseException:
            self._driver.call("cuMemUnmap", address, nbytes)
            raise
