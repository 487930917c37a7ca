"""Thousands of small jobs in both directions over the same blocks. Some are cancelled."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from kvferry.client import (
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    KVLayout,
    OffloadClient,
    TensorLayout,
    TensorRef,
)
from kvferry.testing.plugin import StartKvferryd
from support.time_limits import PROMPTLY

BLOCKS = 256
LAYOUT = KVLayout((TensorLayout(BLOCKS, 64, 64),), ((TensorRef(0, 64),),))
# Seconds for which jobs are submitted.
SECONDS = 4.0


@pytest.mark.parametrize("fail_every", [0, 50])
def test_many_small_jobs_end_once_without_pauses(
    start_kvferryd: StartKvferryd, fail_every: int
) -> None:
    rng = random.Random(fail_every)
    daemon = start_kvferryd(reference_fail_every=fail_every)
    with (
        OffloadClient(daemon.directory, engine="one") as first,
        OffloadClient(daemon.directory, engine="two") as second,
    ):
        for client in (first, second):
            client.allocate_kv_caches(LAYOUT, host_bytes=1 << 20)
        in_flight: dict[OffloadClient, set[int]] = {first: set(), second: set()}
        number, end = 0, time.monotonic() + SECONDS
        last = time.monotonic()
        while time.monotonic() < end or any(in_flight.values()):
            for client, jobs in in_flight.items():
                while time.monotonic() < end and len(jobs) < rng.choice([1, 2, 8, 64]):
                    number += 1
                    ids = np.array(rng.sample(range(BLOCKS), rng.choice([1, 2, 100])))
                    spec = GPULoadStoreSpec(ids), CPULoadStoreSpec(ids)
                    client.transfer_async(number, spec if rng.random() < 0.5 else spec[::-1])
                    jobs.add(number)
                    if rng.random() < 0.02:
                        client.cancel([number])
                    if rng.random() < 0.01:
                        client.wait([number])
                for result in client.get_finished():
                    jobs.remove(result.job_id)
                    last = time.monotonic()
            assert time.monotonic() < last + PROMPTLY, in_flight
        assert all(not client.get_finished() for client in in_flight)
