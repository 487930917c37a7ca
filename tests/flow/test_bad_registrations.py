"""An invalid registration is refused with a code, and leaves no state in the daemon.

No registration may end the daemon or affect another client. A correct engine beside the bad
client copies blocks before and after.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from kvferry.client import Code, Gone, LocalDaemon, OffloadClient, Refused, shared_empty
from kvferry.proto.memory import FdAllocation, Location
from kvferry.proto.messages import Error, Registered, RegisterKVCaches
from kvferry.testing.engine import SmallEngine, StartSmallEngine
from kvferry.testing.plugin import StartKvferryd
from support.raw_client import RawClient, collect, one_tensor, store
from support.time_limits import TIMEOUT

LAYOUT = one_tensor(8, 64)
LOCATIONS = (Location(0, 0),)


def memfd(nbytes: int = 512, flags: int = 0) -> int:
    descriptor = os.memfd_create("tensor", flags)
    os.ftruncate(descriptor, nbytes)
    return descriptor


@pytest.fixture
def beside(start_engine: StartSmallEngine, start_kvferryd: StartKvferryd) -> Iterator[SmallEngine]:
    daemon = start_kvferryd()
    engine = start_engine(daemon)
    fence = engine.worker.write(range(16), 1)
    engine.finish(engine.store(range(16), range(16), wait_for=fence))
    yield engine
    assert daemon.process.poll() is None, daemon.log()
    engine.finish(engine.load(range(16), range(16, 32)))
    wanted = engine.expected(range(16), 1)
    assert np.array_equal(engine.worker.read(range(16, 32)), wanted)
    assert "Traceback" not in daemon.log(), daemon.log()


@pytest.fixture
def raw(beside: SmallEngine) -> Iterator[RawClient]:
    """A session of another engine."""
    with RawClient(beside.directory, "other", timeout=TIMEOUT) as session:
        yield session


def refusal_of(raw: RawClient, **fields: Any) -> str:
    """The error code that the daemon sends for a registration: a valid one, changed by `fields`."""
    if "allocations" not in fields:
        descriptor = memfd()
        fields["allocations"] = (FdAllocation(raw.deposit(descriptor)[0], 512),)
        os.close(descriptor)
    message = RegisterKVCaches(
        **{"request_id": 7, "layout": LAYOUT, "locations": LOCATIONS, "host_bytes": 4096, **fields}
    )
    answer = raw.ask(message, Error)
    assert answer.request_id == 7
    assert answer.error.message
    return answer.error.code


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"locations": (Location(1, 0),)}, Code.BAD_LAYOUT),
        ({"allocations": (FdAllocation(999, 512),)}, Code.UNKNOWN_HANDLE),
        ({"timeline": 999}, Code.UNKNOWN_HANDLE),
        ({"host_bytes": 1 << 25}, Code.POOL_FULL),
    ],
    ids=["location", "handle", "timeline", "size"],
)
def test_after_a_refused_registration_the_same_session_may_register(
    beside: SmallEngine, raw: RawClient, fields: dict[str, Any], code: Code
) -> None:
    assert refusal_of(raw, **fields) == code
    assert beside.client.status().errors == {code: 1}
    assert raw.register().region.num_blocks == 8
    raw.send(store(1, [0, 1], [0, 1]))
    assert raw.result(1).outcome == "done"


def test_handles_of_another_session(raw: RawClient, beside: SmallEngine) -> None:
    with RawClient(beside.directory, "thief") as thief:
        descriptor = memfd()
        (handle,) = raw.deposit(descriptor)
        os.close(descriptor)
        stolen = (FdAllocation(handle, 512),)
        assert refusal_of(thief, allocations=stolen) == Code.UNKNOWN_HANDLE
        with pytest.raises(Refused) as refused:
            collect(beside.directory, thief.session, handle, 5)
        assert refused.value.code == Code.UNKNOWN_HANDLE
        with pytest.raises(Gone):  # as for a session of an earlier daemon
            collect(beside.directory, "unknown", handle, 5)


@pytest.mark.parametrize("what", [".", "pipe", "pyproject.toml", "internet", "unix"])
def test_unusable_descriptors_are_refused(raw: RawClient, what: str) -> None:
    with ExitStack() as stack:
        if what == "pipe":
            ends: tuple[int, ...] = os.pipe()
        elif what in ("internet", "unix"):
            family = socket.AF_INET if what == "internet" else socket.AF_UNIX
            ends = (socket.socket(family).detach(),)
        else:
            ends = (os.open(what, os.O_RDONLY),)
        for descriptor in ends:
            stack.callback(os.close, descriptor)
        with pytest.raises(Refused) as refused:
            raw.deposit(ends[0])
    assert refused.value.code == Code.NOT_SHAREABLE


def test_descriptors_of_another_device(raw: RawClient) -> None:
    descriptor = os.open("/dev/null", os.O_RDONLY)
    tensor, timeline = raw.deposit(descriptor, descriptor)
    os.close(descriptor)
    as_tensor = refusal_of(raw, allocations=(FdAllocation(tensor, 512),))
    as_timeline = refusal_of(raw, timeline=timeline)
    assert as_tensor in (Code.BAD_LAYOUT, Code.MAP_FAILED, Code.NOT_SHAREABLE)
    assert as_timeline in (Code.NOT_SHAREABLE, Code.MAP_FAILED)


def test_a_client_that_registers_twice(beside: SmallEngine) -> None:
    """The client refuses the second call itself, without a message to the daemon."""
    caches = {"layer": shared_empty((8, 64))}
    with OffloadClient(beside.directory, engine="twice") as client:
        client.register_kv_caches(caches, num_blocks=8, host_bytes=512)
        for register_again in (
            lambda: client.register_kv_caches(caches, num_blocks=8, host_bytes=512),
            lambda: client.allocate_kv_caches(LAYOUT, host_bytes=512),
        ):
            with pytest.raises(Refused, match="this client has already registered") as refused:
                register_again()
            assert (refused.value.code, refused.value.value) == (Code.ALREADY_REGISTERED, "twice")
        assert Code.ALREADY_REGISTERED not in client.status().errors


def test_memory_that_shrinks_later(kvferryd: LocalDaemon) -> None:
    """The owner truncates its tensor's memory. The transfer fails, the daemon continues."""
    descriptor = memfd()
    with RawClient(kvferryd.directory, "careless", timeout=TIMEOUT) as raw:
        allocations = (FdAllocation(raw.deposit(descriptor)[0], 512),)
        raw.ask(RegisterKVCaches(1, LAYOUT, allocations, LOCATIONS, 512), Registered)
        os.ftruncate(descriptor, 0)
        os.close(descriptor)
        raw.send(store(1, [0], [0]))
        assert raw.result(1).outcome == "failed"
