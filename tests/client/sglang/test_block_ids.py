"""Slots of the tree become block numbers. No SGLang needed."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kvferry.client import Refused
from kvferry.client.sglang.block_ids import BlockIds
from kvferry.proto.errors import Code
from support.client_keys import A, B, C, D
from support.sglang_stand_ins import NamedSource, pages

E, F, G = b"eeee", b"ffff", b"gggg"
KV, STATE = NamedSource("kv", 4, range(1)), NamedSource("mamba", 1, range(1, 3))


def test_pages_of_one_source() -> None:
    blocks = BlockIds([pages(KV, [(A,), (B,), (C,)], [7, 2, 5])], 1)
    assert blocks.ready
    blocks.wait()
    assert blocks.keys() == [A, B, C]
    spec = blocks.spec()
    assert spec.block_ids.tolist() == [7, 2, 5]
    assert (spec.group_sizes, spec.block_indices) == ((3,), (0,))


def test_each_group_of_a_source_has_the_pages_blocks() -> None:
    divided = NamedSource("kv", 4, range(3))
    blocks = BlockIds([pages(divided, [(A, B, C), (D, E, F)], [7, 2])], 3)
    assert blocks.keys() == [A, D, B, E, C, F]  # group by group
    spec = blocks.spec()
    assert spec.block_ids.tolist() == [7, 2, 7, 2, 7, 2]
    assert spec.group_sizes == (2, 2, 2)


def test_sources_follow_each_other() -> None:
    """A group without pages has no blocks."""
    both = [pages(KV, [(A,), (B,)], [7, 2]), pages(STATE, [(C, D)], [9])]
    blocks = BlockIds(both, 4)
    assert blocks.keys() == [A, B, C, D]
    spec = blocks.spec()
    assert spec.block_ids.tolist() == [7, 2, 9, 9]
    assert (spec.group_sizes, spec.block_indices) == ((2, 1, 1, 0), (0, 0, 0, 0))


def test_some_keys_are_chosen_in_the_order_of_the_pages() -> None:
    both = [pages(KV, [(A,), (B,), (C,)], [7, 2, 5]), pages(STATE, [(D, E), (F, G)], [9, 3])]
    blocks = BlockIds(both, 3)
    spec = blocks.spec([G, C, D, A])
    assert spec.block_ids.tolist() == [7, 5, 9, 3]
    assert spec.group_sizes == (2, 1, 1)
    assert blocks.spec([]).block_ids.tolist() == []
    assert blocks.spec([]).group_sizes == (0, 0, 0)


@pytest.mark.parametrize(
    ("slots", "found"),
    [
        (range(1, 9), "2 slots"),  # not aligned
        (range(4), "1 slots"),  # a page less than keys
    ],
)
def test_slots_that_are_no_pages_are_refused(slots: range, found: str) -> None:
    wrong = dataclasses.replace(
        pages(KV, [(A,), (B,)], [0, 1]), indices=torch.tensor([*slots], dtype=torch.int64)
    )
    with pytest.raises(Refused, match=f"{found} of kv are not the pages of 2 keys") as refused:
        BlockIds([wrong], 1).spec()
    assert refused.value.code == Code.BAD_SPEC


def test_slots_that_are_changed_later_do_not_change_the_blocks() -> None:
    """The tree may reuse its tensors while a store waits."""
    given = pages(KV, [(A,)], [7])
    blocks = BlockIds([given], 1)
    given.indices.zero_()
    assert blocks.spec().block_ids.tolist() == [7]
