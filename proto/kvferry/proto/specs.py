"""The canonical form of KV caches, and the two sides of a transfer.

Canonical form
    A canonical tensor is a view of bytes with shape (num_blocks, page_size_bytes) and a row stride
    in bytes: rows may be padded, or interleaved with other data. A KV cache group (the layers that
    share one block table) is a list of references to such tensors. A reference has the UNPADDED
    page size: only these bytes are copied. One GPU block of a group is the concatenation of the
    pages of its references; one host block is `block_size_factor` such GPU blocks.

Transfer
    TransferSpec = (source, destination). One side is on the GPU, the other on the host, as in
    vLLM's kv_offload: GPU -> CPU is a store, CPU -> GPU is a load. Block ids are int32 or int64
    arrays, also on the wire. Lists from a caller are converted to arrays once, here.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta
from msgspec.msgpack import Ext

from kvferry.proto.errors import Code, Refused
from kvferry.proto.keys import MAX_KEY_BYTES, OffloadKey
from kvferry.proto.packing import packed_bytes

# Blocks of a transfer: four million tokens in blocks of 16. The client sends it in parts.
MAX_BLOCK_IDS = 1 << 18
# Ids of one side of a message, and keys of a message. The daemon handles a message at a time, and
# holds some of each connection. A key takes its event loop 1 to 2 us, an id a tenth of that.
MAX_MESSAGE_IDS = 1 << 15
MAX_KEYS = 1 << 12
MAX_TENSORS = 4096
MAX_GROUPS = 256
# Sections of all groups.
MAX_SECTIONS = 256
# References of all groups. A model with 100 layers has up to 200: K and V of each layer. Checking
# and registering the maximum takes 10 ms.
MAX_REFS = 1 << 14
MAX_INT = (1 << 63) - 1
MAX_COUNT = 1 << 48

_ID_TYPES = np.dtype("<i8"), np.dtype("<i4")
_WIDTHS: dict[int, np.dtype[Any]] = {dtype.itemsize: dtype for dtype in _ID_TYPES}

BlockIds: TypeAlias = np.ndarray[Any, np.dtype[np.signedinteger[Any]]]
if TYPE_CHECKING:
    AnyIds: TypeAlias = Any  # callers may pass any sequence of ints; it is converted
else:
    AnyIds = Ext  # the decoder then creates nothing but an Ext
Id: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Count: TypeAlias = Annotated[int, Meta(ge=0, lt=MAX_COUNT)]
Positive: TypeAlias = Annotated[int, Meta(gt=0, lt=MAX_COUNT)]
Name: TypeAlias = Annotated[str, Meta(max_length=256)]


class Part(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A part of a message: an array of its fields."""


class Direction(StrEnum):
    STORE = "store"
    LOAD = "load"

    # Enum.__hash__ is a Python function, and each job is looked up in a dozen tables.
    __hash__ = str.__hash__

    @property
    def transfer_type(self) -> tuple[str, str]:
        """(source medium, destination medium), as in vLLM's kv_offload."""
        return ("GPU", "CPU") if self is Direction.STORE else ("CPU", "GPU")

    @property
    def other(self) -> Direction:
        return Direction.LOAD if self is Direction.STORE else Direction.STORE


class TensorLayout(
    msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, gc=False
):
    """One canonical tensor: `num_blocks` rows of `page_size_bytes`, every `row_stride_bytes`."""

    num_blocks: Positive
    page_size_bytes: Positive
    row_stride_bytes: Positive

    @property
    def span_bytes(self) -> int:
        """Bytes from the start of the first row to the end of the last page."""
        return (self.num_blocks - 1) * self.row_stride_bytes + self.page_size_bytes


class TensorRef(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, gc=False):
    """A group's reference to a canonical tensor: the first `page_size_bytes` of each row.

    tensor: its index in the layout.
    """

    tensor: Count
    page_size_bytes: Positive


Group: TypeAlias = Annotated[tuple[TensorRef, ...], Meta(min_length=1, max_length=MAX_TENSORS)]


class KVLayout(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The shape of an engine's KV caches, in canonical form.

    packed: all pages are bfloat16 values, and are packed in host memory (kvferry.proto.packing).
    sections: into how many parts the references of each group are divided, in order
        (`section_starts`). A load may name one of them, so that layers can be computed while later
        ones are copied.
    """

    tensors: Annotated[tuple[TensorLayout, ...], Meta(min_length=1, max_length=MAX_TENSORS)]
    groups: Annotated[tuple[Group, ...], Meta(min_length=1, max_length=MAX_GROUPS)]
    block_size_factor: Annotated[int, Meta(ge=1, le=4096)] = 1
    packed: bool = False
    sections: Annotated[int, Meta(ge=1, le=MAX_SECTIONS)] = 1

    def group_bytes(self, group: int) -> int:
        """Bytes of one GPU block of `group` in host memory."""
        nbytes = sum(ref.page_size_bytes for ref in self.groups[group])
        return packed_bytes(nbytes) if self.packed else nbytes

    @property
    def host_block_bytes(self) -> int:
        """Bytes of one host block: of the largest group, because all groups share one id space."""
        largest = max(self.group_bytes(group) for group in range(len(self.groups)))
        return largest * self.block_size_factor


def section_starts(refs: int, sections: int) -> list[int]:
    """The first of a group's references in each section, and the number of references."""
    return [refs * section // sections for section in range(sections + 1)]


def as_block_ids(ids: Sequence[int] | BlockIds) -> BlockIds:
    """`ids` as a contiguous little-endian int32 or int64 array of shape (n,).

    Not copied if it is one already. Raises Refused (BAD_SPEC).
    """
    try:
        array = np.asarray(ids)
    except ValueError:
        text = "block_ids are a ragged nested list; pass one flat list of integers"
        raise Refused(Code.BAD_SPEC, text, ids) from None
    if array.ndim != 1:
        text = f"block_ids have the shape {array.shape}; pass one flat list of integers"
        raise Refused(Code.BAD_SPEC, text, array.shape)
    if array.dtype not in _ID_TYPES:
        if isinstance(ids, np.ndarray) or array.size:
            _check_integers(array)
        array = array.astype(_ID_TYPES[0])
    if array.size > MAX_BLOCK_IDS:
        raise Refused(
            Code.BAD_SPEC,
            f"the spec names {array.size} blocks, more than {MAX_BLOCK_IDS}; split the transfer",
            array.size,
        )
    return np.ascontiguousarray(array)


def _decode_ids(ids: Ext) -> BlockIds:
    """Decode block ids (codec.py). Raises ValueError if they are invalid."""
    width, data = ids.code, bytes(ids.data)
    if width not in _WIDTHS:
        raise ValueError(f"extension type {width} is unknown, not the 4 or 8 bytes of a block id")
    if len(data) > MAX_MESSAGE_IDS * width:
        raise ValueError(f"{len(data) // width} block ids are more than {MAX_MESSAGE_IDS}")
    if len(data) % width:
        raise ValueError(f"{len(data)} bytes are not a multiple of {width}-byte block ids")
    return np.frombuffer(data, _WIDTHS[width])


def _check_integers(array: np.ndarray[Any, Any]) -> None:
    if array.dtype.kind not in "iu":
        text = f"block_ids have the type {array.dtype.name}; pass int32 or int64"
        raise Refused(Code.BAD_SPEC, text, array.dtype.name)
    if array.dtype == np.uint64 and array.size and int(array.max()) > MAX_INT:
        text = f"block id {array.max()} exceeds an int64; pass ids of registered blocks"
        raise Refused(Code.BAD_SPEC, text, int(array.max()))


def _as_tuple(name: str, values: Any) -> tuple[Any, ...]:
    """The values of a list or an array. Raises Refused (BAD_SPEC) for anything else."""
    try:
        return tuple(np.asarray(values).tolist())
    except (TypeError, ValueError):
        text = f"{name} is not a list of counts; pass a list of integers"
        raise Refused(Code.BAD_SPEC, text, values) from None


class _Spec(msgspec.Struct, array_like=True, frozen=True, eq=False, forbid_unknown_fields=True):
    block_ids: AnyIds

    def __post_init__(self) -> None:
        ids = self.block_ids
        ids = _decode_ids(ids) if type(ids) is Ext else as_block_ids(ids)
        if ids is not self.block_ids:
            msgspec.structs.force_setattr(self, "block_ids", ids)

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return all(
            np.array_equal(getattr(self, name), getattr(other, name))
            for name in self.__struct_fields__
        )


class GPULoadStoreSpec(_Spec, tag="gpu", frozen=True, eq=False):
    """GPU blocks, group by group.

    group_sizes: how many of `block_ids` belong to each group, in group order; a size may be 0.
    block_indices: for each group the logical index, in GPU blocks, of its first block within its
        request; it determines the sub-block of the host block at which the transfer begins.
    Both None: one group, starting at 0.
    section: of a load, the only part of each block that is copied (KVLayout.sections); None: all.
    """

    group_sizes: Annotated[tuple[Count, ...], Meta(max_length=MAX_GROUPS)] | None = None
    block_indices: Annotated[tuple[Count, ...], Meta(max_length=MAX_GROUPS)] | None = None
    section: Annotated[int, Meta(ge=0, lt=MAX_SECTIONS)] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("group_sizes", "block_indices"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, tuple):
                msgspec.structs.force_setattr(self, name, _as_tuple(name, value))

    def check(self) -> None:
        """Raise Refused if no daemon could decode this."""
        if self.section is not None and self.section not in range(MAX_SECTIONS):
            text = f"section = {self.section!r} is no section; pass a number from 0, or None"
            raise Refused(Code.BAD_SPEC, text, self.section)
        if self.group_sizes is None and self.block_indices is None:
            return
        for name in ("group_sizes", "block_indices"):
            values = getattr(self, name) or ()
            fit = all(isinstance(value, int) and 0 <= value < MAX_COUNT for value in values)
            if len(values) > MAX_GROUPS or not fit:
                text = (
                    f"{name} = {values!r} is not a list of counts; pass at most {MAX_GROUPS} "
                    "integers of 0 or more"
                )
                raise Refused(Code.BAD_SPEC, text, values)


class CPULoadStoreSpec(_Spec, tag="cpu", frozen=True, eq=False):
    """Host blocks by id, group by group, in the region of the engine. Ids begin at 0."""

    def check(self) -> None:
        """Nothing to check: every daemon can decode this."""


# Of the contents of a namespace: another one after each reset; 0: it was never reset.
Epoch: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 62)]
Key: TypeAlias = Annotated[bytes, Meta(min_length=1, max_length=MAX_KEY_BYTES)]
Keys: TypeAlias = Annotated[tuple[Key, ...], Meta(max_length=MAX_KEYS)]
if TYPE_CHECKING:
    AnyKeys: TypeAlias = Any  # callers may pass any sequence of bytes; it is converted
else:
    AnyKeys = Keys


class KeyLoadStoreSpec(
    msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, tag="keys"
):
    """Host blocks by key, group by group, in the namespace that the engine has opened.

    The daemon chooses the host blocks. A store reserves blocks for absent keys and copies only
    those. A load with an absent key is refused as a whole (KEY_ABSENT).

    epoch: of the namespace when the engine began to compute the blocks of a store, from which every
        reset makes another one. A store of another epoch is refused (STALE). None: not compared.
    keep: for a store, resident keys of the same offer. They are not evicted for it.
    """

    keys: AnyKeys
    epoch: Epoch | None = None
    keep: AnyKeys = ()

    def __post_init__(self) -> None:
        for name in ("keys", "keep"):
            value = getattr(self, name)
            if not isinstance(value, tuple):
                msgspec.structs.force_setattr(self, name, _as_keys(name, value))

    def check(self) -> None:
        """Raise Refused if no daemon could decode this."""
        check_keys(self.keys)
        check_keys(self.keep)


def _as_keys(name: str, keys: Any) -> tuple[OffloadKey, ...]:
    try:
        return tuple(keys)
    except TypeError:
        text = f"{name} is no list of keys; pass a list of bytes"
        raise Refused(Code.BAD_KEY, text, keys) from None


def check_keys(keys: Sequence[OffloadKey]) -> None:
    """Raise Refused (BAD_KEY) if these are not keys."""
    for key in keys:
        if type(key) is not bytes or not 0 < len(key) <= MAX_KEY_BYTES:
            text = f"{key!r} is not a key; pass bytes of length 1 to {MAX_KEY_BYTES}"
            raise Refused(Code.BAD_KEY, text, key)


HostSpec: TypeAlias = CPULoadStoreSpec | KeyLoadStoreSpec
LoadStoreSpec: TypeAlias = GPULoadStoreSpec | CPULoadStoreSpec | KeyLoadStoreSpec
TransferSpec: TypeAlias = tuple[LoadStoreSpec, LoadStoreSpec]
