"""The fence of a transfer makes it wait for the kernels that it depends on.

The kernels are slow, so that a copy without `wait_for` runs too early. Most rounds without the
fence must copy wrong bytes, or the rounds with it show nothing. (On a busy machine a copy without
the fence can be late and correct.)
"""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.client import Gone, LocalDaemon
from kvferry.testing.content import Bytes
from kvferry.testing.engine import SmallEngine, StartSmallEngine

SLOW = 0.03
BLOCKS = list(range(16))
COPIES = list(range(16, 32))


def seeds_on(device: str) -> range:
    return range(0, 200 if device.startswith("cuda") else 24, 2)


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
    engine.worker.read(COPIES)  # so that the write has ended before the load begins
    value = engine.worker.read_slowly(COPIES, SLOW)
    engine.finish(engine.load(BLOCKS, COPIES, wait_for=value if fenced else 0))
    return engine.worker.seen(), engine.worker.read(COPIES)


@pytest.mark.parametrize("daemon_owned", [False, True], ids=["engine-owned", "daemon-owned"])
def test_stores_wait_for_slow_kernels(
    start_engine: StartSmallEngine, daemon: LocalDaemon, device: str, daemon_owned: bool
) -> None:
    engine, wrong = start_engine(daemon, daemon_owned=daemon_owned), 0
    for seed in seeds_on(device):
        wanted = engine.expected(BLOCKS, seed)
        assert np.array_equal(store_while_written(engine, seed, fenced=True), wanted), seed
        wanted = engine.expected(BLOCKS, seed + 1)
        stored = store_while_written(engine, seed + 1, fenced=False)
        wrong += not np.array_equal(stored, wanted)
    print(f"{wrong} of {len(seeds_on(device))} rounds went wrong without the fence")
    assert wrong > len(seeds_on(device)) / 2


def test_loads_wait_for_kernels_that_still_read(
    start_engine: StartSmallEngine, daemon: LocalDaemon, device: str
) -> None:
    engine, wrong = start_engine(daemon), 0
    for seed in seeds_on(device):
        seen, loaded = load_while_read(engine, seed, fenced=True)
        assert np.array_equal(seen, engine.expected(COPIES, seed + 1)), seed
        assert np.array_equal(loaded, engine.expected(BLOCKS, seed)), seed
        seen, _ = load_while_read(engine, seed, fenced=False)
        wrong += not np.array_equal(seen, engine.expected(COPIES, seed + 1))
    print(f"{wrong} of {len(seeds_on(device))} rounds went wrong without the fence")
    assert wrong > len(seeds_on(device)) / 2


def are_waiting(engine: SmallEngine, *jobs: int) -> bool:
    """Whether none of the jobs has ended after 0.05 s."""
    with pytest.raises(Gone) as timed_out:
        engine.client.wait(jobs, timeout=0.05)
    assert timed_out.value.code == "timeout"
    assert timed_out.value.value == str(list(jobs))
    return not {result.job_id for result in engine.poll()} & set(jobs)


def test_directions_that_meet_in_a_block(
    start_engine: StartSmallEngine, daemon: LocalDaemon
) -> None:
    """A GPU block is stored, then loaded over, then stored. Each job sees the bytes of before."""
    engine = start_engine(daemon)
    value = engine.worker.write([0, 1, 2], 1)
    engine.finish(engine.store([1, 2], [1, 4], wait_for=value))
    first = engine.store([0], [2], wait_for=value + 1)
    independent = engine.load([4], [10])
    overwrite = engine.load([1], [0])
    second = engine.store([0], [3])
    of_first = engine.load([2], [8])
    assert engine.finish(independent)[0].success
    assert are_waiting(engine, first, overwrite, second, of_first)
    engine.worker.signal()
    assert all(result.success for result in engine.finish(first, overwrite, second, of_first))
    engine.finish(engine.load([3], [9]))
    assert np.array_equal(engine.worker.read([0, 8, 9, 10]), engine.expected([1, 0, 1, 2], 1))
