"""A client that polls late loses no result, and delays no other client."""

from __future__ import annotations

from functools import partial

from kvferry.client import (
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    KVLayout,
    LocalDaemon,
    OffloadClient,
    TensorLayout,
    TensorRef,
)
from kvferry.proto.messages import Finished, Submit
from kvferry.proto.results import Outcome
from kvferry.testing.engine import until
from support.raw_client import RawClient
from support.time_limits import TIMEOUT

JOBS = 10_000
LAYOUT = KVLayout((TensorLayout(64, 64, 64),), ((TensorRef(0, 64),),))


def has_stored(client: OffloadClient, jobs: int) -> bool:
    return client.status().totals.stores == jobs


def test_a_client_that_polls_late_receives_every_result(kvferryd: LocalDaemon) -> None:
    with (
        OffloadClient(kvferryd.directory, engine="silent") as owner,
        OffloadClient(kvferryd.directory, engine="other") as other,
        RawClient(kvferryd.directory, "silent", timeout=TIMEOUT) as silent,
    ):
        for client in (owner, other):
            client.allocate_kv_caches(LAYOUT, host_bytes=1 << 20)
        spec = GPULoadStoreSpec([1]), CPULoadStoreSpec([1])
        for job_id in range(JOBS):
            if job_id % 5000 == 0:  # so that it stays within its credits
                until(partial(has_stored, other, job_id))
            silent.send(Submit(job_id, *spec))
        other.transfer_async(1, spec)
        other.wait([1], timeout=TIMEOUT)
        assert [result.success for result in other.get_finished()] == [True]
        until(partial(has_stored, other, JOBS + 1))
        results = list(silent.recv(Finished).results)
        while len(results) < JOBS:
            results += silent.recv(Finished).results
        assert [result.job_id for result in results] == list(range(JOBS))
        assert {result.outcome for result in results} == {Outcome.DONE}
