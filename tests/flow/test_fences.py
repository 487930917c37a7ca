"""A transfer waits for the kernels that it needs, and the fence is what makes it wait.

Kernels here are slow on purpose, so that a copy that does not wait for them comes too early every
time: most of the same rounds without `wait_for` must go wrong, or they would prove nothing. (On a
busy machine the copy itself can be late for once.)
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


def rounds(device: str) -> int:
    return 100 if device.startswith("cuda") else 12


def store_while_written(engine: SmallEngine, seed: int, *, fenced: bool) -> Bytes:
    """What arrives in host memory of blocks that a slow kernel is about to write."""
    value = engine.worker.write(BLOCKS, seed, slow=SLOW)
    store = engine.store(BLOCKS, BLOCKS, wait_for=value if fenced else 0)
    results = engine.finish(store)
    settled = engine.worker.signal()
    results += engine.finish(engine.load(BLOCKS, COPIES, wait_for=settled))
    assert all(result.success for result in results)
    return engine.worker.read(COPIES)


def load_while_read(engine: SmallEngine, seed: int, *, fenced: bool) -> tuple[Bytes, Bytes]:
    """What a slow kernel reads from blocks that are about to be loaded, and what is loaded."""
    value = engine.worker.write(BLOCKS, seed)
    engine.finish(engine.store(BLOCKS, BLOCKS, wait_for=value))
    engine.worker.write(COPIES, seed + 1)
    engine.worker.read(COPIES)  # it is there: a load that came before it would do no harm
    value = engine.worker.read_slowly(COPIES, SLOW)
    engine.finish(engine.load(BLOCKS, COPIES, wait_for=value if fenced else 0))
    return engine.worker.seen(), engine.worker.read(COPIES)


@pytest.mark.parametrize("daemon_owned", [False, True], ids=["engine-owned", "daemon-owned"])
def test_stores_behind_slow_kernels(
    start_engine: StartSmallEngine, daemon: LocalDaemon, device: str, daemon_owned: bool
) -> None:
    engine = start_engine(daemon, daemon_owned=daemon_owned)
    for seed in range(rounds(device)):
        wanted = engine.expected(BLOCKS, seed)
        assert np.array_equal(store_while_written(engine, seed, fenced=True), wanted), seed


def test_stores_without_a_fence_come_too_early(
    start_engine: StartSmallEngine, daemon: LocalDaemon, device: str
) -> None:
    engine = start_engine(daemon)
    wrong = 0
    for seed in range(rounds(device)):
        wanted = engine.expected(BLOCKS, seed)
        wrong += not np.array_equal(store_while_written(engine, seed, fenced=False), wanted)
    print(f"{wrong} of {rounds(device)} rounds went wrong without the fence")
    assert wrong > rounds(device) / 2


def test_loads_behind_kernels_that_still_read(
    start_engine: StartSmallEngine, daemon: LocalDaemon, device: str
) -> None:
    engine = start_engine(daemon)
    for seed in range(0, 2 * rounds(device), 2):
        seen, loaded = load_while_read(engine, seed, fenced=True)
        assert np.array_equal(seen, engine.expected(COPIES, seed + 1)), seed
        assert np.array_equal(loaded, engine.expected(BLOCKS, seed)), seed


def test_loads_without_a_fence_come_too_early(
    start_engine: StartSmallEngine, daemon: LocalDaemon, device: str
) -> None:
    engine = start_engine(daemon)
    wrong = 0
    for seed in range(0, 2 * rounds(device), 2):
        seen, _ = load_while_read(engine, seed, fenced=False)
        wrong += not np.array_equal(seen, engine.expected(COPIES, seed + 1))
    print(f"{wrong} of {rounds(device)} rounds went wrong without the fence")
    assert wrong > rounds(device) / 2


def still_held(engine: SmallEngine, job: int) -> bool:
    """Whether a job has not ended, though the daemon had time for it."""
    with pytest.raises(Gone) as late:
        engine.client.wait([job], timeout=0.05)
    assert late.value.code == "timeout"
    return job not in ended(engine.poll())


def ended(results: list[TransferResult]) -> list[int]:
    return [result.job_id for result in results]


def test_a_scheduler_may_submit_before_the_worker_launches(
    start_engine: StartSmallEngine, daemon: LocalDaemon
) -> None:
    engine = start_engine(daemon)
    value = engine.worker.write(BLOCKS, 1)
    for to_come in range(1, 6):
        job = engine.store(BLOCKS, BLOCKS, wait_for=value + to_come)
        assert still_held(engine, job)
        assert engine.worker.write(BLOCKS, 1 + to_come) == value + to_come
        assert engine.finish(job)[0].success
        engine.finish(engine.load(BLOCKS, COPIES))
        assert np.array_equal(engine.worker.read(COPIES), engine.expected(BLOCKS, 1 + to_come))


def test_a_load_behind_a_store_that_is_cancelled_loads_nothing(
    start_engine: StartSmallEngine, daemon: LocalDaemon
) -> None:
    """It was accepted while the store could still complete."""
    engine = start_engine(daemon)
    value = engine.worker.write([0, 5], 1)
    held = engine.store([0], [0], wait_for=value + 1)
    behind = engine.load([0], [5])
    assert still_held(engine, behind)
    engine.client.cancel([held])
    cancelled, stale = engine.finish(held, behind)
    assert (cancelled.outcome, stale.outcome) == ("cancelled", "failed")
    assert stale.error is not None
    assert stale.error.code == Code.STALE
    assert np.array_equal(engine.worker.read([5]), engine.expected([5], 1))
