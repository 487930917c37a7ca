"""An engine's KV tensors, in the shapes that engines give them.

`kv_caches` and `groups` are what an engine hands to register_kv_caches. `views` are the same memory
as the engine's kernels see it: for each tensor, integers of shape (blocks, what one block holds...)
in the order of the tensor's own dimensions. They are made without canonicalize, so that a block
mapped wrongly there is a block with wrong bytes here.
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

PADDING = 64
"""Elements behind each block in the padded forms."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class KVTensors:
    num_blocks: int
    kv_caches: dict[str, list[Tensor]] = field(default_factory=dict)
    groups: list[list[str]] = field(default_factory=list)
    page_size_bytes: dict[str, int] = field(default_factory=dict)
    views: list[Tensor] = field(default_factory=list)
    members: list[list[int]] = field(default_factory=list)
    """Which of `views` a block of each group consists of."""

    @property
    def parts(self) -> tuple[Parts, ...]:
        return tuple(tuple((i, _bytes(self.views[i])) for i in group) for group in self.members)

    def storages(self) -> list[Tensor]:
        """All memory that the tensors lie in, as bytes, each once."""
        found = {view.untyped_storage().data_ptr(): view.untyped_storage() for view in self.views}
        return [
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            for storage in found.values()
        ]

    def add(self, name: str, tensor: Tensor, dim: int) -> None:
        """One of a layer's tensors; `dim` counts its blocks, or the kernel's part blocks."""
        integers = tensor.view(_INTEGERS[tensor.element_size()]).movedim(dim, 0)
        self.kv_caches.setdefault(name, []).append(tensor)
        self.views.append(integers.view(self.num_blocks, -1, *integers.shape[1:]))

    def close_group(self, names: list[str], first: int) -> None:
        self.groups.append(names)
        self.members.append(list(range(first, len(self.views))))


def build(options: EngineOptions) -> KVTensors:
    """The tensors of an engine that owns them."""
    made = KVTensors(options.num_blocks)
    for number, group in enumerate(options.groups):
        names = [f"group{number}.layer{i}" for i in range(group.layers)]
        if options.shared_groups and number:
            for name, twin in zip(names, made.groups[0], strict=True):
                made.kv_caches[name] = made.kv_caches[twin]
            made.groups.append(names)
            made.members.append(made.members[0])
            continue
        first = len(made.views)
        _FORMS[options.form](made, names, options, group)
        made.close_group([name for name in names if name in made.kv_caches], first)
    return made


def canonical_layout(options: EngineOptions) -> KVLayout:
    """The layout to ask the daemon for: K and V of each layer in one page, rows padded."""
    tensors: list[TensorLayout] = []
    groups: list[tuple[TensorRef, ...]] = []
    for group in options.groups:
        page = 2 * math.prod(group.page) * _dtype(options).itemsize
        refs = range(len(tensors), len(tensors) + group.layers)
        tensors += [TensorLayout(options.num_blocks, page, page + options.row_padding)] * len(refs)
        groups.append(tuple(TensorRef(ref, page) for ref in refs))
    return KVLayout(tuple(tensors), tuple(groups), options.block_size_factor)


def adopt(options: EngineOptions, layout: KVLayout, tensors: Sequence[Tensor]) -> KVTensors:
    """Tensors that the daemon made."""
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


def _blocks_first(made: KVTensors, names: list[str], o: EngineOptions, g: GroupOptions) -> None:
    blocks, tokens, heads, dim = _sizes(o, g)
    for name in names:
        made.add(name, _make(o, blocks, 2, tokens, heads, dim), 0)


def _blocks_first_hnd(made: KVTensors, names: list[str], o: EngineOptions, g: GroupOptions) -> None:
    blocks, tokens, heads, dim = _sizes(o, g)
    for name in names:
        made.add(name, _make(o, blocks, 2, heads, tokens, dim).transpose(2, 3), 0)


def _split(made: KVTensors, names: list[str], o: EngineOptions, g: GroupOptions) -> None:
    blocks, tokens, heads, dim = _sizes(o, g)
    for name in names:
        made.add(name, _make(o, 2, blocks, tokens, heads, dim), 1)


def _split_hnd(made: KVTensors, names: list[str], o: EngineOptions, g: GroupOptions) -> None:
    blocks, tokens, heads, dim = _sizes(o, g)
    for name in names:
        made.add(name, _make(o, 2, blocks, heads, tokens, dim).transpose(2, 3), 1)


def _separate(made: KVTensors, names: list[str], o: EngineOptions, g: GroupOptions) -> None:
    for name in names:
        for _ in "kv":
            made.add(name, _make(o, *_sizes(o, g)), 0)


def _mla(made: KVTensors, names: list[str], o: EngineOptions, g: GroupOptions) -> None:
    blocks, tokens, heads, dim = _sizes(o, g)
    for name in names:
        made.add(name, _make(o, blocks, tokens, heads * dim), 0)


def _cross_layer(made: KVTensors, names: list[str], o: EngineOptions, g: GroupOptions) -> None:
    blocks, tokens, heads, dim = _sizes(o, g)
    made.add(names[0], _make(o, blocks, len(names), 2, tokens, heads, dim), 0)


def _interleaved(made: KVTensors, names: list[str], o: EngineOptions, g: GroupOptions) -> None:
    """Layers take turns in one tensor: each has rows with other data between them."""
    blocks, tokens, heads, dim = _sizes(o, g)
    whole = _make(o, blocks, len(names), 2, tokens, heads, dim)
    for i, name in enumerate(names):
        made.add(name, whole[:, i], 0)


def _padded(made: KVTensors, names: list[str], o: EngineOptions, g: GroupOptions) -> None:
    """A gap behind each block that the tensor's shape does not show."""
    blocks, tokens, heads, dim = _sizes(o, g)
    for name in names:
        rows = _make(o, blocks, 2 * tokens * heads * dim + PADDING)[:, :-PADDING]
        made.add(name, rows.view(blocks, 2, tokens, heads, dim), 0)


def _tail(made: KVTensors, names: list[str], o: EngineOptions, g: GroupOptions) -> None:
    """A gap behind each block that is part of the tensor's shape, and is declared."""
    blocks, tokens, heads, dim = _sizes(o, g)
    for name in names:
        rows = _make(o, blocks, 2 * tokens * heads * dim + PADDING)
        made.add(name, rows[:, :-PADDING], 0)
        made.kv_caches[name] = [rows]
        made.page_size_bytes[name] = _bytes(made.views[-1])


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
