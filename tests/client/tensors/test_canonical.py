"""Canonical form of every layout that engines use.

The engine writes numbers through its own view. The canonical pages of a block must have exactly
the numbers that the engine wrote into that block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from kvferry.client.tensors.canonical import CanonicalKVCaches, canonicalize
from kvferry.proto.errors import Code, Refused
from kvferry.proto.specs import KVLayout, TensorLayout, TensorRef

# Blocks, tokens per block, KV heads, head size, layers.
N, SIZE, HEADS, DIM, LAYERS = 5, 4, 3, 2, 3
# Bytes of K (or V) of one block. Elements have two bytes.
HALF = SIZE * HEADS * DIM * 2
BOTH = 2 * HALF
# Bytes of K of one block, padded by one token.
PADDED = HALF // SIZE * (SIZE + 1)


def new_tensor(*shape: int) -> Tensor:
    return torch.full(shape, -1, dtype=torch.int16)


def write(view: Tensor, start: int = 0) -> Tensor:
    """Write a unique number into every element of the engine's view."""
    assert view.numel() < 1 << 15
    view.copy_(torch.arange(start, start + view.numel(), dtype=torch.int16).view(view.shape))
    return view


def numbers(tensor: Tensor) -> list[int]:
    return sorted(int(n) for n in tensor.reshape(-1))


def pages(canonical: CanonicalKVCaches, group: int, block: int) -> list[int]:
    """The numbers in the pages of a group's block, sorted."""
    refs = canonical.layout.groups[group]
    parts = [canonical.tensors[r.tensor][block, : r.page_size_bytes] for r in refs]
    return numbers(torch.cat([part.contiguous() for part in parts]).view(torch.int16))


def check(
    canonical: CanonicalKVCaches, views: Sequence[tuple[Tensor, int]], blocks: int = N
) -> None:
    """Check that group 0's pages of each block equal the block in `views` (tensor, block dim)."""
    for index, (tensor, layout) in enumerate(
        zip(canonical.tensors, canonical.layout.tensors, strict=True)
    ):
        assert tensor.dtype is torch.int8, index
        assert tensor.shape == (layout.num_blocks, layout.page_size_bytes)
        assert tensor.stride() == (layout.row_stride_bytes, 1)
        assert layout.num_blocks == blocks
    for block in range(blocks):
        expected_numbers: list[int] = []
        for view, dim in views:
            k = view.size(dim) // blocks
            expected_numbers += numbers(view.narrow(dim, block * k, k))
        assert pages(canonical, 0, block) == sorted(expected_numbers)


# One tensor per layer


@dataclass(frozen=True)
class LayoutCase:
    """A layer's tensor, and its canonical form.

    dim: the block dimension of `view`. expected: the canonical tensors.
    """

    view: Callable[[], Tensor]
    dim: int
    expected: list[TensorLayout]
    block_dim: int | None = None


def tensors(
    count: int, page: int, stride: int | None = None, blocks: int = N
) -> list[TensorLayout]:
    return [TensorLayout(blocks, page, stride or page)] * count


CASES = {
    "split K and V": LayoutCase(lambda: new_tensor(2, N, SIZE, HEADS, DIM), 1, tensors(2, HALF)),
    "split K and V, HND": LayoutCase(
        lambda: new_tensor(2, N, HEADS, SIZE, DIM).permute(0, 1, 3, 2, 4), 1, tensors(2, HALF)
    ),
    "split K and V, interleaved by block": LayoutCase(
        lambda: new_tensor(N, 2, SIZE, HEADS, DIM).permute(1, 0, 2, 3, 4), 1, tensors(1, BOTH)
    ),
    "split K and V, interleaved by head": LayoutCase(
        lambda: new_tensor(N, HEADS, 2, SIZE, DIM).permute(2, 0, 3, 1, 4), 1, tensors(1, BOTH)
    ),
    "split K and V, rows padded": LayoutCase(
        lambda: new_tensor(2, N, SIZE + 1, HEADS, DIM)[:, :, :SIZE], 1, tensors(2, HALF, PADDED)
    ),
    "blocks first": LayoutCase(lambda: new_tensor(N, 2, SIZE, HEADS, DIM), 0, tensors(1, BOTH)),
    "blocks first, HND": LayoutCase(
        lambda: new_tensor(N, 2, HEADS, SIZE, DIM).permute(0, 1, 3, 2, 4), 0, tensors(1, BOTH)
    ),
    "blocks first, but K and V apart": LayoutCase(
        lambda: new_tensor(2, N, SIZE, HEADS, DIM).permute(1, 0, 2, 3, 4), 0, tensors(2, HALF)
    ),
    "blocks first, rows padded": LayoutCase(
        lambda: new_tensor(N, 3, SIZE, HEADS, DIM)[:, :2], 0, tensors(1, BOTH, 3 * HALF)
    ),
    "MLA": LayoutCase(lambda: new_tensor(N, SIZE, 7), 0, tensors(1, SIZE * 14)),
    "MLA, from the middle of a storage": LayoutCase(
        lambda: new_tensor(N + 3, SIZE, 7)[2 : 2 + N], 0, tensors(1, SIZE * 14)
    ),
    "cross-layer": LayoutCase(
        lambda: new_tensor(N, LAYERS, 2, SIZE, HEADS, DIM), 0, tensors(1, LAYERS * BOTH)
    ),
    "cross-layer, HND": LayoutCase(
        lambda: new_tensor(N, HEADS, LAYERS, 2, SIZE, DIM).permute(0, 2, 3, 4, 1, 5),
        0,
        tensors(1, LAYERS * BOTH),
    ),
    "cross-layer, but layers apart": LayoutCase(
        lambda: new_tensor(LAYERS, N, 2, SIZE, HEADS, DIM).permute(1, 0, 2, 3, 4, 5),
        0,
        tensors(LAYERS, BOTH),
    ),
    "one row a block": LayoutCase(lambda: new_tensor(N, 24), 0, tensors(1, 48)),
    "three kernel blocks a block, split": LayoutCase(
        lambda: new_tensor(2, 3 * N, SIZE, HEADS, DIM), 1, tensors(2, 3 * HALF)
    ),
    "three kernel blocks a block, blocks first": LayoutCase(
        lambda: new_tensor(3 * N, 2, SIZE, HEADS, DIM), 0, tensors(1, 6 * HALF)
    ),
    "two kernel blocks a block, padded": LayoutCase(
        lambda: new_tensor(2 * N, SIZE + 1, 7)[:, :SIZE],
        0,
        tensors(2, SIZE * 14, 2 * (SIZE + 1) * 14),
    ),
    "two kernel blocks a block, split and padded": LayoutCase(
        lambda: new_tensor(2, 2 * N, SIZE + 1, 6)[:, :, :SIZE],
        1,
        tensors(4, SIZE * 12, 2 * (SIZE + 1) * 12),
    ),
    "one block": LayoutCase(
        lambda: new_tensor(1, 3, SIZE, HEADS, DIM), 0, tensors(1, 3 * HALF, blocks=1)
    ),
    "two blocks, K and V split": LayoutCase(
        lambda: new_tensor(2, 2, SIZE, HEADS, DIM), 1, tensors(2, HALF, blocks=2), block_dim=1
    ),
    "two blocks first": LayoutCase(
        lambda: new_tensor(2, 2, SIZE, HEADS, DIM), 0, tensors(1, BOTH, blocks=2), block_dim=0
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_pages_of_a_block_have_exactly_its_bytes(name: str) -> None:
    case = CASES[name]
    view, blocks = write(case.view()), case.expected[0].num_blocks
    canonical = canonicalize({"layer": view}, num_blocks=blocks, block_dim=case.block_dim)
    assert canonical.layout.tensors == tuple(case.expected)
    refs = tuple(TensorRef(n, t.page_size_bytes) for n, t in enumerate(case.expected))
    assert canonical.layout == KVLayout(tuple(case.expected), (refs,), 1)
    check(canonical, [(view, case.dim)], blocks)
    for tensor in canonical.tensors:
        tensor.zero_()
    assert not view.any()  # they are the engine's memory


@pytest.mark.parametrize("name", CASES)
def test_arrays_of_numpy_have_the_form_of_tensors(name: str) -> None:
    case = CASES[name]
    view, blocks = case.view().fill_(7), case.expected[0].num_blocks
    canonical = canonicalize({"layer": view.numpy()}, num_blocks=blocks, block_dim=case.block_dim)
    assert canonical.layout.tensors == tuple(case.expected)
    for tensor, expected in zip(canonical.tensors, case.expected, strict=True):
        assert tuple(tensor.shape) == (expected.num_blocks, expected.page_size_bytes)
        tensor[:] = 0
    assert not view.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_pages_are_counted_in_bytes(dtype: torch.dtype) -> None:
    canonical = canonicalize({"layer": torch.zeros(2, N, 6, dtype=dtype)}, num_blocks=N)
    assert canonical.layout.tensors == tuple(tensors(2, 6 * dtype.itemsize, 6 * dtype.itemsize))


# Several layers, groups


def test_every_layer_has_its_tensors_in_one_group_and_in_order() -> None:
    split, mla = write(new_tensor(2, N, SIZE, 3)), write(new_tensor(N, SIZE, 7), 1000)
    canonical = canonicalize({"a": split, "b": mla}, num_blocks=N, block_size_factor=4)
    assert canonical.layout.groups == ((TensorRef(0, 24), TensorRef(1, 24), TensorRef(2, 56)),)
    assert canonical.layout.block_size_factor == 4
    check(canonical, [(split, 1), (mla, 0)])


def test_a_layer_may_have_several_tensors() -> None:
    """State-space layers do: their states share one padded page."""
    raw = new_tensor(N, 40)
    states = [write(raw[:, :12].view(N, 3, 4)), write(raw[:, 12:32].view(N, 2, 10), 1000)]
    canonical = canonicalize({"mamba": states}, num_blocks=N)
    assert canonical.layout.tensors == (TensorLayout(N, 24, 80), TensorLayout(N, 40, 80))
    check(canonical, [(state, 0) for state in states])


def test_layers_that_alias_the_same_memory_are_one_tensor() -> None:
    view = write(new_tensor(2, N, SIZE, 6))
    caches = {"a": view, "b": view, "c": view.view(2, N, SIZE, 2, 3)}
    canonical = canonicalize(caches, num_blocks=N)
    assert canonical.layout.groups == ((TensorRef(0, 48), TensorRef(1, 48)),)
    check(canonical, [(view, 1)])


def test_groups_name_their_layers_and_share_their_tensors() -> None:
    first, second = write(new_tensor(N, 12)), write(new_tensor(N, 20), 1000)
    caches = {"full.0": first, "window.0": first.view(N, 3, 4), "full.1": second}
    groups = [["full.0", "full.1"], ["window.0"]]
    canonical = canonicalize(caches, num_blocks=N, groups=groups)
    assert len(canonical.tensors) == 2
    assert canonical.layout.groups == ((TensorRef(0, 24), TensorRef(1, 40)), (TensorRef(0, 24),))
    for block in range(N):
        assert pages(canonical, 0, block) == numbers(torch.cat([first[block], second[block]]))
        assert pages(canonical, 1, block) == numbers(first[block])


def test_only_the_unpadded_page_is_copied() -> None:
    raw = new_tensor(N, 20)
    write(raw[:, :17])
    canonical = canonicalize({"layer": raw}, num_blocks=N, page_size_bytes={"layer": 34})
    assert canonical.layout.tensors == (TensorLayout(N, 34, 40),)
    check(canonical, [(raw[:, :17], 0)])


def test_layers_that_differ_in_padding_alone_still_share_memory() -> None:
    """In one group they are copied once, and as wide as the widest. Else a transfer of one group
    would not wait for a transfer of the other group's block."""
    raw = write(new_tensor(N, 20))
    caches, overrides = {"a": raw, "b": raw}, {"b": 34}
    canonical = canonicalize(caches, num_blocks=N, page_size_bytes=overrides)
    assert canonical.layout.groups == ((TensorRef(0, 40),),)
    check(canonical, [(raw, 0)])
    groups = [["a"], ["b"]]
    canonical = canonicalize(caches, num_blocks=N, groups=groups, page_size_bytes=overrides)
    assert canonical.layout.groups == ((TensorRef(0, 40),), (TensorRef(0, 34),))


# Refusals


def refused(
    view: Tensor, *, num_blocks: int = N, page: int | None = None, dim: int | None = None
) -> str:
    overrides: Mapping[str, int] | None = None if page is None else {"layer.7": page}
    with pytest.raises(Refused) as caught:
        canonicalize(
            {"layer.7": view}, num_blocks=num_blocks, page_size_bytes=overrides, block_dim=dim
        )
    assert caught.value.code == Code.BAD_LAYOUT
    assert "layer.7" in caught.value.value
    assert str(tuple(view.shape)) in caught.value.value
    return caught.value.message


@pytest.mark.parametrize(
    ("view", "num_blocks", "why"),
    [
        (new_tensor(2, 2, SIZE), 2, "dimensions 0 and 1 could both"),
        (new_tensor(2, 4, SIZE), 2, "dimensions 0 and 1 could both"),
        (new_tensor(2, 6, SIZE), 1, "dimensions 0 and 1 could both"),
        (new_tensor(3, N, SIZE), N, f"no dimension has {N} blocks"),
        (new_tensor(SIZE, HEADS, N), N, "no dimension"),
        (new_tensor(N - 1, SIZE), N, "no dimension"),
        (new_tensor(2, N + 1, SIZE), N, "no dimension"),
        (new_tensor(2), N, "no dimension"),
        (torch.tensor(1), N, "no dimension"),
        (new_tensor(N, SIZE, DIM)[:, 2:2], N, "no elements"),
        (new_tensor(N, 0), N, "no elements"),
        (new_tensor(0, SIZE), N, "no elements"),
        (new_tensor(N, SIZE, 8)[:, :, :4], N, "not contiguous"),
        (new_tensor(N, 8, DIM)[:, ::2], N, "not contiguous"),
        (new_tensor(N, 1, DIM).expand(N, SIZE, DIM), N, "not contiguous"),
        (new_tensor(N, 2, SIZE + 1, DIM)[:, :, :SIZE], N, "not contiguous"),
        (new_tensor(1, SIZE).expand(N, SIZE), N, "overlap"),
        (new_tensor(64).as_strided((N, 8), (6, 1)), N, "overlap"),
        (new_tensor(64).as_strided((2, N, 8), (8, 8, 1)), N, "overlap"),
        (new_tensor(99).as_strided((2, N, 8), (12, 16, 1)), N, "overlap|not contiguous"),
        (new_tensor(99).as_strided((2, N, 8), (20, 16, 1)), N, "overlap"),
    ],
)
def test_a_tensor_without_canonical_form_is_refused_by_name(
    view: Tensor, num_blocks: int, why: str
) -> None:
    message = refused(view, num_blocks=num_blocks)
    assert any(part in message for part in why.split("|")), message


def test_a_block_dimension_or_page_that_does_not_fit_is_refused() -> None:
    assert "multiple" in refused(new_tensor(2, N, SIZE), dim=2)
    refused(new_tensor(2, N, SIZE), dim=3)
    page = 2 * SIZE + 1
    assert f"a page of {page} bytes" in refused(new_tensor(2, N, SIZE), page=page)


TENSOR = new_tensor(N, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(
            ({"num_blocks": number}, "num_blocks must be a whole number from 1 to")
            for number in (0, -1, float(N), str(N), None, True, 1 << 70)
        ),
        ({"block_dim": -2}, "block_dim must be a whole number from 0 to"),
        ({"block_dim": 0.0}, "block_dim must be a whole number from 0 to"),
        ({"page_size_bytes": 4}, "page_size_bytes must be a dict of layer name to bytes"),
        *(
            ({"page_size_bytes": {"a": page}}, "page_size_bytes of layer 'a' must be a whole")
            for page in (0, -2, 4.0)
        ),
        ({"groups": "a"}, "groups must be a list with a list of layer names"),
        ({"groups": ["a"]}, "groups must be a list with a list of layer names"),
        ({"groups": 5}, "groups must be a list with a list of layer names"),
        ({"kv_caches": [TENSOR]}, "kv_caches must be a dict of layer name to tensor"),
        ({"kv_caches": TENSOR}, "kv_caches must be a dict of layer name to tensor"),
        ({"kv_caches": None}, "kv_caches must be a dict of layer name to tensor"),
        *(
            ({"kv_caches": {"a": value}}, "layer 'a' must be a tensor, or a list of tensors")
            for value in (None, "b", 5, [[1, 2]])
        ),
    ],
)
def test_arguments_of_a_wrong_type_are_refused(arguments: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"kv_caches": {"a": TENSOR}, "num_blocks": N}
    with pytest.raises(Refused, match=message) as caught:
        canonicalize(**given | arguments)
    assert caught.value.code == Code.BAD_LAYOUT


def test_groups_that_name_nothing_are_refused() -> None:
    for caches, groups, code in (
        ({"a": TENSOR}, [["a"], ["b"]], Code.UNKNOWN_TENSOR),
        ({"a": TENSOR}, [["a"], []], Code.BAD_LAYOUT),
        ({}, None, Code.BAD_LAYOUT),
    ):
        with pytest.raises(Refused) as caught:
            canonicalize(caches, num_blocks=N, groups=groups)
        assert caught.value.code == code
