"""Copies that fail: the job says so, with a code that means "a miss", and nothing else suffers."""

from __future__ import annotations

from kvferry.client import Code, Failed
from kvferry.testing.engine import GroupOptions, StartSmallEngine
from kvferry.testing.plugin import StartKvferryd

BLOCK_OF_ONE_MIB = GroupOptions(2, (128, 8, 128))


def test_every_third_copy_fails(
    start_engine: StartSmallEngine, start_kvferryd: StartKvferryd
) -> None:
    engine = start_engine(start_kvferryd(reference_fail_every=3))
    jobs = [engine.store([i], [i]) for i in range(9)]
    results = engine.finish(*jobs)
    assert [result.success for result in results] == [True, True, False] * 3
    assert [result.job_id for result in engine.history] == jobs
    for result in results[2::3]:
        assert (result.outcome, result.transfer_size, result.transfer_time) == ("failed", 0, 0.0)
        assert isinstance(result.error, Failed)
        assert result.error.code == Code.COPY_FAILED
    status = engine.client.status()
    assert (status.totals.stores, status.totals.failed) == (6, 3)
    assert status.errors == {Code.COPY_FAILED: 3}


def test_a_failed_piece_fails_its_job(
    start_engine: StartSmallEngine, start_kvferryd: StartKvferryd
) -> None:
    """A job of several pieces, every other of which fails, has one result; then one goes well."""
    daemon = start_kvferryd(pool_bytes=64 << 20, reference_fail_every=2)
    layout = {"num_blocks": 40, "host_bytes": 40 << 20, "daemon_owned": True}
    engine = start_engine(daemon, groups=(BLOCK_OF_ONE_MIB,), **layout)
    (failed,) = engine.finish(engine.store(range(40), range(40)))
    assert (failed.outcome, failed.transfer_size, failed.transfer_time) == ("failed", 0, 0.0)
    two = engine.finish(engine.store([0], [0]), engine.store([1], [1]))
    assert sorted(result.success for result in two) == [False, True]
    assert len(engine.history) == 3


def test_a_cancelled_job_stops_within_a_piece(
    start_engine: StartSmallEngine, start_kvferryd: StartKvferryd
) -> None:
    daemon = start_kvferryd(pool_bytes=96 << 20, reference_stall=0.1)
    layout = {"num_blocks": 90, "host_bytes": 90 << 20, "daemon_owned": True}
    engine = start_engine(daemon, groups=(BLOCK_OF_ONE_MIB,), **layout)
    job = engine.store(range(90), range(90))
    engine.client.status()
    engine.client.cancel([job])
    (result,) = engine.finish(job)
    assert (result.outcome, result.transfer_size, result.transfer_time) == ("cancelled", 0, 0.0)
    assert engine.client.status().errors == {Code.CANCELLED: 1}
    assert engine.client.status().totals.cancelled == 1
