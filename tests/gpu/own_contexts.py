"""What is done on a GPU leaves the thread's own context current.

Not collected by itself: test_contexts.py runs this file in a process of its own. The fixture
destroys its context, and torch keeps blocks that it allocated there for later use.
"""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import byref, c_void_p

import pytest

from kvferry.client import LocalDaemon, OffloadClient, Timeline, shared_empty
from kvferry.cuda.driver import driver
from support.raw_client import one_tensor

pytestmark = pytest.mark.gpu


def current() -> int | None:
    context = c_void_p()
    driver().call("cuCtxGetCurrent", byref(context))
    return context.value


@pytest.fixture
def our_own() -> Iterator[int | None]:
    """A context that no library of ours made, as that of another device would be."""
    before, made = current(), c_void_p()
    create, destroy = (driver().optional(name) for name in ("cuCtxCreate_v2", "cuCtxDestroy_v2"))
    assert create(byref(made), 0, 0) == 0
    yield made.value
    assert destroy(made) == 0
    driver().call("cuCtxSetCurrent", c_void_p(before))


def test_a_timeline(our_own: int | None) -> None:
    timeline = Timeline.create("cuda")
    assert current() == our_own
    timeline.close()
    assert current() == our_own


def test_tensors(our_own: int | None) -> None:
    with LocalDaemon("0", pool_bytes=64 << 20) as daemon:
        with OffloadClient(daemon.directory, engine="shared") as client:
            layers = {"layer": shared_empty((8, 4096), device="cuda")}
            before = current()
            client.register_kv_caches(layers, num_blocks=8, host_bytes=1 << 20)
            assert current() == before
        driver().call("cuCtxSetCurrent", c_void_p(our_own))
        with OffloadClient(daemon.directory, engine="allocated") as client:
            allocated = client.allocate_kv_caches(one_tensor(), host_bytes=1 << 20)
            assert current() == our_own
            del allocated
