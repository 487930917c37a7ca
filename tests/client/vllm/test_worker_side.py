"""The worker's side over a real daemon: every job has one result, whatever fails."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from kvferry.client import Code, Failed, Gone, LocalDaemon, Lookup, OffloadClient
from kvferry.client.timeline import Timeline
from kvferry.client.vllm.engine_config import EngineConfig
from kvferry.client.vllm.scheduler_side import KeysSpec
from kvferry.client.vllm.worker_side import WorkerSide
from kvferry.testing.engine import until
from kvferry.testing.plugin import StartKvferryd
from support.vllm_stand_ins import (
    engine_config_at,
    finished,
    gpu_blocks,
    kv_caches,
    open_worker,
)

A, B, C = b"a" * 8, b"b" * 8, b"c" * 8

Start: TypeAlias = Callable[..., WorkerSide]


@pytest.fixture
def start_worker() -> Iterator[Start]:
    """start_worker(daemon, **options) -> a worker, which is shut down after the test."""
    with ExitStack() as running:

        def start(daemon: LocalDaemon, **options: Any) -> WorkerSide:
            worker = open_worker(daemon, **{"wait_timeout": 0.5, **options})
            running.callback(worker.shutdown)
            return worker

        yield start


def is_connected(worker: WorkerSide) -> bool:
    """After a poll."""
    worker.session.poll()
    return worker.session.client is not None and worker.session.client.connected


def ended(worker: WorkerSide, count: int) -> dict[int, bool]:
    return {job_id: result.success for job_id, result in finished(worker, count).items()}


def test_a_rank_stores_the_keys_that_it_writes(
    start_kvferryd: StartKvferryd, start_worker: Start
) -> None:
    """Rank 0 of two writes A, B and C."""
    caches, other = kv_caches(), b"d" * 8
    tensor = caches.tensors[0].tensor
    worker = start_worker(start_kvferryd(), caches=caches)
    tensor[1], tensor[2], tensor[3] = 1, 2, 3
    worker.store(1, gpu_blocks(2), KeysSpec((other,), writers=2))
    assert [(r.job_id, r.success, r.transfer_size) for r in worker.get_finished()] == [(1, True, 0)]
    worker.store(2, gpu_blocks(1, 2, 3), KeysSpec((A, other, C), writers=2))
    assert ended(worker, 1) == {2: True}
    worker.load(3, KeysSpec((A, C)), gpu_blocks(4, 5))
    worker.load(4, KeysSpec((other,)), gpu_blocks(6))
    assert ended(worker, 2) == {3: True, 4: False}
    assert tensor[[4, 5], 0].tolist() == [1, 3]


def test_waiting_for_loads_reports_each_result_once(
    start_kvferryd: StartKvferryd, start_worker: Start
) -> None:
    worker = start_worker(start_kvferryd())
    worker.wait_next_load()
    worker.store(1, gpu_blocks(1), KeysSpec((A,)))
    worker.wait_next_load()  # it does not wait for stores
    assert ended(worker, 1) == {1: True}
    told: list[int] = []
    for job_id in range(2, 20):
        worker.load(job_id, KeysSpec((A,)), gpu_blocks(2))
        worker.wait_next_load()
        told += [result.job_id for result in worker.get_finished()]
    while len(told) < 18:
        worker.wait_next_load()
        told += [result.job_id for result in worker.get_finished()]
    assert told == list(range(2, 20))


def test_a_load_that_does_not_end_is_awaited_for_a_moment_only(
    start_kvferryd: StartKvferryd, start_worker: Start
) -> None:
    daemon = start_kvferryd()
    worker = start_worker(daemon)
    worker.store(1, gpu_blocks(1), KeysSpec((A,)))
    assert ended(worker, 1) == {1: True}
    daemon.process.send_signal(signal.SIGSTOP)
    worker.load(2, KeysSpec((A,)), gpu_blocks(2))
    worker.wait_next_load()
    assert not worker.get_finished()
    daemon.process.send_signal(signal.SIGCONT)
    assert ended(worker, 1) == {2: True}


def test_jobs_end_before_the_kv_caches_lose_their_memory(
    start_kvferryd: StartKvferryd, start_worker: Start
) -> None:
    """And a job that is submitted during the sleep fails."""
    daemon = start_kvferryd()
    worker = start_worker(daemon)
    worker.store(1, gpu_blocks(1), KeysSpec((A,)))
    worker.session.suspend()
    with OffloadClient(daemon.directory) as observer:
        until(lambda: not any(engine.present for engine in observer.status().engines))
    worker.load(2, KeysSpec((A,)), gpu_blocks(2))
    assert ended(worker, 2) == {1: True, 2: False}
    worker.session.resume()
    worker.load(3, KeysSpec((A,)), gpu_blocks(2))
    assert ended(worker, 1) == {3: True}


def test_jobs_with_wrong_keys_or_from_before_a_reset_fail(
    start_kvferryd: StartKvferryd, start_worker: Start
) -> None:
    worker = start_worker(start_kvferryd())
    worker.load(1, KeysSpec((A,)), gpu_blocks(3))
    worker.load(2, KeysSpec((b"short",)), gpu_blocks(3))
    worker.store(3, gpu_blocks(1), KeysSpec((A,), epochs=(7,)))
    results = finished(worker, 3)
    codes = {job_id: result.error.code for job_id, result in results.items() if result.error}
    assert codes == {1: Code.KEY_ABSENT, 2: Code.BAD_KEY, 3: Code.STALE}
    worker.store(4, gpu_blocks(1), KeysSpec((A,), epochs=(0,)))
    assert ended(worker, 1) == {4: True}


def test_a_job_whose_stream_cannot_be_followed_has_failed(
    start_kvferryd: StartKvferryd, start_worker: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was submitted, and nothing would ever let it begin."""
    worker = start_worker(start_kvferryd())

    def break_down(*_: object) -> int:
        raise Failed(Code.DRIVER, "the context is broken")

    with monkeypatch.context() as broken:
        broken.setattr(Timeline, "signal", break_down)
        worker.store(1, gpu_blocks(1), KeysSpec((A,)))
    assert ended(worker, 1) == {1: False}


def test_jobs_that_do_not_end_are_given_up(
    start_kvferryd: StartKvferryd, start_worker: Start
) -> None:
    worker = start_worker(start_kvferryd(reference_stall=2, stop_drain_seconds=0))
    worker.store(1, gpu_blocks(1), KeysSpec((A,)))
    worker.store(2, gpu_blocks(2), KeysSpec((B,)))
    worker.wait({1, 2})
    assert ended(worker, 2) == {1: False, 2: False}


def test_a_daemon_that_stood_still_keeps_nothing_of_blocks_that_were_given_away(
    start_kvferryd: StartKvferryd, start_worker: Start
) -> None:
    """And it is of use again."""
    daemon = start_kvferryd(reference_stall=1.0)
    worker = start_worker(daemon)
    (cache,) = worker.session.kv_caches.tensors
    cache[1], cache[2] = 1, 2
    worker.store(1, gpu_blocks(1), KeysSpec((A,)))
    assert ended(worker, 1) == {1: True}
    worker.store(2, gpu_blocks(1, 2), KeysSpec((B, C)))
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        worker.wait({2})
        assert ended(worker, 1) == {2: False}
        cache[1:3] = 7  # another request's
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    until(lambda: is_connected(worker))
    with OffloadClient(daemon.directory, engine="reader") as reader:
        reader.open_namespace(worker._config.fingerprint)
        until(lambda: reader.lookup(A) is Lookup.HIT)
        assert reader.lookup(B) is Lookup.MISS
    worker.load(3, KeysSpec((A,)), gpu_blocks(2))
    assert ended(worker, 1) == {3: True}
    assert int(cache[2, 0]) == 1


@pytest.mark.parametrize("waits", [False, True])
def test_jobs_of_a_daemon_that_was_killed_have_failed(
    start_kvferryd: StartKvferryd, start_worker: Start, waits: bool
) -> None:
    """vLLM may use their blocks then, so a daemon that is only disconnected must not."""
    daemon = start_kvferryd(reference_stall=5)
    worker = start_worker(daemon)
    assert worker.session.timeline is not None
    worker.store(1, gpu_blocks(1), KeysSpec((A,)))
    daemon.kill()
    if waits:
        worker.wait({1})
    else:
        assert ended(worker, 1) == {1: False}
    assert worker.session.timeline.revoked
    worker.store(2, gpu_blocks(2), KeysSpec((B,)))
    assert ended(worker, 1 + waits) == dict.fromkeys((1, 2) if waits else (2,), False)


def test_without_a_daemon_every_job_fails_and_attempts_leave_nothing_open(tmp_path: Path) -> None:
    """While a daemon is disconnected there are many attempts."""
    worker = WorkerSide(engine_config_at(tmp_path / "nowhere"), kv_caches(), connect_timeout=0.01)
    worker.load(1, KeysSpec((A,)), gpu_blocks(3))
    worker.wait({1})
    assert ended(worker, 1) == {1: False}
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    assert worker.session.client is not None
    for _ in range(20):
        worker.session.client.abandon()  # ends the attempt; the next one begins at the next poll
        worker.get_finished()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
    worker.shutdown()


def test_a_daemon_that_comes_later_is_found(
    start_kvferryd: StartKvferryd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its directory is searched at each attempt."""
    directories: list[Path] = []

    def find(*_: object) -> Path:
        if not directories:
            raise Gone(Code.DAEMON_GONE, "no daemon")
        return directories[0]

    monkeypatch.setattr(EngineConfig, "find_daemon", find)
    worker = WorkerSide(engine_config_at("unused"), kv_caches())
    worker.store(1, gpu_blocks(1), KeysSpec((A,)))
    assert ended(worker, 1) == {1: False}
    directories.append(start_kvferryd().directory)
    until(lambda: is_connected(worker))
    worker.store(2, gpu_blocks(1), KeysSpec((A,)))
    assert ended(worker, 1) == {2: True}
    worker.shutdown()


def test_a_worker_whose_gpu_has_failed_shuts_down_all_the_same(
    start_kvferryd: StartKvferryd, start_worker: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = start_worker(start_kvferryd())
    closed: list[Timeline] = []

    def close(timeline: Timeline) -> None:
        closed.append(timeline)
        raise Failed(Code.DRIVER, "cuMemHostUnregister: no")

    with monkeypatch.context() as broken:
        broken.setattr(Timeline, "close", close)
        worker.shutdown()
    assert closed == [worker.session.timeline]
    for timeline in closed:
        timeline.close()
