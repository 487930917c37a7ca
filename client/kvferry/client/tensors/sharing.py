"""Shares an engine's tensors with the daemon, and maps tensors that the daemon has allocated.

On CUDA a tensor is shared by the IPC handle of its allocation, or, if a daemon has allocated it, by
its file descriptor (device.py). On the CPU it must be in shared memory (a memfd, torch's
share_memory_(), a tmpfs file mapped MAP_SHARED from a descriptor that is still open);
/proc/self/maps shows which file that is. Called in the client's thread.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import DTypeLike

from kvferry.client.arrays import (
    address_of,
    device_kind,
    import_torch,
    int8_view,
    torch_if_installed,
)
from kvferry.client.tensors.canonical import CanonicalKVCaches
from kvferry.client.tensors.device import device_ordinal, map_device_memory, mapped_memory_at
from kvferry.client.validation import checked_device, checked_number
from kvferry.cuda.driver import driver
from kvferry.proto.errors import Code, Refused
from kvferry.proto.memory import Allocation, CudaAllocation, FdAllocation, Location
from kvferry.proto.specs import KVLayout
from kvferry.proto.status import DeviceInfo

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class ExportedTensors:
    """The allocations and locations of tensors.

    FdAllocations refer to `descriptors` by position; `with_handles` replaces these by handles.
    """

    allocations: tuple[Allocation, ...]
    locations: tuple[Location, ...]
    descriptors: tuple[int, ...] = ()

    def with_handles(self, handles: Sequence[int]) -> tuple[Allocation, ...]:
        """The allocations, with the daemon's handles of the descriptors."""
        return tuple(
            FdAllocation(handles[a.handle], a.size) if isinstance(a, FdAllocation) else a
            for a in self.allocations
        )


def export_tensors(caches: CanonicalKVCaches) -> ExportedTensors:
    """Share an engine's tensors. Raises Refused (NOT_SHAREABLE) with the setting to change."""
    if device_kind(caches.tensors[0]) == "cuda":
        return _export_cuda(caches.tensors)
    return _export_shared_memory(caches.tensors)


@overload
def shared_empty(
    shape: Sequence[int], dtype: torch.dtype | None = None, device: object = "cpu"
) -> torch.Tensor: ...


@overload
def shared_empty(
    shape: Sequence[int], dtype: DTypeLike, device: object = "cpu"
) -> np.ndarray[Any, np.dtype[Any]]: ...


def shared_empty(shape: Sequence[int], dtype: Any = None, device: object = "cpu") -> Any:
    """An uninitialized tensor that can be registered: in shared memory, or on a CUDA device.

    dtype: torch's or numpy's; default: int8. The result is torch's tensor, or, with a dtype of
    numpy or without torch, a numpy array. A device other than the CPU needs torch.
    Raises Refused (BAD_LAYOUT, NO_DEVICE).
    """
    shape, ordinal, found = _checked_shape(shape), checked_device(device), torch_if_installed()
    is_torch = found is not None and (dtype is None or isinstance(dtype, found.dtype))
    if not is_torch:
        dtype = _checked_dtype(dtype)
    if ordinal is not None:
        torch = import_torch()
        return torch.empty(shape, dtype=dtype or torch.int8, device=str(device))
    count = math.prod(shape)
    if found is not None and is_torch:
        dtype = dtype or found.int8
        memory = _new_memory(count * dtype.itemsize)
        return found.frombuffer(memory, dtype=dtype, count=count).view(shape)
    memory = _new_memory(count * dtype.itemsize)
    return np.frombuffer(memory, dtype=dtype, count=count).reshape(shape)


def _checked_shape(shape: Any) -> tuple[int, ...]:
    try:
        sizes = tuple(checked_number("each size of a shape", size, least=1) for size in shape)
    except TypeError:
        message = "shape must be a list of whole numbers, such as (num_blocks, page_size_bytes)"
        raise Refused(Code.BAD_LAYOUT, message, shape) from None
    checked_number("the number of elements of a shape", math.prod(sizes))
    return sizes


def _checked_dtype(dtype: Any) -> np.dtype[Any]:
    """A dtype of numpy. Raises Refused (BAD_LAYOUT)."""
    try:
        found: np.dtype[Any] = np.dtype(dtype or np.int8)
    except TypeError:
        found = np.dtype(object)
    if found.hasobject or not found.itemsize:
        message = "dtype must be a type of numbers of torch or numpy, such as torch.bfloat16"
        raise Refused(Code.BAD_LAYOUT, message, dtype)
    return found


def _new_memory(nbytes: int) -> mmap.mmap:
    """New shared memory."""
    descriptor = os.memfd_create("kvferry-tensor", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, nbytes)
        return mmap.mmap(descriptor, nbytes)  # keeps a descriptor of its own
    finally:
        os.close(descriptor)


# CUDA


def _export_cuda(tensors: Iterable[torch.Tensor]) -> ExportedTensors:
    numbers: dict[int, int] = {}
    allocations: list[Allocation] = []
    locations: list[Location] = []
    descriptors: list[int] = []
    for tensor in tensors:
        pointer = tensor.data_ptr()
        if (mapped := mapped_memory_at(pointer)) is not None:
            base = mapped.memory.address
            if base not in numbers:
                numbers[base] = len(allocations)
                allocations.append(FdAllocation(len(descriptors), mapped.memory.nbytes))
                descriptors.append(mapped.descriptor)
            locations.append(Location(numbers[base], pointer - base))
            continue
        with driver().visiting(tensor.device.index or 0):
            _check_ipc(tensor)
            base, size = driver().address_range(pointer)
            if base not in numbers:
                numbers[base] = len(allocations)
                uuid = driver().device_uuid(driver().current_device())
                allocations.append(CudaAllocation(uuid, driver().ipc_handle(base), size))
        locations.append(Location(numbers[base], pointer - base))
    return ExportedTensors(tuple(allocations), tuple(locations), tuple(descriptors))


def _check_ipc(tensor: torch.Tensor) -> None:
    if not driver().ipc_capable(tensor.data_ptr()):
        raise Refused(
            Code.NOT_SHAREABLE,
            f"CUDA IPC cannot share a tensor of shape {_describe(tensor)}; allocate KV caches "
            "without expandable_segments:True in PYTORCH_CUDA_ALLOC_CONF or PYTORCH_ALLOC_CONF, "
            "and without vLLM's --enable-cumem-allocator, or with allocate_kv_caches",
            _describe(tensor),
        )


def _describe(tensor: Any) -> str:
    return f"{tuple(tensor.shape)} on {getattr(tensor, 'device', 'cpu')}"


# Shared memory


@dataclass(frozen=True, slots=True)
class _Mapping:
    start: int
    end: int
    offset: int
    # (device, inode)
    file: tuple[int, int]


def _export_shared_memory(tensors: Iterable[Any]) -> ExportedTensors:
    mappings = list(_shared_mappings())
    open_files = _open_files()
    numbers: dict[tuple[int, int], int] = {}
    allocations: list[Allocation] = []
    locations: list[Location] = []
    descriptors: list[int] = []
    for tensor in tensors:
        pointer = address_of(tensor)
        mapping = next((m for m in mappings if m.start <= pointer < m.end), None)
        if mapping is None or mapping.file not in open_files:
            raise Refused(
                Code.NOT_SHAREABLE,
                f"a tensor of shape {_describe(tensor)} is not in shared memory; create it with "
                "kvferry's shared_empty or allocate_kv_caches, or call share_memory_() on it",
                _describe(tensor),
            )
        if mapping.file not in numbers:
            numbers[mapping.file] = len(allocations)
            descriptor = open_files[mapping.file]
            allocations.append(FdAllocation(len(descriptors), os.fstat(descriptor).st_size))
            descriptors.append(descriptor)
        locations.append(Location(numbers[mapping.file], mapping.offset + pointer - mapping.start))
    return ExportedTensors(tuple(allocations), tuple(locations), tuple(descriptors))


def _shared_mappings() -> Iterable[_Mapping]:
    """The MAP_SHARED file mappings of this process (proc_pid_maps(5))."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, permissions, offset, device, inode, *_ = line.split(maxsplit=5)
        if permissions[3] == "s" and inode != "0":
            start, end = (int(part, 16) for part in span.split("-"))
            major, minor = (int(part, 16) for part in device.split(":"))
            yield _Mapping(start, end, int(offset, 16), (os.makedev(major, minor), int(inode)))


def _open_files() -> dict[tuple[int, int], int]:
    """(device, inode) -> a descriptor of this process that is open for reading and writing."""
    found: dict[tuple[int, int], int] = {}
    for name in [entry.name for entry in Path("/proc/self/fd").iterdir()]:
        try:
            status, flags = os.fstat(int(name)), fcntl.fcntl(int(name), fcntl.F_GETFL)
        except OSError:  # the descriptor of os.listdir
            continue
        if flags & os.O_ACCMODE == os.O_RDWR:
            found[status.st_dev, status.st_ino] = int(name)
    return found


# Tensors that the daemon has allocated


def check_device_visible(device: DeviceInfo) -> None:
    """Raise Refused (NO_DEVICE, DEVICE_MISMATCH) if this process does not see the device.

    Raises ModuleNotFoundError if it cannot use the device.
    """
    if device.kind == "cuda":
        import_torch()  # raises if it is not installed
        device_ordinal(device.uuid)


def map_tensors(
    layout: KVLayout,
    allocations: Sequence[Allocation],
    locations: Sequence[Location],
    descriptors: Sequence[int],
    device: DeviceInfo,
) -> list[torch.Tensor]:
    """Map tensors that the daemon has allocated: int8 views of (num_blocks, page_size_bytes).

    Without torch they are numpy arrays.

    descriptors[i] is that of allocations[i]. The tensors own descriptors and mappings; if this
    raises, all are closed.
    """
    remaining = list(descriptors)
    mapped: list[Any] = []
    try:
        for allocation in allocations:
            mapped.append(_map_allocation(allocation.size, remaining[0], device))
            del remaining[0]
    finally:
        for descriptor in remaining:
            os.close(descriptor)
    return [
        int8_view(
            mapped[location.allocation],
            location.offset,
            (tensor.num_blocks, tensor.page_size_bytes),
            tensor.row_stride_bytes,
        )
        for tensor, location in zip(layout.tensors, locations, strict=True)
    ]


def _map_allocation(size: int, descriptor: int, device: DeviceInfo) -> Any:
    if device.kind == "cuda":
        return map_device_memory(device.uuid, descriptor, size)
    shared = mmap.mmap(descriptor, size)  # keeps a descriptor of its own
    torch = torch_if_installed()
    if torch is None:
        tensor: Any = np.frombuffer(shared, dtype=np.int8)
    else:
        tensor = torch.frombuffer(shared, dtype=torch.int8)
    os.close(descriptor)
    return tensor
