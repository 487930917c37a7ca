"""An engine's KV tensors, in the shapes that engines use.

`kv_caches` and `groups` are the arguments of register_kv_caches. `views` are the same memory as the
engine's kernels see it: for each tensor, integers of shape (blocks, dimensions of one block...) in
the order of the tensor's own dimensions. They do not use canonicalize, so that a block that
canonicalize maps wrongly has wrong bytes in its view.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvferry.client import KVLayout, TensorLayout, TensorRef, shared_empty
from kvferry.testing.content import Parts
from kvferry.testing.options import EngineOptions, GroupOptions

# Elements after each block in the padded forms.
PADDING = 64
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class KVTensors:
    num_blocks: int
    kv_caches: dict[str, list[Tensor]] = field(default_factory=dict)
    groups: list[list[str]] = field(default_factory=list)
    page_size_bytes: dict[str, int] = field(default_factory=dict)
    views: list[Tensor] = field(default_factory=list)
    # For each group, the indices of the `views` that a block consists of.
    members: list[list[int]] = field(default_factory=list)

    @property
    def parts(self) -> tuple[Parts, ...]:
        return tuple(tuple((i, _bytes(self.views[i])) for i in group) for group in self.members)

    def storages(self) -> list[Tensor]:
        """The memory of all tensors as bytes, each storage once."""
        found = {view.untyped_storage().data_ptr(): view.untyped_storage() for view in self.views}
        return [
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            for storage in found.values()
        ]

    def add(self, name: str, tensor: Tensor, dim: int) -> None:
        """Add a tensor of a layer. `dim` is the dimension of its blocks, or kernel blocks."""
        integers = tensor.view(_INTEGERS[tensor.element_size()]).movedim(dim, 0)
        self.kv_caches.setdefault(name, []).append(tensor)
        self.views.append(integers.view(self.num_blocks, -1, *integers.shape[1:]))

    def close_group(self, names: list[str], first: int) -> None:
        self.groups.append(names)
        self.members.append(list(range(first, len(self.views))))


def build(options: EngineOptions) -> KVTensors:
    """Allocate the tensors of an engine that owns them."""
    kv_tensors = KVTensors(options.num_blocks)
    for number, group in enumerate(options.groups):
        names = [f"group{number}.layer{i}" for i in range(group.layers)]
        if options.shared_groups and number:
            for name, shared_name in zip(names, kv_tensors.groups[0], strict=True):
                kv_tensors.kv_caches[name] = kv_tensors.kv_caches[shared_name]
            kv_tensors.groups.append(names)
            kv_tensors.members.append(kv_tensors.members[0])
            continue
        first = len(kv_tensors.views)
        _FORMS[options.form](kv_tensors, names, options, group)
        kv_tensors.close_group([name for name in names if name in kv_tensors.kv_caches], first)
    return kv_tensors


def canonical_layout(options: EngineOptions) -> KVLayout:
    """The layout for the daemon to allocate: K and V of each layer in one page, rows padded."""
    tensors: list[TensorLayout] = []
    groups: list[tuple[TensorRef, ...]] = []
    for group in options.groups:
        page = 2 * math.prod(group.page) * _dtype(options).itemsize
        refs = range(len(tensors), len(tensors) + group.layers)
        tensors += [TensorLayout(options.num_blocks, page, page + options.row_padding)] * len(refs)
        groups.append(tuple(TensorRef(ref, page) for ref in refs))
    return KVLayout(tuple(tensors), tuple(groups), options.block_size_factor)


def adopt(options: EngineOptions, layout: KVLayout, tensors: Sequence[Tensor]) -> KVTensors:
    """Use tensors that the daemon has allocated."""
    adopted = KVTensors(options.num_blocks, views=list(tensors))
    adopted.members = [[ref.tensor for ref in group] for group in layout.groups]
    return adopted


def _bytes(view: Tensor) -> int:
    return math.prod(view.shape[1:]) * view.element_size()


def _dtype(options: EngineOptions) -> torch.dtype:
    dtype = getattr(torch, options.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _make(options: EngineOptions, *shape: int) -> Tensor:
    if options.memory == "share_memory":
        plain: Any = torch.empty(shape, dtype=_dtype(options), device=options.device)
        shared: Tensor = plain.share_memory_()
        return shared
    return shared_empty(shape, _dtype(options), options.device)


def _sizes(options: EngineOptions, group: GroupOptions) -> tuple[int, int, int, int]:
    """(blocks of the kernel, tokens in each, heads, head size)."""
    tokens, heads, dim = group.page
    return options.num_blocks * options.kernel_blocks, tokens // options.kernel_blocks, heads, dim


def _blocks_first(
    kv_tensors: KVTensors, names: list[str], o: EngineOptions, g: GroupOptions
) -> None:
    blocks, tokens, heads, dim = _sizes(o, g)
    for name in names:
        kv_tensors.add(name, _make(o, blocks, 2, tokens, heads, dim), 0)


def _blocks_first_hnd(
    kv_tensors: KVTensors, names: list[str], o: EngineOptions, g: GroupOptions
) -> None:
    blocks, tokens, heads, dim = _sizes(o, g)
    for name in names:
        kv_tensors.add(name, _make(o, blocks, 2, heads, tokens, dim).transpose(2, 3), 0)


def _split(kv_tensors: KVTensors, names: list[str], o: EngineOptions, g: GroupOptions) -> None:
    blocks, tokens, heads, dim = _sizes(o, g)
    for name in names:
        kv_tensors.add(name, _make(o, 2, blocks, tokens, heads, dim), 1)


def _split_hnd(kv_tensors: KVTensors, names: list[str], o: EngineOptions, g: GroupOptions) -> None:
    blocks, tokens, heads, dim = _sizes(o, g)
    for name in names:
        kv_tensors.add(name, _make(o, 2, blocks, heads, tokens, dim).transpose(2, 3), 1)


def _separate(kv_tensors: KVTensors, names: list[str], o: EngineOptions, g: GroupOptions) -> None:
    for name in names:
        for _ in "kv":
            kv_tensors.add(name, _make(o, *_sizes(o, g)), 0)


def _mla(kv_tensors: KVTensors, names: list[str], o: EngineOptions, g: GroupOptions) -> None:
    blocks, tokens, heads, dim = _sizes(o, g)
    for name in names:
        kv_tensors.add(name, _make(o, blocks, tokens, heads * dim), 0)


def _cross_layer(
    kv_tensors: KVTensors, names: list[str], o: EngineOptions, g: GroupOptions
) -> None:
    blocks, tokens, heads, dim = _sizes(o, g)
    kv_tensors.add(names[0], _make(o, blocks, len(names), 2, tokens, heads, dim), 0)


def _interleaved(
    kv_tensors: KVTensors, names: list[str], o: EngineOptions, g: GroupOptions
) -> None:
    """Layers alternate in one tensor: between the rows of a layer are rows of other layers."""
    blocks, tokens, heads, dim = _sizes(o, g)
    all_layers = _make(o, blocks, len(names), 2, tokens, heads, dim)
    for i, name in enumerate(names):
        kv_tensors.add(name, all_layers[:, i], 0)


def _padded(kv_tensors: KVTensors, names: list[str], o: EngineOptions, g: GroupOptions) -> None:
    """A gap after each block that is not part of the tensor's shape."""
    blocks, tokens, heads, dim = _sizes(o, g)
    for name in names:
        rows = _make(o, blocks, 2 * tokens * heads * dim + PADDING)[:, :-PADDING]
        kv_tensors.add(name, rows.view(blocks, 2, tokens, heads, dim), 0)


def _tail(kv_tensors: KVTensors, names: list[str], o: EngineOptions, g: GroupOptions) -> None:
    """A gap after each block that is part of the tensor's shape, and is declared."""
    blocks, tokens, heads, dim = _sizes(o, g)
    for name in names:
        rows = _make(o, blocks, 2 * tokens * heads * dim + PADDING)
        kv_tensors.add(name, rows[:, :-PADDING], 0)
        kv_tensors.kv_caches[name] = [rows]
        kv_tensors.page_size_bytes[name] = _bytes(kv_tensors.views[-1])


_FORMS: dict[str, Callable[[KVTensors, list[str], EngineOptions, GroupOptions], None]] = {
    "blocks_first": _blocks_first,
    "blocks_first_hnd": _blocks_first_hnd,
    "split": _split,
    "split_hnd": _split_hnd,
    "separate": _separate,
    "mla": _mla,
    "cross_layer": _cross_layer,
    "interleaved": _interleaved,
    "padded": _padded,
    "tail": _tail,
}
