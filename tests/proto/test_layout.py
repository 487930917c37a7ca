"""LayoutArrays accepts consistent layouts up to the size that models need."""

from __future__ import annotations

import msgspec
import pytest

from kvferry.proto.errors import Code, Refused
from kvferry.proto.layout import LayoutArrays
from kvferry.proto.specs import MAX_GROUPS, MAX_REFS, MAX_TENSORS, KVLayout, TensorLayout, TensorRef

TENSORS = (TensorLayout(4, 100, 128), TensorLayout(8, 50, 50))


def layout(tensors: int, groups: list[int]) -> KVLayout:
    """A layout with `tensors` tensors. Each group refers to the given number of first tensors."""
    refs = [TensorRef(tensor, 8) for tensor in range(max(groups, default=0))]
    return KVLayout(
        (TensorLayout(4, 8, 8),) * tensors, tuple(tuple(refs[:count]) for count in groups)
    )


@pytest.mark.parametrize(
    ("layout", "code", "message", "value"),
    [
        (
            KVLayout((TensorLayout(2, 9, 8),), ((TensorRef(0, 1),),)),
            Code.BAD_LAYOUT,
            "tensor 0 has a row stride of 8 bytes, smaller than its page of 9",
            "8",
        ),
        (
            KVLayout(TENSORS, ((TensorRef(0, 1),), (TensorRef(1, 1), TensorRef(2, 1)))),
            Code.UNKNOWN_TENSOR,
            "group 1 refers to tensor 2, but there are 2 tensors",
            "2",
        ),
        (
            KVLayout(TENSORS, ((TensorRef(0, 1),), (TensorRef(1, 51),))),
            Code.BAD_LAYOUT,
            "group 1 copies 51 bytes per page of tensor 1, whose pages have 50",
            "51",
        ),
        (
            KVLayout(TENSORS, ((TensorRef(0, 101),),)),
            Code.BAD_LAYOUT,
            "group 0 copies 101 bytes per page of tensor 0, whose pages have 100",
            "101",
        ),
        (
            KVLayout(TENSORS, ((TensorRef(1, 1),), (TensorRef(1, 1), TensorRef(1, 2)))),
            Code.BAD_LAYOUT,
            "group 1 refers to tensor 1 twice",
            "1",
        ),
        (KVLayout(TENSORS, ()), Code.BAD_LAYOUT, "0 groups", "0"),
        (KVLayout(TENSORS, ((TensorRef(0, 1),), ())), Code.BAD_LAYOUT, "group 1 refers to no", "1"),
        (
            layout(MAX_TENSORS + 1, [1]),
            Code.BAD_LAYOUT,
            f"{MAX_TENSORS + 1} tensors",
            str(MAX_TENSORS + 1),
        ),
        (
            KVLayout(TENSORS, ((TensorRef(0, 8), TensorRef(1, 8)), (TensorRef(1, 8),)), sections=2),
            Code.BAD_LAYOUT,
            "2 sections of 2 groups, one of which has 1 references",
            "2",
        ),
        (
            KVLayout(TENSORS, ((TensorRef(0, 8), TensorRef(1, 8)),) * 129, sections=2),
            Code.BAD_LAYOUT,
            "2 sections of 129 groups",
            "2",
        ),
        (
            layout(1, [1] * (MAX_GROUPS + 1)),
            Code.BAD_LAYOUT,
            f"{MAX_GROUPS + 1} groups",
            str(MAX_GROUPS + 1),
        ),
        (
            layout(MAX_TENSORS, [4096, 4096, 4096, 4095, 2]),
            Code.BAD_LAYOUT,
            f"have {MAX_REFS + 1} references to tensors, more than {MAX_REFS}",
            str(MAX_REFS + 1),
        ),
    ],
)
def test_an_inconsistent_or_too_large_layout_is_refused(
    layout: KVLayout, code: Code, message: str, value: str
) -> None:
    with pytest.raises(Refused, match=message) as caught:
        LayoutArrays.from_layout(layout)
    assert (caught.value.code, caught.value.value) == (code, value)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout(512, [512] * 16), id="hybrid: 16 groups over the same 512 tensors"),
        pytest.param(layout(256, [256]), id="one group, 128 layers with separate K and V"),
        pytest.param(layout(2 * 61 * 16, [2 * 61 * 16]), id="padded kernel blocks, 16 in a block"),
        pytest.param(layout(64, [2] * MAX_GROUPS), id="the most groups"),
        pytest.param(layout(MAX_TENSORS, [MAX_TENSORS] * 4), id="the largest"),
        pytest.param(KVLayout(TENSORS, ((TensorRef(1, 7), TensorRef(0, 9)),), 3), id="any order"),
        pytest.param(
            KVLayout(TENSORS, ((TensorRef(1, 7), TensorRef(0, 9)),), sections=2), id="sections"
        ),
    ],
)
def test_layouts_of_engines_are_accepted_and_unchanged(layout: KVLayout) -> None:
    arrays = LayoutArrays.from_layout(layout)
    assert msgspec.convert(arrays.to_lists(), KVLayout) == layout
    assert arrays == LayoutArrays.from_layout(layout)
    assert arrays.group_bytes == [layout.group_bytes(g) for g in range(len(layout.groups))]
    assert arrays.host_block_bytes == layout.host_block_bytes
    assert arrays.span_bytes == [tensor.span_bytes for tensor in layout.tensors]


@pytest.mark.parametrize(
    "other",
    [
        KVLayout(TENSORS, ((TensorRef(0, 8),), (TensorRef(1, 8),)), 2),
        KVLayout(TENSORS, ((TensorRef(0, 8), TensorRef(1, 8)),)),
        KVLayout(TENSORS, ((TensorRef(0, 8),), (TensorRef(1, 9),))),
        KVLayout(TENSORS, ((TensorRef(0, 8),), (TensorRef(0, 8),))),
        KVLayout((TENSORS[0], TensorLayout(9, 50, 50)), ((TensorRef(0, 8),), (TensorRef(1, 8),))),
    ],
    ids=["factor", "groups", "page", "tensor", "blocks"],
)
def test_layouts_with_any_difference_are_unequal(other: KVLayout) -> None:
    arrays = LayoutArrays.from_layout(KVLayout(TENSORS, ((TensorRef(0, 8),), (TensorRef(1, 8),))))
    assert arrays != LayoutArrays.from_layout(other)
