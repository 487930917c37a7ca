"""The GPU blocks of vLLM's device pointers.

vLLM gives its offloading workers block ids. With pull request 56076 it gives them addresses: for
each KV cache group, for each tensor of the group, for each block

    address of the tensor + block id * row stride

The daemon maps the tensors at other addresses, so it needs the ids. Called by the worker's side, in
the thread of vLLM's model runner. Does not import vLLM.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvferry.client.arrays import address_of
from kvferry.client.tensors.canonical import CanonicalKVCaches
from kvferry.client.vllm import SUPPORTED
from kvferry.proto.errors import Code, Refused
from kvferry.proto.specs import GPULoadStoreSpec, KVLayout, TensorRef


class DevicePointerReader:
    """Translates the pointers of a transfer to block ids of the registered tensors."""

    def __init__(self, kv_caches: CanonicalKVCaches) -> None:
        addresses = [address_of(tensor) for tensor in kv_caches.tensors]
        layout = kv_caches.layout
        self._groups = [_GroupTensors(layout, refs, addresses) for refs in layout.groups]

    def gpu_spec(self, pointers: Any) -> GPULoadStoreSpec:
        """pointers: vLLM's DevicePointers. Raises Refused if they are not those of whole blocks."""
        counts = tuple(pointers.group_block_counts)
        found = tuple(pointers.group_data_ref_counts)
        registered = tuple(group.tensors.size for group in self._groups)
        if found != registered or len(counts) != len(found):
            raise _refusal(
                Code.BAD_SPEC,
                f"vLLM's pointers are for {found} tensors of the KV cache groups, but {registered} "
                "are registered",
                found,
            )
        addresses = np.asarray(pointers.ptrs).astype(np.int64)
        sizes = np.asarray(pointers.sizes).astype(np.int64)
        expected = sum(count * tensors for count, tensors in zip(counts, registered, strict=True))
        if not addresses.size == sizes.size == expected:
            raise _refusal(
                Code.BAD_SPEC,
                f"vLLM gave {addresses.size} pointers and {sizes.size} sizes, but {counts} blocks "
                f"of {registered} tensors have {expected}",
                addresses.size,
            )
        ids, first = [addresses[:0]], 0
        for group, count in zip(self._groups, counts, strict=True):
            end = first + count * group.tensors.size
            if count:
                shape = group.tensors.size, count
                rows, nbytes = addresses[first:end].reshape(shape), sizes[first:end].reshape(shape)
                ids.append(group.block_ids(rows, nbytes))
            first = end
        return GPULoadStoreSpec(np.concatenate(ids), counts, tuple(pointers.block_indices))


class _GroupTensors:
    """The tensors of a KV cache group, as columns: one row per tensor."""

    def __init__(self, layout: KVLayout, refs: tuple[TensorRef, ...], addresses: list[int]) -> None:
        self.tensors = _column([ref.tensor for ref in refs])
        self._addresses = _column([addresses[ref.tensor] for ref in refs])
        self._strides = _column([layout.tensors[ref.tensor].row_stride_bytes for ref in refs])
        self._blocks = _column([layout.tensors[ref.tensor].num_blocks for ref in refs])
        self._pages = _column([ref.page_size_bytes for ref in refs])

    def block_ids(self, rows: Any, nbytes: Any) -> Any:
        """The block of each column. rows, nbytes: for each tensor and block, address and size."""
        offsets = rows - self._addresses
        ids = offsets[0] // self._strides[0]
        within = (ids >= 0) & (ids < self._blocks.min())
        if not (within.all() and (offsets == ids * self._strides).all()):
            raise self._misplaced(rows, offsets)
        if not (nbytes == self._pages).all():
            tensor, column = np.argwhere(nbytes != self._pages)[0]
            raise _refusal(
                Code.SIZE_MISMATCH,
                f"vLLM copies {nbytes[tensor, column]} bytes of block {ids[column]} in tensor "
                f"{self.tensors[tensor, 0]}, but its page has {self._pages[tensor, 0]}",
                nbytes[tensor, column],
            )
        return ids

    def _misplaced(self, rows: Any, offsets: Any) -> Refused:
        """Why these are not the same blocks in all tensors: the first address that is wrong."""
        ids, rests = np.divmod(offsets, self._strides)
        outside = (ids < 0) | (ids >= self._blocks)
        wrong = outside | (rests != 0) | (ids != ids[0])
        row, column = np.argwhere(wrong)[0]
        tensor, block, rest = self.tensors[row, 0], ids[row, column], rests[row, column]
        address, start = int(rows[row, column]), int(self._addresses[row, 0])
        if outside[row, column]:
            end = start + int(self._blocks[row, 0] * self._strides[row, 0])
            code = Code.BLOCK_OUT_OF_RANGE
            what = f"is outside tensor {tensor}, which is at {start:#x} to {end:#x}"
        elif rest:
            code = Code.BAD_SPEC
            what = f"is {rest} bytes after the start of block {block} in tensor {tensor}"
        else:
            code = Code.BAD_SPEC
            what = (
                f"is block {block} in tensor {tensor}, but the pointer to tensor "
                f"{self.tensors[0, 0]} is block {ids[0, column]}"
            )
        return _refusal(code, f"vLLM's pointer {address:#x} {what}", hex(address))


def _column(values: list[int]) -> Any:
    return np.array(values, np.int64).reshape(-1, 1)


def _refusal(code: Code, message: str, value: object) -> Refused:
    return Refused(code, f"{message}; use vLLM {SUPPORTED}", value)
