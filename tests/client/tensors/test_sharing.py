"""Which tensors of an engine can be shared with a daemon."""

from __future__ import annotations

import mmap
import tempfile
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch

from kvferry.client import Code, LocalDaemon, OffloadClient, Refused, shared_empty
from kvferry.client.tensors.canonical import canonicalize
from kvferry.client.tensors.sharing import export_tensors


def test_memory_that_is_not_shared(kvferryd: LocalDaemon) -> None:
    """The refusal names alternatives, and one of them works. A dtype of numpy makes an array."""
    with OffloadClient(kvferryd.directory, engine="plain") as client:
        with pytest.raises(Refused) as refused:
            client.register_kv_caches({"layer": torch.empty(8, 2, 4, 2, 8)}, num_blocks=8)
        assert refused.value.code == Code.NOT_SHAREABLE
        for alternative in ("shared_empty", "share_memory_", "allocate_kv_caches"):
            assert alternative in refused.value.message
        tensor = shared_empty((8, 2, 4, 2, 8), torch.float32)
        assert client.register_kv_caches({"layer": tensor}, num_blocks=8).num_blocks > 0
    array = shared_empty([8, 64], np.int16, device="cpu:0")
    assert isinstance(array, np.ndarray)
    assert (array.dtype.name, array.shape) == ("int16", (8, 64))
    with OffloadClient(kvferryd.directory, engine="numpy") as client:
        with pytest.raises(Refused) as refused:
            client.register_kv_caches({"layer": np.zeros((8, 64))}, num_blocks=8)
        assert refused.value.code == Code.NOT_SHAREABLE
        client.register_kv_caches({"layer": array}, num_blocks=8, host_bytes=1024)
    assert shared_empty(()).shape == ()


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        *(
            ((shape,), Code.BAD_LAYOUT)
            for shape in (
                (0, 64),
                (8, 0),
                (8, -1),
                (8.0, 64),
                ("8", 64),
                8,
                "ab",
                None,
                (1 << 40, 1 << 40),
            )
        ),
        *(
            (((8, 64), dtype), Code.BAD_LAYOUT)
            for dtype in ("int77", 5, object, np.dtype("V0"), [1])
        ),
        (((8, 64), None, "tpu"), Code.NO_DEVICE),
        (((8, 64), None, None), Code.NO_DEVICE),
    ],
)
def test_a_tensor_that_cannot_be_made_is_refused(arguments: Any, code: Code) -> None:
    with pytest.raises(Refused) as refused:
        shared_empty(*arguments)
    assert refused.value.code == code


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


def test_a_private_mapping_of_a_shared_file_is_not_shared() -> None:
    """What the engine writes there never reaches the file, which the daemon would map."""
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(512)
        memory = mmap.mmap(file.fileno(), 512, mmap.MAP_PRIVATE)
        tensor = np.frombuffer(memory, np.int8).reshape(8, 64)
        with pytest.raises(Refused) as refused:
            export_tensors(canonicalize({"layer": tensor}, num_blocks=8))
        assert refused.value.code == Code.NOT_SHAREABLE
