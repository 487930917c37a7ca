"""Transfer specs: block ids as arrays, equality, directions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvferry.proto.errors import Code, Refused
from kvferry.proto.specs import (
    MAX_BLOCK_IDS,
    CPULoadStoreSpec,
    Direction,
    GPULoadStoreSpec,
    KeyLoadStoreSpec,
    as_block_ids,
)


@pytest.mark.parametrize(
    ("given_ids", "dtype"),
    [
        ([3, 1, 2], np.int64),
        ((3, 1, 2), np.int64),
        ([], np.int64),
        (range(3), np.int64),
        (np.array([3, 1, 2], dtype=np.int32), np.int32),
        (np.array([3, 1, 2], dtype=np.int64), np.int64),
        (np.array([3, 1, 2], dtype=np.uint32), np.int64),
        (np.array([3, 1, 2], dtype=np.uint8), np.int64),
        (np.array([3, 1, 2], dtype=">i4"), np.int64),
        (np.arange(6, dtype=np.int32)[::2], np.int32),
    ],
)
def test_block_ids_become_a_flat_array_of_int32_or_int64(given_ids: Any, dtype: Any) -> None:
    array = as_block_ids(given_ids)
    assert array.dtype == dtype
    assert array.flags.c_contiguous
    assert array.tolist() == list(given_ids)
    assert np.shares_memory(as_block_ids(array), array) == bool(array.size)  # not copied


@pytest.mark.parametrize(
    "given_ids",
    [
        np.zeros((2, 2), dtype=np.int64),
        np.array(3),
        np.array([1.0, 2.0]),
        np.array([True]),
        np.array(["1"]),
        np.array([], dtype=np.float32),
        np.zeros(MAX_BLOCK_IDS + 1, dtype=np.int32),
        [[1, 2], [3, 4]],
        [1.5, 2.0],
        ["1"],
        [1 << 63],
        np.array([(1 << 64) - 1], dtype=np.uint64),
        [[1, 2], [3]],
    ],
    ids=lambda value: f"{getattr(value, 'dtype', type(value).__name__)}-{str(value)[:12]}",
)
def test_invalid_block_ids_are_refused(given_ids: Any) -> None:
    with pytest.raises(Refused) as caught:
        CPULoadStoreSpec(given_ids)
    assert caught.value.code == Code.BAD_SPEC


@pytest.mark.parametrize(
    ("kind", "arguments", "message", "code"),
    [
        (GPULoadStoreSpec, ([1], 5), "group_sizes is not a list of counts", Code.BAD_SPEC),
        (GPULoadStoreSpec, ([1], (1,), [[1], [2, 3]]), "block_indices is not", Code.BAD_SPEC),
        (KeyLoadStoreSpec, (None,), "is no list of keys", Code.BAD_KEY),
        (KeyLoadStoreSpec, ((b"key",), None, 5), "is no list of keys", Code.BAD_KEY),
    ],
)
def test_counts_and_keys_that_are_no_list_are_refused(
    kind: type[Any], arguments: tuple[Any, ...], message: str, code: Code
) -> None:
    with pytest.raises(Refused, match=message) as caught:
        kind(*arguments)
    assert caught.value.code == code


def test_specs_are_equal_by_value_and_kind() -> None:
    spec = GPULoadStoreSpec([1, 2], (2,), (0,))
    assert spec == GPULoadStoreSpec(np.array([1, 2], dtype=np.int32), (2,), (0,))
    assert spec != GPULoadStoreSpec([1, 3], (2,), (0,))
    assert spec != GPULoadStoreSpec([1, 2], (2,), (1,))
    assert spec != GPULoadStoreSpec([1, 2])
    assert GPULoadStoreSpec([1]) != CPULoadStoreSpec([1])


def test_directions() -> None:
    assert Direction.STORE.transfer_type == ("GPU", "CPU")
    assert Direction.LOAD.transfer_type == ("CPU", "GPU")
    assert [direction.other for direction in Direction] == [Direction.LOAD, Direction.STORE]
