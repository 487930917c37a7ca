"""Copies that fail: their jobs fail with COPY_FAILED, and other jobs complete."""

from __future__ import annotations

from kvferry.client import Code, Failed
from kvferry.testing.engine import StartSmallEngine
from kvferry.testing.plugin import StartKvferryd


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
