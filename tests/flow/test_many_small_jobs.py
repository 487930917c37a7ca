"""Thousands of small jobs, both ways over the same blocks, some given up: each ends once."""

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

BLOCKS = 256
LAYOUT = KVLayout((TensorLayout(BLOCKS, 64, 64),), ((TensorRef(0, 64),),))
SECONDS, PATIENCE = 4.0, 20.0


@pytest.mark.parametrize("fail_every", [0, 50])
def test_many_small_jobs_end_once_without_pauses(
    start_kvferryd: StartKvferryd, fail_every: int
) -> None:
    source = random.Random(fail_every)
    daemon = start_kvferryd(reference_fail_every=fail_every)
    with (
        OffloadClient(daemon.directory, engine="one") as one,
        OffloadClient(daemon.directory, engine="two") as two,
    ):
        for client in (one, two):
            client.allocate_kv_caches(LAYOUT, host_bytes=1 << 20)
        under_way: dict[OffloadClient, set[int]] = {one: set(), two: set()}
        number, end = 0, time.monotonic() + SECONDS
        last = time.monotonic()
        while time.monotonic() < end or any(under_way.values()):
            for client, jobs in under_way.items():
                while time.monotonic() < end and len(jobs) < source.choice([1, 2, 8, 64]):
                    number += 1
                    ids = np.array(source.sample(range(BLOCKS), source.choice([1, 2, 100])))
                    spec = GPULoadStoreSpec(ids), CPULoadStoreSpec(ids)
                    client.transfer_async(number, spec if source.random() < 0.5 else spec[::-1])
                    jobs.add(number)
                    if source.random() < 0.02:
                        client.cancel([number])
                    if source.random() < 0.01:
                        client.wait([number])
                for result in client.get_finished():
                    jobs.remove(result.job_id)
                    last = time.monotonic()
            assert time.monotonic() < last + PATIENCE, under_way
        assert all(not client.get_finished() for client in under_way)
