"""Mapping device memory, with a simulated driver."""

from __future__ import annotations

import gc
import os
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvferry.client.tensors import device as module
from kvferry.client.tensors.device import map_device_memory


def test_after_an_error_the_caller_owns_the_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Closing the descriptor later, with the traceback, could close another file."""
    unmapped: list[object] = []
    memory: Any = SimpleNamespace(address=1 << 40, close=lambda: unmapped.append(memory))
    driver = SimpleNamespace(
        device_count=lambda: 1,
        device_uuid=lambda _: "GPU-0",
        visiting=lambda _: nullcontext(0),
        drain=lambda _: None,
    )
    monkeypatch.setattr(module, "driver", lambda: driver)
    virtual_memory: Any = SimpleNamespace(import_memory=lambda *_: memory)
    monkeypatch.setattr(module, "VirtualMemory", lambda *_: virtual_memory)

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "as_tensor", refuse)
    descriptor = os.memfd_create("memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        map_device_memory("GPU-0", descriptor, 4096)
    gc.collect()
    os.close(descriptor)
    assert unmapped == [memory]
    assert module.mapped_memory_at(memory.address) is None
