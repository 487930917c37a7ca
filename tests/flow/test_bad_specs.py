"""A wrong transfer gets its code, copies nothing, is counted, and leaves the others alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvferry.client import (
    Code,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    KVFerryError,
    LocalDaemon,
    OffloadClient,
    Refused,
    TransferSpec,
)
from kvferry.testing.engine import GroupOptions, SmallEngine, StartSmallEngine
from kvferry.testing.plugin import StartKvferryd
from support.raw_client import RawClient, store

ALL = range(32)
TWO_GROUPS = (GroupOptions(2, (4, 2, 8)), GroupOptions(3, (2, 1, 8)))


def gpu(ids: list[int], sizes: Any = None, firsts: Any = None) -> GPULoadStoreSpec:
    sizes = (len(ids), 0) if sizes is None else sizes
    return GPULoadStoreSpec(np.array(ids, dtype=np.int64), sizes, firsts)


def cpu(*ids: int) -> CPULoadStoreSpec:
    return CPULoadStoreSpec(np.array(ids, dtype=np.int64))


BAD: dict[str, tuple[TransferSpec, Code]] = {
    "GPU block out of range": ((gpu([0, 32]), cpu(0)), Code.BLOCK_OUT_OF_RANGE),
    "GPU block of group 1": ((gpu([0, 32], (1, 1)), cpu(0, 1)), Code.BLOCK_OUT_OF_RANGE),
    "GPU block negative": ((gpu([-1, 0]), cpu(0)), Code.BLOCK_OUT_OF_RANGE),
    "GPU block far out": ((cpu(0), gpu([1 << 62, 0])), Code.BLOCK_OUT_OF_RANGE),
    "host block out of range": ((gpu([0, 1]), cpu(16)), Code.BLOCK_OUT_OF_RANGE),
    "host block negative": ((cpu(-1), gpu([0, 1])), Code.BLOCK_OUT_OF_RANGE),
    "host block far out": ((cpu(-1 << 63), gpu([0, 1])), Code.BLOCK_OUT_OF_RANGE),
    "GPU block loaded twice": ((cpu(0), gpu([4, 4])), Code.DUPLICATE_BLOCK),
    "host block stored twice": ((gpu([0, 1, 2, 3]), cpu(5, 5)), Code.DUPLICATE_BLOCK),
    "host block of both groups": ((gpu([0, 1], (1, 1)), cpu(5, 5)), Code.DUPLICATE_BLOCK),
    "sizes above the ids": ((gpu([0, 1], (2, 1)), cpu(0, 1)), Code.SIZE_MISMATCH),
    "sizes below the ids": ((gpu([0, 1, 2], (1, 1)), cpu(0, 1)), Code.SIZE_MISMATCH),
    "too few host blocks": ((gpu([0, 1, 2]), cpu(0)), Code.SIZE_MISMATCH),
    "too many host blocks": ((gpu([0, 1]), cpu(0, 1)), Code.SIZE_MISMATCH),
    "host blocks for nothing": ((gpu([]), cpu(0)), Code.SIZE_MISMATCH),
    "first index needs one more": ((gpu([0, 1], (2, 0), (1, 0)), cpu(0)), Code.SIZE_MISMATCH),
    "no sizes": ((GPULoadStoreSpec(np.array([0, 1])), cpu(0)), Code.UNKNOWN_GROUP),
    "one size": ((gpu([0, 1], (2,)), cpu(0)), Code.UNKNOWN_GROUP),
    "three sizes": ((gpu([0, 1], (2, 0, 0)), cpu(0)), Code.UNKNOWN_GROUP),
    "one index": ((gpu([0, 1], (2, 0), (0,)), cpu(0)), Code.UNKNOWN_GROUP),
    "GPU to GPU": ((gpu([0, 1]), gpu([2, 3])), Code.BAD_SPEC),
    "host to host": ((cpu(0), cpu(1)), Code.BAD_SPEC),
}


def errors(engine: SmallEngine, code: Code) -> int:
    return engine.client.status().errors.get(code, 0)


@pytest.fixture
def engine(start_engine: StartSmallEngine, daemon: LocalDaemon) -> SmallEngine:
    """Two groups, factor 2, 16 host blocks, all of them stored."""
    opened = start_engine(daemon, groups=TWO_GROUPS, block_size_factor=2, host_bytes=16 * 2 * 512)
    assert opened.region.num_blocks == 16
    fence = opened.worker.write(ALL, 1)
    opened.finish(opened.store(ALL, range(16), sizes=(32, 0), wait_for=fence))
    return opened


@pytest.mark.parametrize("name", BAD)
def test_a_bad_spec(engine: SmallEngine, name: str) -> None:
    spec, code = BAD[name]
    fence = engine.worker.write(ALL, 2)
    before, counted = engine.worker.snapshot(), errors(engine, code)
    held = engine.store([30, 31], [15], sizes=(2, 0), wait_for=fence + 1)
    bad = engine.submit(spec)
    (result,) = engine.finish(bad)
    assert (result.outcome, result.success, result.transfer_size) == ("refused", False, 0)
    assert isinstance(result.error, Refused)
    assert result.error.code == code
    assert result.error.message
    assert errors(engine, code) == counted + 1

    assert engine.worker.signal() == fence + 1
    assert engine.finish(held)[0].success
    same = zip(engine.worker.snapshot(), before, strict=True)
    assert all(np.array_equal(now, then) for now, then in same)
    engine.finish(engine.load(range(16), ALL, sizes=(32, 0)))
    wanted = engine.expected(ALL, 1)
    wanted[30:] = engine.expected([30, 31], 2)
    assert np.array_equal(engine.worker.read(ALL), wanted)


def test_the_refusal_names_the_offending_value(engine: SmallEngine) -> None:
    results = engine.finish(
        engine.submit((gpu([0, 77]), cpu(0))), engine.submit((cpu(-3), gpu([0, 1])))
    )
    said = [(r.error.value, r.error.message) for r in results if r.error]
    assert [value for value, _ in said] == ["77", "-3"]
    assert all("31" in said[0][1] and "15" in said[1][1] for _ in said)


@pytest.mark.parametrize(
    "make",
    [
        lambda: GPULoadStoreSpec(np.zeros((2, 2), dtype=np.int64)),
        lambda: GPULoadStoreSpec(np.array([0.5, 1.5])),
        lambda: CPULoadStoreSpec(np.array(["a"])),
        lambda: CPULoadStoreSpec(np.zeros((1 << 20) + 1, dtype=np.int64)),
    ],
    ids=["two dimensions", "fractions", "text", "too many"],
)
def test_ids_that_are_none(make: Callable[[], object]) -> None:
    with pytest.raises(Refused) as refused:
        make()
    assert refused.value.code == Code.BAD_SPEC


UNSPEAKABLE: dict[str, tuple[Any, Any, Any]] = {
    "negative job id": (-1, (gpu([0, 1]), cpu(0)), 0),
    "job id too large": (1 << 64, (gpu([0, 1]), cpu(0)), 0),
    "job id of numpy": (np.int64(7), (gpu([0, 1]), cpu(0)), 0),
    "negative fence": (8, (gpu([0, 1]), cpu(0)), -1),
    "negative size": (9, (gpu([0, 1], (3, -1)), cpu(0)), 0),
    "negative index": (10, (gpu([0, 1], (2, 0), (-1, 0)), cpu(0)), 0),
    "sizes of numpy": (11, (gpu([0, 1], np.array([2, 0])), cpu(0)), 0),
    "one size, of numpy": (15, (gpu([0, 1], np.array([2])), cpu(0)), 0),
    "a list for sizes": (12, (gpu([0, 1], [2, 0]), cpu(0)), 0),
    "three sides": (13, (gpu([0, 1]), cpu(0), cpu(1)), 0),
    "no specs": (14, ([0, 1], [0]), 0),
}


@pytest.mark.parametrize("name", UNSPEAKABLE)
def test_what_cannot_be_said(engine: SmallEngine, name: str) -> None:
    """Refused at once, or with a result of its own; never a job that does not end."""
    job_id, spec, fence = UNSPEAKABLE[name]
    client = engine.client
    try:
        client.transfer_async(job_id, spec, fence)
    except (KVFerryError, TypeError, ValueError):
        assert client.get_finished() == []
    else:
        client.wait([job_id], timeout=5)
        assert [result.job_id for result in client.get_finished()] == [job_id]
    assert client.status().sessions
    assert engine.finish(engine.submit((cpu(0), gpu([0, 1]))))[0].success


def test_a_transfer_of_nothing_is_done(engine: SmallEngine) -> None:
    nothing = engine.submit((gpu([]), cpu())), engine.submit((cpu(), gpu([])))
    assert [(r.success, r.transfer_size) for r in engine.finish(*nothing)] == [(True, 0)] * 2


def test_a_fence_without_a_timeline(start_engine: StartSmallEngine, daemon: LocalDaemon) -> None:
    engine = start_engine(daemon, timeline=False)
    counted = errors(engine, Code.NO_TIMELINE)
    bad, good = engine.store([0], [0], wait_for=1), engine.store([1], [1])
    refused, done = engine.finish(bad, good)
    assert refused.error is not None
    assert refused.error.code == Code.NO_TIMELINE
    assert done.success
    assert errors(engine, Code.NO_TIMELINE) == counted + 1


def test_a_spec_before_any_registration(kvferryd: LocalDaemon) -> None:
    with OffloadClient(kvferryd.directory, engine="early") as client:
        client.transfer_async(1, (gpu([0]), cpu(0)))
        client.wait([1])
        (result,) = client.get_finished()
        assert result.error is not None
        assert (result.outcome, result.error.code) == ("refused", Code.NOT_REGISTERED)
        assert client.status().errors == {Code.NOT_REGISTERED: 1}


def test_a_job_id_twice(engine: SmallEngine, daemon: LocalDaemon) -> None:
    """Refused by the client; by the daemon where another process of the engine uses it."""
    fence = engine.worker.signal() + 1
    job = engine.store([0, 1], [0], sizes=(2, 0), wait_for=fence)
    with pytest.raises(Refused) as refused:
        engine.client.transfer_async(job, (gpu([2, 3]), cpu(1)))
    assert refused.value.code == Code.DUPLICATE_JOB
    counted = errors(engine, Code.DUPLICATE_JOB)
    with RawClient(daemon.directory, engine.options.name) as second:
        second.send(store(job, [2, 3], [1]))
        result = second.result(job)
    assert result.error is not None
    assert (result.outcome, result.error.code) == ("refused", Code.DUPLICATE_JOB)
    assert errors(engine, Code.DUPLICATE_JOB) == counted + 1
    engine.worker.signal()
    assert engine.finish(job)[0].success
    engine.client.transfer_async(job, (gpu([2, 3]), cpu(1)))
    engine.client.wait([job])
    assert engine.client.get_finished()[0].success


def test_too_many_jobs(start_engine: StartSmallEngine, start_kvferryd: StartKvferryd) -> None:
    """BUSY beyond limits.max_stores, from the client and from the daemon; others are not."""
    daemon = start_kvferryd(limits_max_stores=3)
    engine = start_engine(daemon)
    fence = engine.worker.signal() + 1
    jobs = [engine.store([i], [i], wait_for=fence) for i in range(3)]
    with pytest.raises(Refused) as refused:
        engine.store([3], [3])
    assert refused.value.code == Code.BUSY
    with RawClient(daemon.directory, engine.options.name) as raw:
        for job_id in range(100, 105):
            raw.send(store(job_id, [4], [4], wait_for=fence))
        busy = [raw.result(job_id).error for job_id in (103, 104)]
    assert [error.code for error in busy if error] == [Code.BUSY] * 2
    assert engine.client.status().errors[Code.BUSY] == 2
    engine.worker.signal()
    assert all(result.success for result in engine.finish(*jobs))
    assert engine.finish(engine.store([3], [3]))[0].success
