"""GPU memory of this process that has a file descriptor, by which a daemon can map it.

Of memory that a daemon has allocated, the tensors own the mapping and its file descriptor: both are
released with the last tensor, after the device was synchronized. Until then the memory exists even
if the daemon ends, and the client registers it with the next daemon by this descriptor. Memory that
this process has allocated is in an ExportedPool. Called in the client's thread.
"""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass
from typing import Any

from kvferry.client.arrays import import_torch
from kvferry.cuda.driver import driver
from kvferry.cuda.virtual_memory import DeviceMemory, VirtualMemory
from kvferry.proto.errors import Code, Refused


@dataclass(frozen=True, slots=True)
class MappedMemory:
    """Mapped memory, and its file descriptor."""

    memory: DeviceMemory
    descriptor: int

    def contains(self, pointer: int) -> bool:
        return 0 <= pointer - self.memory.address < self.memory.nbytes


# Mappings of this process, by address.
_mapped: dict[int, MappedMemory] = {}


def mapped_memory_at(pointer: int) -> MappedMemory | None:
    """The mapped memory that contains a device pointer, or None."""
    return next((memory for memory in tuple(_mapped.values()) if memory.contains(pointer)), None)


def add_mapping(memory: DeviceMemory, descriptor: int) -> None:
    """Let `mapped_memory_at` find this memory, until `remove_mapping`."""
    _mapped[memory.address] = MappedMemory(memory, descriptor)


def remove_mapping(address: int) -> MappedMemory:
    """Forget the memory that begins at an address. The caller owns its descriptor."""
    return _mapped.pop(address)


def map_device_memory(uuid: str, descriptor: int, nbytes: int) -> Any:
    """Map memory of a GPU: torch's int8, (nbytes,). The tensor and its views own the descriptor.

    Raises Refused (DEVICE_MISMATCH) or Failed (MAP_FAILED); the caller then still owns it.
    """
    torch, ordinal = import_torch(), device_ordinal(uuid)
    with driver().visiting(ordinal) as context:
        memory = VirtualMemory(driver(), ordinal).import_memory(descriptor, nbytes)
        whole: Any = _DeviceBytes(memory.address, nbytes)
        try:
            tensor: Any = torch.as_tensor(whole, device=torch.device("cuda", ordinal))
        except BaseException:
            memory.close()
            raise
    add_mapping(memory, descriptor)
    # Not at exit: other threads and finalizers may still use the tensors.
    weakref.finalize(whole, _release_memory, context, memory.address).atexit = False
    return tensor


def device_ordinal(uuid: str) -> int:
    """The ordinal of a GPU in this process. Raises Refused (DEVICE_MISMATCH, NO_DEVICE)."""
    for ordinal in range(driver().device_count()):
        if driver().device_uuid(ordinal) == uuid:
            return ordinal
    raise Refused(
        Code.DEVICE_MISMATCH,
        f"the daemon's GPU {uuid} is not visible here; set CUDA_VISIBLE_DEVICES to include it",
        uuid,
    )


class _DeviceBytes:
    """Device memory that torch uses without a copy; its tensors reference this object."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|i1",
            "data": (pointer, False),
            "version": 3,
        }


def _release_memory(context: int, address: int) -> None:
    """Release memory after its last tensor; kernels that use it may still run."""
    driver().drain(context)
    mapped = remove_mapping(address)
    mapped.memory.close()
    os.close(mapped.descriptor)
