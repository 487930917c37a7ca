"""Tensors that a daemon allocated, where they cannot be mapped here."""

from __future__ import annotations

import gc
import os
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from kvferry.client import Code, LocalDaemon, OffloadClient, Refused
from kvferry.client.tensors import device as module
from kvferry.client.tensors import shared_empty
from kvferry.client.tensors.device import attach_device
from kvferry.proto.status import DeviceInfo
from kvferry.testing.raw import one_tensor


def test_nothing_is_allocated_where_the_daemon_s_gpu_is_not(kvferryd: LocalDaemon) -> None:
    """Of tensors that were, the client would know nothing, and could not register others."""
    with OffloadClient(kvferryd.directory) as client:
        talk = client._conversation
        assert talk.welcome is not None
        elsewhere = DeviceInfo("cuda", "GPU-elsewhere", "a GPU of another machine")
        talk.welcome = msgspec.structs.replace(talk.welcome, device=elsewhere)
        with pytest.raises(Refused) as refused:
            client.allocate_kv_caches(one_tensor(), host_bytes=512)
        assert refused.value.code in (Code.NO_DEVICE, Code.DEVICE_MISMATCH)
        assert client.status().engines == ()
        shared = {"layer": shared_empty((8, 64))}
        client.register_kv_caches(shared, num_blocks=8, host_bytes=512)


def test_a_descriptor_is_the_caller_s_where_torch_does_not_take_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was closed once more when the error was forgotten: somebody else's by then."""
    unmapped: list[object] = []
    memory: Any = SimpleNamespace(address=1 << 40, close=lambda: unmapped.append(memory))
    driver = SimpleNamespace(
        device_count=lambda: 1,
        device_uuid=lambda _: "GPU-0",
        visiting=lambda _: nullcontext(0),
        drain=lambda _: None,
    )
    monkeypatch.setattr(module, "driver", lambda: driver)
    opens: Any = SimpleNamespace(open=lambda *_: memory)
    monkeypatch.setattr(module, "VirtualMemory", lambda *_: opens)

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "as_tensor", refuse)
    descriptor = os.memfd_create("memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        attach_device("GPU-0", descriptor, 4096)
    gc.collect()
    os.close(descriptor)
    assert unmapped == [memory]
    assert module.attached_at(memory.address) is None
