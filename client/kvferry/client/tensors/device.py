"""A GPU's memory that a daemon allocated, mapped in an engine's process.

The tensors over it own the mapping and the descriptor behind it: both go with the last tensor, once
the device has done what it was given. Until then the memory lives, whatever becomes of the daemon,
and the descriptor is what the engine brings to the next one.
"""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass
from typing import Any

import torch

from kvferry.cuda.driver import driver
from kvferry.cuda.virtual_memory import DeviceMemory, VirtualMemory
from kvferry.proto.errors import Code, Refused


@dataclass(frozen=True, slots=True)
class Attached:
    """Memory mapped here, and the descriptor that it came by."""

    memory: DeviceMemory
    descriptor: int

    def holds(self, pointer: int) -> bool:
        return 0 <= pointer - self.memory.address < self.memory.nbytes


# Mappings of this process, by address.
_attached: dict[int, Attached] = {}


def attached_at(pointer: int) -> Attached | None:
    """The memory of a daemon's that a device pointer lies in, if it does in any."""
    return next((one for one in tuple(_attached.values()) if one.holds(pointer)), None)


def attach_device(uuid: str, descriptor: int, nbytes: int) -> torch.Tensor:
    """Map memory of a GPU: int8, (nbytes,). The tensor and its views own the descriptor.

    Raises Refused (DEVICE_MISMATCH) or Failed (MAP_FAILED), and the descriptor stays the caller's.
    """
    ordinal = ordinal_of(uuid)
    with driver().visiting(ordinal) as context:
        memory = VirtualMemory(driver(), ordinal).open(descriptor, nbytes)
        whole: Any = _DeviceBytes(memory.address, nbytes)
        try:
            tensor = torch.as_tensor(whole, device=torch.device("cuda", ordinal))
        except BaseException:
            memory.close()
            raise
    _attached[memory.address] = Attached(memory, descriptor)
    # Not at exit: other things that end then may still use the tensors.
    weakref.finalize(whole, _let_go, context, memory.address).atexit = False
    return tensor


def ordinal_of(uuid: str) -> int:
    for ordinal in range(driver().device_count()):
        if driver().device_uuid(ordinal) == uuid:
            return ordinal
    raise Refused(
        Code.DEVICE_MISMATCH,
        f"the daemon's GPU {uuid} is not visible here; set CUDA_VISIBLE_DEVICES to include it",
        uuid,
    )


class _DeviceBytes:
    """Device memory as torch takes it over without a copy: its tensors hold this object."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|i1",
            "data": (pointer, False),
            "version": 3,
        }


def _let_go(context: int, address: int) -> None:
    """The last tensor is gone; kernels that were launched on it may still run."""
    driver().drain(context)
    gone = _attached.pop(address)
    gone.memory.close()
    os.close(gone.descriptor)
