"""Which tensors of an engine can be shared with a daemon."""

from __future__ import annotations

import mmap
import tempfile
from contextlib import ExitStack

import numpy as np
import pytest
import torch

from kvferry.client import Code, LocalDaemon, OffloadClient, Refused, shared_empty


def test_memory_that_is_not_shared(kvferryd: LocalDaemon) -> None:
    """The refusal names alternatives, and one of them works."""
    with OffloadClient(kvferryd.directory, engine="plain") as client:
        with pytest.raises(Refused) as refused:
            client.register_kv_caches({"layer": torch.empty(8, 2, 4, 2, 8)}, num_blocks=8)
        assert refused.value.code == Code.NOT_SHAREABLE
        for alternative in ("shared_empty", "share_memory_", "allocate_kv_caches"):
            assert alternative in refused.value.message
        tensor = shared_empty((8, 2, 4, 2, 8), torch.float32)
        assert client.register_kv_caches({"layer": tensor}, num_blocks=8).num_blocks > 0


def test_a_dtype_of_numpy_makes_a_numpy_array(kvferryd: LocalDaemon) -> None:
    array = shared_empty((8, 64), np.int16)
    assert isinstance(array, np.ndarray)
    assert (array.dtype.name, array.shape) == ("int16", (8, 64))
    with OffloadClient(kvferryd.directory, engine="numpy") as client:
        client.register_kv_caches({"layer": array}, num_blocks=8, host_bytes=1024)
    with (
        OffloadClient(kvferryd.directory, engine="plain") as client,
        pytest.raises(Refused) as refused,
    ):
        client.register_kv_caches({"layer": np.zeros((8, 64))}, num_blocks=8)
    assert refused.value.code == Code.NOT_SHAREABLE


def test_shared_memory_that_is_open_for_reading_too(kvferryd: LocalDaemon) -> None:
    """The daemon receives a writable descriptor, whichever descriptor was opened last."""
    with tempfile.TemporaryFile(dir="/dev/shm") as file, ExitStack() as stack:
        file.truncate(512)
        memory = mmap.mmap(file.fileno(), 512)
        for _ in range(4):  # one of them has the highest number
            stack.enter_context(open(f"/proc/self/fd/{file.fileno()}", "rb"))
        tensor = torch.frombuffer(memory, dtype=torch.int8).view(8, 64)
        with OffloadClient(kvferryd.directory, engine="read") as client:
            client.register_kv_caches({"layer": tensor}, num_blocks=8, host_bytes=512)
