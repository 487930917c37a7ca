"""Tensors that a daemon allocated, where they cannot be mapped here."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from kvferry.client import (
    AsyncOffloadClient,
    Code,
    KVLayout,
    LocalDaemon,
    OffloadClient,
    Refused,
    TensorLayout,
    TensorRef,
    effects,
    operations,
)
from kvferry.client.tensors import device as module
from kvferry.client.tensors import shared_empty
from kvferry.client.tensors.device import map_device_memory
from kvferry.proto.memory import FdAllocation, HostRegion
from kvferry.proto.messages import Allocated
from kvferry.proto.status import DeviceInfo
from kvferry.testing.engine import until
from support.raw_client import one_tensor


def test_nothing_is_allocated_where_the_daemon_s_gpu_is_not(kvferryd: LocalDaemon) -> None:
    """Of tensors that were, the client would know nothing, and could not register others."""
    with OffloadClient(kvferryd.directory) as client:
        session = client._session
        assert session.welcome is not None
        elsewhere = DeviceInfo("cuda", "GPU-elsewhere", "a GPU of another machine")
        session.welcome = msgspec.structs.replace(session.welcome, device=elsewhere)
        with pytest.raises(Refused) as refused:
            client.allocate_kv_caches(one_tensor(), host_bytes=512)
        assert refused.value.code in (Code.NO_DEVICE, Code.DEVICE_MISMATCH)
        assert client.status().engines == ()
        shared = {"layer": shared_empty((8, 64))}
        client.register_kv_caches(shared, num_blocks=8, host_bytes=512)


MAPPING = "kvferry.client.tensors.sharing.map_tensors"
FETCHING = "the descriptor"
TWO = KVLayout((TensorLayout(8, 64, 64),) * 2, ((TensorRef(0, 64), TensorRef(1, 64)),))


def fail(where: str, error: Exception, patch: pytest.MonkeyPatch) -> None:
    """Have the client fail once the daemon has allocated: in fetching what is given, or mapping."""

    def failing(*_: object) -> None:
        raise error

    if where == MAPPING:
        patch.setattr(where, failing)
    else:
        patch.setattr(effects, "exchange_fds", failing)


@pytest.fixture(params=[MAPPING, FETCHING])
def failing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an error that is not ours: no descriptors left, for one."""
    fail(request.param, OSError(errno.EMFILE, "too many open files"), monkeypatch)


def tensors_of(daemon: LocalDaemon) -> set[str]:
    """What it has mapped of such memory; one is its own, for the probe."""
    maps = Path(f"/proc/{daemon.pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in maps if "memfd:kvferry-kv" in line}


def check_given_back(daemon: LocalDaemon) -> None:
    """By looking from outside: nothing has been asked of the client since."""
    with OffloadClient(daemon.directory, engine="observer") as observer:
        until(lambda: not any(e.present or e.kept_bytes for e in observer.status().engines))
    until(lambda: len(tensors_of(daemon)) == 1)


@pytest.mark.usefixtures("failing")
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("lasting", [True, False])
def test_what_cannot_be_had_is_given_back(
    kvferryd: LocalDaemon, monkeypatch: pytest.MonkeyPatch, lasting: bool, keep: bool
) -> None:
    """It stayed with the daemon for as long as nobody registered anything else."""
    with OffloadClient(kvferryd.directory, engine="poor", reconnect=lasting) as client:
        with pytest.raises(OSError, match="too many open files"):
            client.allocate_kv_caches(TWO, host_bytes=1024, keep=keep)
        check_given_back(kvferryd)
        monkeypatch.undo()
        assert not client.allocate_kv_caches(TWO, host_bytes=1024).kept


@pytest.mark.usefixtures("failing")
async def test_what_cannot_be_had_is_given_back_with_asyncio(
    kvferryd: LocalDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with await AsyncOffloadClient.connect(kvferryd.directory, engine="poor") as client:
        with pytest.raises(OSError, match="too many open files"):
            await client.allocate_kv_caches(TWO, host_bytes=1024, keep=True)
        await asyncio.to_thread(check_given_back, kvferryd)
        monkeypatch.undo()
        assert not (await client.allocate_kv_caches(TWO, host_bytes=1024)).kept


def test_what_an_earlier_engine_left_stays_where_it_cannot_be_had(
    kvferryd: LocalDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    with OffloadClient(kvferryd.directory, engine="poor") as client:
        client.allocate_kv_caches(TWO, host_bytes=1024, keep=True).tensors[0][3] = 7
    with OffloadClient(kvferryd.directory, engine="poor") as client:
        fail(MAPPING, RuntimeError("no"), monkeypatch)
        with pytest.raises(RuntimeError, match="no"):
            client.allocate_kv_caches(TWO, host_bytes=1024, keep=True)
        monkeypatch.undo()
        again = client.allocate_kv_caches(TWO, host_bytes=1024, keep=True)
    assert again.kept
    assert again.tensors[0][3].tolist() == [7] * 64


def test_descriptors_are_let_go_where_the_next_cannot_be_had() -> None:
    allocations = FdAllocation(1, 64), FdAllocation(2, 64)
    verb = operations._receive_descriptors(Allocated(1, HostRegion(1, 64, False), allocations, ()))
    next(verb)
    first = os.memfd_create("first")
    verb.send(first)
    with pytest.raises(OSError, match="too many"):
        verb.throw(OSError(errno.EMFILE, "too many open files"))
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(first)


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
        map_device_memory("GPU-0", descriptor, 4096)
    gc.collect()
    os.close(descriptor)
    assert unmapped == [memory]
    assert module.mapped_memory_at(memory.address) is None
