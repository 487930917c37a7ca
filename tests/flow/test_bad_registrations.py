"""An invalid registration is refused with a code, and leaves no state in the daemon.

No registration may end the daemon or affect another client. A correct engine beside the bad
client copies blocks before and after.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvferry.client import Code, Gone, LocalDaemon, Refused
from kvferry.proto.memory import FdAllocation, Location
from kvferry.proto.messages import Error, Registered, RegisterKVCaches
from kvferry.testing.engine import SmallEngine, StartSmallEngine
from kvferry.testing.plugin import StartKvferryd
from support.fuzz import USELESS, memfd, strange_descriptors
from support.raw_client import RawClient, collect, one_tensor, store
from support.time_limits import TIMEOUT

LAYOUT = one_tensor(8, 64)
LOCATIONS = (Location(0, 0),)


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
        descriptor = memfd(512)
        fields["allocations"] = (FdAllocation(raw.deposit(descriptor)[0], 512),)
        os.close(descriptor)
    message = RegisterKVCaches(
        **{"request_id": 7, "layout": LAYOUT, "locations": LOCATIONS, "host_bytes": 4096, **fields}
    )
    answer = raw.ask(message, Error)
    assert answer.request_id == 7
    assert answer.error.message
    return answer.error.code


def test_after_refused_registrations_the_same_session_may_register(
    beside: SmallEngine, raw: RawClient
) -> None:
    assert refusal_of(raw, allocations=(FdAllocation(999, 512),)) == Code.UNKNOWN_HANDLE
    assert refusal_of(raw, timeline=999) == Code.UNKNOWN_HANDLE
    assert refusal_of(raw, host_bytes=1 << 25) == Code.POOL_FULL
    assert beside.client.status().errors == {Code.UNKNOWN_HANDLE: 2, Code.POOL_FULL: 1}
    assert raw.register().region.num_blocks == 8
    raw.send(store(1, [0, 1], [0, 1]))
    assert raw.result(1).outcome == "done"


def test_handles_of_another_session(raw: RawClient, beside: SmallEngine) -> None:
    with RawClient(beside.directory, "thief") as thief:
        descriptor = memfd(512)
        (handle,) = raw.deposit(descriptor)
        os.close(descriptor)
        stolen = (FdAllocation(handle, 512),)
        assert refusal_of(thief, allocations=stolen) == Code.UNKNOWN_HANDLE
        with pytest.raises(Refused) as refused:
            collect(beside.directory, thief.session, handle, 5)
        assert refused.value.code == Code.UNKNOWN_HANDLE
        with pytest.raises(Gone):  # as for a session of an earlier daemon
            collect(beside.directory, "unknown", handle, 5)


def test_unusable_descriptors_are_refused(raw: RawClient) -> None:
    with strange_descriptors() as strange:
        for name in USELESS:
            with pytest.raises(Refused) as refused:
                raw.deposit(strange[name])
            assert refused.value.code == Code.NOT_SHAREABLE, name


def test_memory_that_shrinks_later(kvferryd: LocalDaemon) -> None:
    """The owner truncates its tensor's memory. The transfer fails, the daemon continues."""
    descriptor = memfd(512)
    with RawClient(kvferryd.directory, "careless", timeout=TIMEOUT) as raw:
        allocations = (FdAllocation(raw.deposit(descriptor)[0], 512),)
        raw.ask(RegisterKVCaches(1, LAYOUT, allocations, LOCATIONS, 512), Registered)
        os.ftruncate(descriptor, 0)
        os.close(descriptor)
        raw.send(store(1, [0], [0]))
        assert raw.result(1).outcome == "failed"
