"""Derives canonical form from an engine's KV tensors, by shape and stride alone.

In any layout one dimension counts blocks. The strides of the others tell their kind:

    inner    smaller stride than a block: the bytes of one block, which must be dense, in any order
             (NHD or HND). They are the page.
    outer    larger stride than a block: each index is a canonical tensor of its own.

        split K and V      (2, blocks, size, heads, dim)     2 is outer: two tensors
        blocks first       (blocks, 2, size, heads, dim)     2 is inner: one tensor
        cross-layer        (blocks, layers, 2, ...)          all inner: one tensor
        MLA                (blocks, size, dim)               all inner: one tensor

A GPU block may consist of several kernel blocks: the block dimension is then a multiple of
`num_blocks`. If kernel blocks are padded, they are not contiguous, and each becomes a tensor, too.
Layers that alias the same memory become one tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from kvferry.client.arrays import KVTensors, address_of, form_of, int8_view, is_tensor
from kvferry.client.validation import checked_number
from kvferry.proto.errors import Code, Refused
from kvferry.proto.layout import LayoutArrays
from kvferry.proto.specs import KVLayout, TensorLayout, TensorRef

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class CanonicalKVCaches:
    """tensors[i]: int8, (num_blocks, page_size_bytes), row stride as in layout.tensors[i].

    Views of numpy arrays are numpy arrays.
    """

    layout: KVLayout
    tensors: tuple[torch.Tensor, ...]


@dataclass(slots=True)
class _View:
    """A canonical tensor as a part of a KV tensor. offset: in bytes, from its first element."""

    whole: Any
    offset: int
    layout: TensorLayout

    @property
    def rows(self) -> tuple[int, int, int]:
        """Views with the same rows become one tensor, even if they use different parts of a row."""
        address = address_of(self.whole) + self.offset
        return address, self.layout.num_blocks, self.layout.row_stride_bytes

    def widen(self, other: _View) -> None:
        if other.layout.page_size_bytes > self.layout.page_size_bytes:
            self.layout = other.layout

    def tensor(self) -> Any:
        shape = (self.layout.num_blocks, self.layout.page_size_bytes)
        return int8_view(self.whole, self.offset, shape, self.layout.row_stride_bytes)


def canonicalize(
    kv_caches: KVTensors,
    *,
    num_blocks: int,
    groups: Sequence[Sequence[str]] | None = None,
    block_size_factor: int = 1,
    page_size_bytes: Mapping[str, int] | None = None,
    block_dim: int | None = None,
    packed: bool = False,
    sections: int = 1,
) -> CanonicalKVCaches:
    """Canonical form of an engine's KV caches, given as layer name -> tensor or tensors.

    A tensor is torch's or a numpy array.
    num_blocks: GPU blocks, as the scheduler counts them.
    groups: the layers of each KV cache group; None: one group with all layers.
    page_size_bytes: for layers whose blocks end with padding, the bytes of one block without it.
    block_dim: the dimension that counts blocks, if it is ambiguous.
    packed: all of them are bfloat16, and are packed in host memory. Needs a namespace, and pages of
        a multiple of 2 KiB. A block whose values are too far apart is not stored.
    sections: parts of each group's layers, in order, that loads may name (KVLayout.sections).
    Raises Refused (BAD_LAYOUT) with the layer's name if there is no canonical form.
    """
    num_blocks = checked_number("num_blocks", num_blocks, least=1)
    if block_dim is not None:
        block_dim = checked_number("block_dim", block_dim)
    _check_mapping("kv_caches", kv_caches, "layer name to tensor")
    if not kv_caches:
        message = "kv_caches has no layer; pass each layer's KV tensor by its name"
        raise Refused(Code.BAD_LAYOUT, message, kv_caches)
    _check_groups(groups)
    pages = _checked_pages(page_size_bytes or {})
    numbers: dict[tuple[int, int, int], int] = {}
    views: list[_View] = []
    refs: dict[str, list[TensorRef]] = {}
    for name, value in kv_caches.items():
        refs[name] = []
        for tensor in _tensors(name, value):
            for view in _views(name, tensor, num_blocks, pages.get(name), block_dim):
                number = numbers.setdefault(view.rows, len(views))
                if number == len(views):
                    views.append(view)
                views[number].widen(view)
                refs[name].append(TensorRef(number, view.layout.page_size_bytes))
    layout = KVLayout(
        tuple(view.layout for view in views),
        tuple(_group(names, refs) for names in groups or [list(kv_caches)]),
        block_size_factor,
        packed,
        checked_number("sections", sections, least=1),
    )
    LayoutArrays.from_layout(layout)  # checks it
    return CanonicalKVCaches(layout, tuple(view.tensor() for view in views))


def _check_mapping(name: str, value: Any, what: str) -> None:
    if not isinstance(value, Mapping):
        message = f"{name} must be a dict of {what}"
        raise Refused(Code.BAD_LAYOUT, message, type(value).__name__)


def _check_groups(groups: Any) -> None:
    if groups is None:
        return
    if not _is_list(groups) or not all(map(_is_list, groups)):
        message = "groups must be a list with a list of layer names for each group"
        raise Refused(Code.BAD_LAYOUT, message, groups)


def _checked_pages(pages: Any) -> dict[str, int]:
    _check_mapping("page_size_bytes", pages, "layer name to bytes")
    return {
        name: checked_number(f"page_size_bytes of layer {name!r}", page, least=1)
        for name, page in pages.items()
    }


def _tensors(name: str, value: Any) -> Sequence[Any]:
    """The KV tensors of a layer."""
    tensors = [value] if is_tensor(value) else value
    if not _is_list(tensors) or not all(map(is_tensor, tensors)):
        message = f"the KV cache of layer {name!r} must be a tensor, or a list of tensors"
        raise Refused(Code.BAD_LAYOUT, message, type(value).__name__)
    return list(tensors)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _group(names: Sequence[str], refs: Mapping[str, list[TensorRef]]) -> tuple[TensorRef, ...]:
    """The references of a group's layers, each tensor once, as much of it as any of them uses."""
    unknown = [name for name in names if name not in refs]
    if unknown:
        message = f"a group names layer {unknown[0]!r}, which has no KV cache; correct `groups`"
        raise Refused(Code.UNKNOWN_TENSOR, message, unknown[0])
    widest: dict[int, TensorRef] = {}
    for ref in (ref for name in names for ref in refs[name]):
        known = widest.setdefault(ref.tensor, ref)
        if ref.page_size_bytes > known.page_size_bytes:
            widest[ref.tensor] = ref
    return tuple(widest.values())


def _views(
    name: str, tensor: Any, num_blocks: int, page: int | None, block_dim: int | None
) -> Iterator[_View]:
    """The canonical tensors of one KV tensor."""
    form = form_of(tensor)
    shape = form.shape
    if not math.prod(shape):
        raise _refusal(name, tensor, "it has no elements; leave it out")
    dim = _block_dim(name, tensor, num_blocks) if block_dim is None else block_dim
    if not 0 <= dim < len(shape):
        raise _refusal(name, tensor, f"block_dim is {dim}; give one of its {len(shape)} dimensions")
    stride = form.strides[dim]
    others = [
        (size, step)
        for d, (size, step) in enumerate(zip(shape, form.strides, strict=True))
        if d != dim and size > 1
    ]
    inner = sorted((o for o in others if o[1] < stride), key=lambda o: o[1])
    outer = [o for o in others if o[1] >= stride]
    dense = form.item_bytes
    for size, step in inner:
        if step != dense:
            raise _refusal(
                name, tensor, "one block is not contiguous; allocate each block as one run of bytes"
            )
        dense *= size
    span = (shape[dim] - 1) * stride + dense
    for size, step in sorted(outer, key=lambda o: o[1]):
        if step < span:
            raise _refusal(name, tensor, "blocks overlap; allocate each block in its own memory")
        span += (size - 1) * step
    if dense > stride and shape[dim] > 1:
        raise _refusal(name, tensor, "blocks overlap; allocate each block in its own memory")
    kernel_blocks = shape[dim] // num_blocks
    if kernel_blocks * num_blocks != shape[dim]:
        raise _refusal(
            name,
            tensor,
            f"dimension {dim} is not a multiple of {num_blocks} blocks; correct num_blocks",
        )
    if kernel_blocks > 1 and stride != dense:
        outer.append((kernel_blocks, stride))
    else:
        dense *= kernel_blocks
    if page is not None and not 0 < page <= dense:
        raise _refusal(
            name,
            tensor,
            f"a page of {page} bytes exceeds its block of {dense}; correct page_size_bytes",
        )
    layout = TensorLayout(num_blocks, page or dense, stride * kernel_blocks)
    for steps in product(*(range(0, size * step, step) for size, step in outer)):
        yield _View(tensor, sum(steps), layout)


def _block_dim(name: str, tensor: Any, num_blocks: int) -> int:
    """The dimension that counts blocks: 0, or 1 if dimension 0 separates K and V."""
    shape = tensor.shape
    fits = [size % num_blocks == 0 for size in shape[:2]]
    if len(shape) > 2 and shape[0] == 2 and fits[1]:
        if fits[0]:
            raise _refusal(
                name, tensor, "dimensions 0 and 1 could both count blocks; give block_dim"
            )
        return 1
    if not fits or not fits[0]:
        raise _refusal(
            name,
            tensor,
            f"no dimension has {num_blocks} blocks; correct num_blocks, or give block_dim",
        )
    return 0


def _refusal(name: str, tensor: Any, why: str) -> Refused:
    form = form_of(tensor)
    strides = tuple(stride // form.item_bytes for stride in form.strides)
    shown = f"{name}: shape {form.shape}, stride {strides}"
    return Refused(Code.BAD_LAYOUT, f"layer {shown}: {why}", shown)
