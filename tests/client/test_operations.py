"""Allocations of KV caches that the client cannot map are undone."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import msgspec
import pytest

from kvferry.client import (
    AsyncOffloadClient,
    Code,
    Gone,
    KVLayout,
    LocalDaemon,
    OffloadClient,
    Refused,
    TensorLayout,
    TensorRef,
    Timeline,
    registering,
)
from kvferry.client.call import Call
from kvferry.client.tensors import shared_empty
from kvferry.daemon.core.transfers import MAX_WAITS
from kvferry.proto.memory import FdAllocation, HostRegion
from kvferry.proto.messages import Allocated
from kvferry.proto.status import DeviceInfo
from kvferry.testing.engine import until
from support.block_specs import store
from support.raw_client import one_tensor


def test_nothing_is_allocated_if_the_daemon_s_gpu_is_not_visible(kvferryd: LocalDaemon) -> None:
    """Else the client could not register other tensors."""
    with OffloadClient(kvferryd.directory) as client:
        session = client._session
        assert session.wire.welcome is not None
        device = DeviceInfo("cuda", "GPU-0", "a GPU of another machine")
        session.wire.welcome = msgspec.structs.replace(session.wire.welcome, device=device)
        with pytest.raises(Refused) as refused:
            client.allocate_kv_caches(one_tensor(), host_bytes=512)
        assert refused.value.code in (Code.NO_DEVICE, Code.DEVICE_MISMATCH)
        assert client.status().engines == ()
        shared = {"layer": shared_empty((8, 64))}
        client.register_kv_caches(shared, num_blocks=8, host_bytes=512)


MAPPING = "kvferry.client.tensors.sharing.map_tensors"
RECEIVING = "receiving a descriptor"
LAYOUT = KVLayout((TensorLayout(8, 64, 64),) * 2, ((TensorRef(0, 64), TensorRef(1, 64)),))


def make_fail(where: str, error: Exception, patch: pytest.MonkeyPatch) -> None:
    """Make receiving descriptors, or mapping, fail in the client after the daemon's allocation."""

    def fail(*_: object) -> None:
        raise error

    if where == MAPPING:
        patch.setattr(where, fail)
    else:
        patch.setattr(Call, "receive_fd", fail)


@pytest.fixture(params=[MAPPING, RECEIVING])
def failing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make one of the steps fail with an error of the operating system."""
    make_fail(request.param, OSError(errno.EMFILE, "too many open files"), monkeypatch)


def mapped_tensors(daemon: LocalDaemon) -> set[str]:
    """The inodes of KV memory that the daemon has mapped. One belongs to its health check."""
    maps = Path(f"/proc/{daemon.pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in maps if "memfd:kvferry-kv" in line}


def check_undone(daemon: LocalDaemon) -> None:
    """Check with another client, without a call of the first one."""
    with OffloadClient(daemon.directory, engine="observer") as observer:
        until(lambda: not any(e.present or e.kept_bytes for e in observer.status().engines))
    until(lambda: len(mapped_tensors(daemon)) == 1)


@pytest.mark.usefixtures("failing")
def test_a_failed_allocation_is_undone(
    kvferryd: LocalDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its session ends with it; the client opens another."""
    with OffloadClient(kvferryd.directory, engine="poor") as client:
        for keep in (True, False):
            with pytest.raises(OSError, match="too many open files"):
                client.allocate_kv_caches(LAYOUT, host_bytes=1024, keep=keep)
            check_undone(kvferryd)
            client.wait_connected()
        monkeypatch.undo()
        assert not client.allocate_kv_caches(LAYOUT, host_bytes=1024).kept


async def test_a_failed_allocation_is_undone_with_asyncio(
    kvferryd: LocalDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_fail(MAPPING, OSError(errno.EMFILE, "too many open files"), monkeypatch)
    async with await AsyncOffloadClient.connect(kvferryd.directory, engine="poor") as client:
        with pytest.raises(OSError, match="too many open files"):
            await client.allocate_kv_caches(LAYOUT, host_bytes=1024, keep=True)
        await asyncio.to_thread(check_undone, kvferryd)
        monkeypatch.undo()
        assert not (await client.allocate_kv_caches(LAYOUT, host_bytes=1024)).kept


def test_a_failed_allocation_leaves_kept_tensors(
    kvferryd: LocalDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    with OffloadClient(kvferryd.directory, engine="poor") as client:
        client.allocate_kv_caches(LAYOUT, host_bytes=1024, keep=True).tensors[0][3] = 7
    with OffloadClient(kvferryd.directory, engine="poor") as client:
        make_fail(MAPPING, RuntimeError("no"), monkeypatch)
        with pytest.raises(RuntimeError, match="no"):
            client.allocate_kv_caches(LAYOUT, host_bytes=1024, keep=True)
        monkeypatch.undo()
        again = client.allocate_kv_caches(LAYOUT, host_bytes=1024, keep=True)
    assert again.kept
    assert again.tensors[0][3].tolist() == [7] * 64


def test_received_descriptors_are_closed_after_an_error() -> None:
    first = os.memfd_create("first")
    call = Mock(receive_fd=AsyncMock(side_effect=[first, OSError(errno.EMFILE, "too many")]))
    allocations = FdAllocation(1, 64), FdAllocation(2, 64)
    allocated = Allocated(1, HostRegion(1, 64, False), allocations, ())
    with pytest.raises(OSError, match="too many"):
        registering._receive_descriptors(call, allocated).send(None)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(first)


def test_a_job_can_be_waited_for_again_after_any_number_of_timeouts(kvferryd: LocalDaemon) -> None:
    """A daemon limits the waits of a session, and does not notice the timeout of a wait."""
    timeline = Timeline.create()
    with OffloadClient(kvferryd.directory) as client:
        shared = {"layer": shared_empty((8, 64))}
        client.register_kv_caches(shared, num_blocks=8, host_bytes=512, timeline=timeline)
        client.transfer_async(1, store(0, 0), wait_for=1)
        for seconds in (*[0.0] * MAX_WAITS, 0.5):
            with pytest.raises(Gone) as late:
                client.wait([1], timeout=seconds)
            assert (late.value.code, late.value.value) == (Code.TIMEOUT, "[1]")
        timeline.signal()
        client.wait([1])
    timeline.close()
