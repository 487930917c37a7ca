"""The properties of a KV tensor, which is torch's or a numpy array.

A numpy array is always in host memory. torch is imported only if it is used. Any thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from types import ModuleType

    import torch

KVTensor: TypeAlias = "torch.Tensor | np.ndarray[Any, np.dtype[Any]]"
# An engine's tensors by layer name.
KVTensors: TypeAlias = Mapping[str, KVTensor] | Mapping[str, Sequence[KVTensor]]


@dataclass(frozen=True, slots=True)
class ArrayForm:
    """The shape of a tensor, its strides in bytes, and the bytes of an element."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int


class _Int8View:
    """Memory that numpy uses without a copy; its arrays reference this object, and so `owner`."""

    def __init__(
        self, address: int, shape: Sequence[int], strides: Sequence[int], owner: object
    ) -> None:
        self._owner = owner
        self.__array_interface__ = {
            "data": (address, False),
            "shape": tuple(shape),
            "strides": tuple(strides),
            "typestr": "|i1",
            "version": 3,
        }


def is_tensor(value: object) -> bool:
    """Whether this is one tensor, not a sequence of them."""
    return isinstance(value, np.ndarray) or hasattr(value, "untyped_storage")


def device_kind(tensor: Any) -> str:
    """ "cpu" or "cuda"."""
    return "cpu" if isinstance(tensor, np.ndarray) else str(tensor.device.type)


def address_of(tensor: Any) -> int:
    """The address of a tensor's first element."""
    return int(tensor.ctypes.data if isinstance(tensor, np.ndarray) else tensor.data_ptr())


def form_of(tensor: Any) -> ArrayForm:
    if isinstance(tensor, np.ndarray):
        return ArrayForm(tensor.shape, tensor.strides, tensor.itemsize)
    item = tensor.element_size()
    strides = (stride * item for stride in tensor.stride())
    return ArrayForm(tuple(tensor.shape), tuple(strides), item)


def int8_view(tensor: Any, offset: int, shape: tuple[int, int], row_stride: int) -> Any:
    """A view of a tensor's memory: int8, `shape`. offset: in bytes, from its first element."""
    if isinstance(tensor, np.ndarray):
        return np.asarray(_Int8View(address_of(tensor) + offset, shape, (row_stride, 1), tensor))
    torch = import_torch()
    start = tensor.storage_offset() * tensor.element_size() + offset
    raw = torch.empty(0, dtype=torch.int8, device=tensor.device)
    return raw.set_(tensor.untyped_storage(), start, shape, (row_stride, 1))


def import_torch() -> ModuleType:
    """Raises ModuleNotFoundError with the extra to install."""
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        message = "torch is not installed; tensors on a GPU need it: pip install '.[tensors]' in a "
        message += "checkout of kvferry"
        raise ModuleNotFoundError(message, name=error.name) from error
    return torch


def torch_if_installed() -> ModuleType | None:
    try:
        return import_torch()
    except ModuleNotFoundError:
        return None
