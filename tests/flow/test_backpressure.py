"""Clients that submit too many jobs or do not poll.

Credits of one direction do not affect the other. A client that does not poll loses no result, or
is disconnected with the reason.
"""

from __future__ import annotations

from functools import partial

import pytest

from kvferry.client import (
    Code,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    KVLayout,
    OffloadClient,
    Refused,
    TensorLayout,
    TensorRef,
)
from kvferry.proto.messages import Finished, Goodbye, Submit
from kvferry.proto.results import Outcome
from kvferry.testing.engine import StartSmallEngine, until
from kvferry.testing.plugin import StartKvferryd
from support.process_usage import ProcessUsage
from support.raw_client import RawClient
from support.time_limits import TIMEOUT

JOBS = 50_000
TOO_MANY_JOBS = 140_000
NEVER = 1 << 40
LAYOUT = KVLayout((TensorLayout(64, 64, 64),), ((TensorRef(0, 64),),))


def has_stored(client: OffloadClient, jobs: int) -> bool:
    return client.status().totals.stores == jobs


@pytest.mark.parametrize("full", ["store", "load"])
def test_used_up_credits_of_one_direction_do_not_affect_the_other(
    start_engine: StartSmallEngine, start_kvferryd: StartKvferryd, full: str
) -> None:
    daemon = start_kvferryd(limits_max_stores=3, limits_max_loads=2)
    engine = start_engine(daemon)
    engine.finish(engine.store(range(32), range(32)))
    limits = engine.client.daemon.limits
    assert (limits.max_jobs, limits.max_stores, limits.max_loads) == (5, 3, 2)
    directions = {"store": engine.store, "load": engine.load}
    submit_full, submit_other = directions.pop(full), directions.popitem()[1]
    limit = limits.max_stores if full == "store" else limits.max_loads
    held = [submit_full([i], [i], wait_for=NEVER) for i in range(limit)]
    with pytest.raises(Refused) as refused:
        submit_full([9], [9])
    assert refused.value.code == Code.BUSY
    for _ in range(3):
        (result,) = engine.finish(submit_other([20], [20]))
        assert result.success
    assert engine.client.status().errors == {}
    engine.client.cancel(held)
    assert len(engine.finish(*held)) == limit
    assert engine.finish(submit_full([9], [9]))[0].success


@pytest.mark.timeout(180)
def test_a_client_that_polls_late_receives_every_result(
    start_kvferryd: StartKvferryd,
) -> None:
    daemon = start_kvferryd()
    with (
        OffloadClient(daemon.directory, engine="silent") as owner,
        OffloadClient(daemon.directory, engine="other") as other,
        RawClient(daemon.directory, "silent", timeout=TIMEOUT) as silent,
    ):
        for client in (owner, other):
            client.allocate_kv_caches(LAYOUT, host_bytes=1 << 20)
        spec = GPULoadStoreSpec([1]), CPULoadStoreSpec([1])
        before = ProcessUsage.of(daemon.pid).private
        for job_id in range(JOBS):
            if job_id % 5000 == 0:  # so that it stays within its credits
                until(partial(has_stored, other, job_id))
            silent.send(Submit(job_id, *spec))
        other.transfer_async(1, spec)
        other.wait([1], timeout=TIMEOUT)
        assert [result.success for result in other.get_finished()] == [True]
        until(partial(has_stored, other, JOBS + 1), 2 * TIMEOUT)
        assert ProcessUsage.of(daemon.pid).private - before < 160 << 20
        results = list(silent.recv(Finished).results)
        while len(results) < JOBS:
            results += silent.recv(Finished).results
        assert [result.job_id for result in results] == list(range(JOBS))
        assert {result.outcome for result in results} == {Outcome.DONE}


@pytest.mark.timeout(180)
def test_a_client_that_receives_nothing_is_disconnected_with_the_reason(
    start_kvferryd: StartKvferryd,
) -> None:
    daemon = start_kvferryd()
    with (
        RawClient(daemon.directory, "silent", timeout=TIMEOUT) as silent,
        OffloadClient(daemon.directory, engine="other") as other,
    ):
        spec = GPULoadStoreSpec([1]), CPULoadStoreSpec([1])
        for job_id in range(TOO_MANY_JOBS):
            silent.send(Submit(job_id, *spec))
        until(lambda: "received none" in daemon.log(), 2 * TIMEOUT)
        until(lambda: other.status().sessions == 1)
        goodbye = silent.recv(Goodbye)
        assert "none was received" in goodbye.reason
        assert daemon.log().count("received none") == 1
