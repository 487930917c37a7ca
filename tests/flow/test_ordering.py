"""Each result arrives once and in order. The directions overlap if they share no block."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from kvferry.client import Gone, LocalDaemon
from kvferry.proto.messages import Cancel, Finished, Wait, Waited
from kvferry.proto.results import Outcome
from kvferry.testing.engine import SmallEngine, StartSmallEngine
from kvferry.testing.plugin import StartKvferryd
from support.raw_client import RawClient, store
from support.time_limits import TIMEOUT

JOBS = 400
BATCH = 50
NEVER = 1 << 40


def are_waiting(engine: SmallEngine, *jobs: int) -> bool:
    """Whether none of the jobs has ended after 0.05 s."""
    with pytest.raises(Gone) as timed_out:
        engine.client.wait(jobs, timeout=0.05)
    assert timed_out.value.code == "timeout"
    assert timed_out.value.value == str(list(jobs))
    return not {result.job_id for result in engine.poll()} & set(jobs)


def test_results_are_in_the_order_of_submission(
    start_engine: StartSmallEngine, daemon: LocalDaemon
) -> None:
    """Jobs of one to thirty blocks in both directions."""
    engine = start_engine(daemon, num_blocks=64)
    rng = np.random.default_rng(1)
    jobs: dict[tuple[str, str], list[int]] = {("GPU", "CPU"): [], ("CPU", "GPU"): []}
    for _ in range(JOBS):
        ids = rng.permutation(32)[: rng.integers(1, 30)].tolist()
        jobs["GPU", "CPU"].append(engine.store(ids, ids))
        jobs["CPU", "GPU"].append(engine.load(ids, [32 + i for i in ids]))
        engine.poll()
    engine.finish(*jobs["GPU", "CPU"], *jobs["CPU", "GPU"])
    for direction, submitted in jobs.items():
        assert [r.job_id for r in engine.history if r.transfer_type == direction] == submitted
    assert set(Counter(r.job_id for r in engine.history).values()) == {1}
    assert all(result.success for result in engine.history)
    assert engine.client.get_finished() == []


def test_a_load_waits_for_the_store_of_its_host_block(
    start_engine: StartSmallEngine, daemon: LocalDaemon
) -> None:
    engine = start_engine(daemon, block_size_factor=2)
    value = engine.worker.write(range(4), 1)
    engine.finish(engine.store(range(4), [0, 1], wait_for=value))
    value = engine.worker.write(range(4), 2) + 1
    store = engine.store([2, 3], [1], wait_for=value)
    independent = engine.load([0], [8, 9])
    dependent = engine.load([1], [10, 11])
    assert engine.finish(independent)[0].success
    assert are_waiting(engine, store, dependent)
    engine.worker.signal()
    assert all(result.success for result in engine.finish(store, dependent))
    assert np.array_equal(engine.worker.read([8, 9]), engine.expected([0, 1], 1))
    assert np.array_equal(engine.worker.read([10, 11]), engine.expected([2, 3], 2))


def test_directions_that_meet_in_a_gpu_block(
    start_engine: StartSmallEngine, daemon: LocalDaemon
) -> None:
    """A block is stored, then loaded over, then stored. Each job sees the bytes of the previous."""
    engine = start_engine(daemon)
    value = engine.worker.write([0, 1], 1)
    engine.finish(engine.store([1], [1], wait_for=value))
    first = engine.store([0], [2], wait_for=value + 1)
    overwrite = engine.load([1], [0])
    second = engine.store([0], [3])
    assert are_waiting(engine, first, overwrite, second)
    engine.worker.signal()
    engine.finish(first, overwrite, second)
    engine.finish(engine.load([2, 3], [8, 9]))
    assert np.array_equal(engine.worker.read([0, 8, 9]), engine.expected([1, 0, 1], 1))


def test_wait_covers_jobs_of_both_directions_and_other_processes(
    start_engine: StartSmallEngine, daemon: LocalDaemon
) -> None:
    """`wait` ignores unknown ids, keeps results, and covers jobs of other sessions."""
    engine = start_engine(daemon)
    engine.finish(engine.store([1], [1]))
    value = engine.worker.signal()
    jobs = [engine.store([0], [0], wait_for=value + 1), engine.load([1], [1], wait_for=value + 2)]
    engine.client.wait([NEVER, NEVER + 1], timeout=TIMEOUT)
    with pytest.raises(Gone):
        engine.worker.wait(jobs, timeout=0.05)
    engine.worker.signal()
    engine.worker.signal()
    engine.worker.wait([*jobs, NEVER], timeout=TIMEOUT)
    engine.client.wait([*jobs, NEVER], timeout=TIMEOUT)
    results = engine.client.get_finished()
    assert {result.job_id for result in results} == set(jobs)
    assert all(result.success for result in results)


def test_results_that_end_together_are_sent_together(start_kvferryd: StartKvferryd) -> None:
    """Each result is sent once, in order, and before the reply to Wait."""
    with RawClient(start_kvferryd(reference_stall=0.2).directory, "engine") as raw:
        raw.register()
        for job in range(BATCH):
            raw.send(store(job, [job % 8], [job % 8]))
        raw.send(Wait(1, tuple(range(BATCH))))
        raw.send(Cancel(tuple(range(1, BATCH))))
        messages = list[Finished]()
        while not isinstance(message := raw.recv(object), Waited):
            assert isinstance(message, Finished), message
            messages.append(message)
        results = [result for message in messages for result in message.results]
        assert sorted(result.job_id for result in results) == list(range(BATCH))
        assert {result.outcome for result in results} == {Outcome.DONE, Outcome.CANCELLED}
        assert len(messages) < BATCH / 2
        raw.send(store(99, [0], [0]))
        assert raw.recv(Finished).results[0].job_id == 99
