"""Device pointers instead of block ids, as vLLM's pull request 56076 gives them to workers.

The pull request (https://github.com/vllm-project/vllm/pull/56076, open) has DevicePointers in
vllm/v1/kv_offload/base.py, and their order in vllm/v1/kv_offload/pointer_utils.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvferry.client.tensors.canonical import CanonicalKVCaches
from kvferry.client.vllm.device_pointers import DevicePointerReader
from kvferry.client.vllm.scheduler_side import KeysSpec
from kvferry.proto.errors import Code, Refused
from kvferry.proto.specs import KVLayout, TensorLayout, TensorRef
from kvferry.testing.plugin import StartKvferryd
from support.vllm_stand_ins import finished, gpu_blocks, kv_caches, open_worker

KEY = b"a" * 8
# Two groups of two tensors each; the second one uses a part of the pages, and the last tensor has
# padding between its pages.
PAGES, STRIDES, BLOCKS = (64, 32, 48), (64, 32, 96), (8, 8, 6)
GROUPS = ((TensorRef(0, 64), TensorRef(1, 32)), (TensorRef(1, 16), TensorRef(2, 48)))
IDS = SimpleNamespace(block_ids=[5, 0, 3, 2, 1], group_sizes=[3, 2], block_indices=[7, 0])


@dataclass
class DevicePointers:
    """Addresses and bytes (uint64): of each group, for each tensor, for each block.

    group_block_counts, group_data_ref_counts: blocks and tensors of each group. block_indices: as
    in vLLM's GPULoadStoreSpec.
    """

    ptrs: Any
    sizes: Any
    group_block_counts: tuple[int, ...]
    group_data_ref_counts: tuple[int, ...]
    block_indices: tuple[int, ...]


def device_pointers(spec: Any, kv_caches: Any) -> DevicePointers:
    """Those of a GPULoadStoreSpec. kv_caches: vLLM's CanonicalKVCaches."""
    pointers: list[int] = []
    sizes: list[int] = []
    ids = iter(int(block) for block in spec.block_ids)
    for count, refs in zip(spec.group_sizes, kv_caches.group_data_refs, strict=True):
        blocks = [next(ids) for _ in range(count)]
        for ref in refs:
            tensor = kv_caches.tensors[ref.tensor_idx].tensor
            pointers += [tensor.data_ptr() + block * tensor.stride(0) for block in blocks]
            sizes += [ref.page_size_bytes] * count
    assert not [*ids]
    return DevicePointers(
        np.array(pointers, np.uint64),
        np.array(sizes, np.uint64),
        tuple(spec.group_sizes),
        tuple(len(refs) for refs in kv_caches.group_data_refs),
        tuple(spec.block_indices),
    )


def two_groups() -> tuple[CanonicalKVCaches, Any]:
    """kvferry's canonical KV caches, and vLLM's of the same tensors."""
    tensors = tuple(
        torch.zeros(blocks * stride, dtype=torch.int8).as_strided((blocks, page), (stride, 1))
        for page, stride, blocks in zip(PAGES, STRIDES, BLOCKS, strict=True)
    )
    shapes = zip(BLOCKS, PAGES, STRIDES, strict=True)
    layout = KVLayout(tuple(TensorLayout(*shape) for shape in shapes), GROUPS)
    vllms = SimpleNamespace(
        tensors=[SimpleNamespace(tensor=tensor) for tensor in tensors],
        group_data_refs=[
            [SimpleNamespace(tensor_idx=r.tensor, page_size_bytes=r.page_size_bytes) for r in refs]
            for refs in GROUPS
        ],
    )
    return CanonicalKVCaches(layout, tensors), vllms


@pytest.mark.parametrize("sizes", [(3, 2), (5, 0), (0, 5), (0, 0)])
def test_pointers_are_translated_back_to_block_ids(sizes: tuple[int, int]) -> None:
    caches, vllms = two_groups()
    ids = [5, 0, 3, 2, 1][: sum(sizes)]
    spec = SimpleNamespace(block_ids=ids, group_sizes=list(sizes), block_indices=[7, 0])
    found = DevicePointerReader(caches).gpu_spec(device_pointers(spec, vllms))
    assert found.block_ids.tolist() == ids
    assert (found.group_sizes, found.block_indices) == (sizes, (7, 0))


def moved(column: int, nbytes: int) -> Callable[[DevicePointers], DevicePointers]:
    def move(pointers: DevicePointers) -> DevicePointers:
        ptrs = pointers.ptrs.astype(np.int64)
        ptrs[column] += nbytes
        return replace(pointers, ptrs=ptrs.astype(np.uint64))

    return move


def resized(pointers: DevicePointers) -> DevicePointers:
    return replace(pointers, sizes=pointers.sizes // 2)


def cut(pointers: DevicePointers) -> DevicePointers:
    return replace(pointers, ptrs=pointers.ptrs[:-1])


def of_one_group(pointers: DevicePointers) -> DevicePointers:
    return replace(pointers, group_block_counts=(5,), group_data_ref_counts=(2,))


# The pointers 0 to 2 are of tensor 0, 3 to 7 of tensor 1, 8 and 9 of tensor 2.
@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        (moved(1, 8), Code.BAD_SPEC, "is 8 bytes after the start of block 0 in tensor 0"),
        (moved(9, 1), Code.BAD_SPEC, "is 1 bytes after the start of block 1 in tensor 2"),
        (moved(0, 3 * 64), Code.BLOCK_OUT_OF_RANGE, "is outside tensor 0, which is at 0x"),
        (moved(1, -64), Code.BLOCK_OUT_OF_RANGE, "is outside tensor 0"),
        (moved(8, 4 * 96), Code.BLOCK_OUT_OF_RANGE, "is outside tensor 2"),
        (moved(4, 32), Code.BAD_SPEC, "is block 1 in tensor 1, but the pointer to tensor 0 is"),
        (
            resized,
            Code.SIZE_MISMATCH,
            "copies 32 bytes of block 5 in tensor 0, but its page has 64",
        ),
        (cut, Code.BAD_SPEC, "gave 9 pointers and 10 sizes, but (3, 2) blocks of (2, 2) tensors"),
        (of_one_group, Code.BAD_SPEC, "are for (2,) tensors of the KV cache groups, but (2, 2)"),
    ],
)
def test_pointers_that_are_no_whole_blocks_are_refused(
    change: Callable[[DevicePointers], DevicePointers], code: Code, message: str
) -> None:
    caches, vllms = two_groups()
    with pytest.raises(Refused) as refused:
        DevicePointerReader(caches).gpu_spec(change(device_pointers(IDS, vllms)))
    assert refused.value.code == code
    assert message in str(refused.value)
    assert "use vLLM 0.26 to 0.33" in str(refused.value)


def test_a_worker_stores_and_loads_by_pointers(
    start_kvferryd: StartKvferryd, caplog: pytest.LogCaptureFixture
) -> None:
    """Pointers that are not its tensors' fail the job, and the first one warns."""
    caches = kv_caches()
    tensor = caches.tensors[0].tensor
    worker = open_worker(start_kvferryd(), caches)
    tensor[1] = 7
    worker.store(1, device_pointers(gpu_blocks(1), caches), KeysSpec((KEY,)))
    assert finished(worker, 1)[1].success
    worker.load(2, KeysSpec((KEY,)), device_pointers(gpu_blocks(4), caches))
    assert finished(worker, 1)[2].success
    assert (tensor[4] == 7).all()
    wrong = moved(0, 1)(device_pointers(gpu_blocks(5), caches))
    worker.load(3, KeysSpec((KEY,)), wrong)
    worker.store(4, wrong, KeysSpec((KEY,)))
    for result in finished(worker, 2).values():
        assert not result.success
        assert result.error is not None
        assert result.error.code == Code.BAD_SPEC
    assert caplog.text.count("transfers of this vLLM fail") == 1
    worker.shutdown()
