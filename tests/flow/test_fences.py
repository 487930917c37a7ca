"""The fence of a transfer makes it wait for the kernels that it depends on.

The kernels are slow, so that a copy without `wait_for` runs too early. Most rounds without the
fence must copy wrong bytes, or the rounds with it show nothing. (On a busy machine a copy without
the fence can be late and correct.)
"""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.client import Code, Gone, LocalDaemon, TransferResult
from kvferry.testing.content import Bytes
from kvferry.testing.engine import SmallEngine, StartSmallEngine

SLOW = 0.03
BLOCKS = list(range(16))
COPIES = list(range(16, 32))


def rounds_on(device: str) -> int:
    return 100 if device.startswith("cuda") else 12


def store_while_written(engine: SmallEngine, seed: int, *, fenced: bool) -> Bytes:
    """Store blocks while a slow kernel writes them. Returns the stored bytes."""
    value = engine.worker.write(BLOCKS, seed, slow=SLOW)
    store = engine.store(BLOCKS, BLOCKS, wait_for=value if fenced else 0)
    results = engine.finish(store)
    value = engine.worker.signal()
    results += engine.finish(engine.load(BLOCKS, COPIES, wait_for=value))
    assert all(result.success for result in results)
    return engine.worker.read(COPIES)


def load_while_read(engine: SmallEngine, seed: int, *, fenced: bool) -> tuple[Bytes, Bytes]:
    """Load into blocks while a slow kernel reads them. Returns the bytes read and those loaded."""
    value = engine.worker.write(BLOCKS, seed)
    engine.finish(engine.store(BLOCKS, BLOCKS, wait_for=value))
    engine.worker.write(COPIES, seed + 1)
    engine.worker.read(
        COPIES
    )  # returns when the write has ended, so that the load cannot precede it
    value = engine.worker.read_slowly(COPIES, SLOW)
    engine.finish(engine.load(BLOCKS, COPIES, wait_for=value if fenced else 0))
    return engine.worker.seen(), engine.worker.read(COPIES)


@pytest.mark.parametrize("daemon_owned", [False, True], ids=["engine-owned", "daemon-owned"])
def test_stores_wait_for_slow_kernels(
    start_engine: StartSmallEngine, daemon: LocalDaemon, device: str, daemon_owned: bool
) -> None:
    engine = start_engine(daemon, daemon_owned=daemon_owned)
    for seed in range(rounds_on(device)):
        wanted = engine.expected(BLOCKS, seed)
        assert np.array_equal(store_while_written(engine, seed, fenced=True), wanted), seed


def test_stores_without_a_fence_run_too_early(
    start_engine: StartSmallEngine, daemon: LocalDaemon, device: str
) -> None:
    engine = start_engine(daemon)
    wrong = 0
    for seed in range(rounds_on(device)):
        wanted = engine.expected(BLOCKS, seed)
        wrong += not np.array_equal(store_while_written(engine, seed, fenced=False), wanted)
    print(f"{wrong} of {rounds_on(device)} rounds went wrong without the fence")
    assert wrong > rounds_on(device) / 2


def test_loads_wait_for_kernels_that_still_read(
    start_engine: StartSmallEngine, daemon: LocalDaemon, device: str
) -> None:
    engine = start_engine(daemon)
    for seed in range(0, 2 * rounds_on(device), 2):
        seen, loaded = load_while_read(engine, seed, fenced=True)
        assert np.array_equal(seen, engine.expected(COPIES, seed + 1)), seed
        assert np.array_equal(loaded, engine.expected(BLOCKS, seed)), seed


def test_loads_without_a_fence_run_too_early(
    start_engine: StartSmallEngine, daemon: LocalDaemon, device: str
) -> None:
    engine = start_engine(daemon)
    wrong = 0
    for seed in range(0, 2 * rounds_on(device), 2):
        seen, _ = load_while_read(engine, seed, fenced=False)
        wrong += not np.array_equal(seen, engine.expected(COPIES, seed + 1))
    print(f"{wrong} of {rounds_on(device)} rounds went wrong without the fence")
    assert wrong > rounds_on(device) / 2


def is_waiting(engine: SmallEngine, job: int) -> bool:
    """Whether a job has not ended after 0.05 s."""
    with pytest.raises(Gone) as timed_out:
        engine.client.wait([job], timeout=0.05)
    assert timed_out.value.code == "timeout"
    return job not in job_ids(engine.poll())


def job_ids(results: list[TransferResult]) -> list[int]:
    return [result.job_id for result in results]


def test_a_scheduler_may_submit_before_the_worker_launches(
    start_engine: StartSmallEngine, daemon: LocalDaemon
) -> None:
    engine = start_engine(daemon)
    value = engine.worker.write(BLOCKS, 1)
    for offset in range(1, 6):
        job = engine.store(BLOCKS, BLOCKS, wait_for=value + offset)
        assert is_waiting(engine, job)
        assert engine.worker.write(BLOCKS, 1 + offset) == value + offset
        assert engine.finish(job)[0].success
        engine.finish(engine.load(BLOCKS, COPIES))
        assert np.array_equal(engine.worker.read(COPIES), engine.expected(BLOCKS, 1 + offset))


def test_a_load_behind_a_cancelled_store_loads_nothing(
    start_engine: StartSmallEngine, daemon: LocalDaemon
) -> None:
    """The daemon accepts the load while the store can still complete."""
    engine = start_engine(daemon)
    value = engine.worker.write([0, 5], 1)
    held = engine.store([0], [0], wait_for=value + 1)
    behind = engine.load([0], [5])
    assert is_waiting(engine, behind)
    engine.client.cancel([held])
    cancelled, stale = engine.finish(held, behind)
    assert (cancelled.outcome, stale.outcome) == ("cancelled", "failed")
    assert stale.error is not None
    assert stale.error.code == Code.STALE
    assert np.array_equal(engine.worker.read([5]), engine.expected([5], 1))
