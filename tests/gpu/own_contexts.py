"""kvferry's calls on a GPU restore the thread's current context.

pytest does not collect this file: test_contexts.py runs it in a process of its own, because the
fixture destroys its context, and torch keeps blocks that it allocated there for later use.
"""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import byref, c_void_p

import pytest

from kvferry.client import LocalDaemon, OffloadClient, Timeline, shared_empty
from kvferry.cuda.driver import driver
from support.raw_client import one_tensor

pytestmark = pytest.mark.gpu


def current_context() -> int | None:
    context = c_void_p()
    driver().call("cuCtxGetCurrent", byref(context))
    return context.value


@pytest.fixture
def own_context() -> Iterator[int | None]:
    """A current context that neither kvferry nor torch has created, like that of another device."""
    before, created = current_context(), c_void_p()
    create, destroy = (driver().optional(name) for name in ("cuCtxCreate_v2", "cuCtxDestroy_v2"))
    assert create(byref(created), 0, 0) == 0
    yield created.value
    assert destroy(created) == 0
    driver().call("cuCtxSetCurrent", c_void_p(before))


def test_a_timeline(own_context: int | None) -> None:
    timeline = Timeline.create("cuda")
    assert current_context() == own_context
    timeline.close()
    assert current_context() == own_context


def test_tensors(own_context: int | None) -> None:
    with LocalDaemon("0", pool_bytes=64 << 20) as daemon:
        with OffloadClient(daemon.directory, engine="shared") as client:
            layers = {"layer": shared_empty((8, 4096), device="cuda")}
            before = current_context()
            client.register_kv_caches(layers, num_blocks=8, host_bytes=1 << 20)
            assert current_context() == before
        driver().call("cuCtxSetCurrent", c_void_p(own_context))
        with OffloadClient(daemon.directory, engine="allocated") as client:
            allocated = client.allocate_kv_caches(one_tensor(), host_bytes=1 << 20)
            assert current_context() == own_context
            del allocated
