"""The scheduler's side over a real daemon, without vLLM."""

from __future__ import annotations

import mmap
import signal
from pathlib import Path

import pytest

from kvferry.client import Code
from kvferry.client import namespace as client_namespace
from kvferry.client.engines import search_answers
from kvferry.client.vllm.scheduler_side import (
    KeysSpec,
    SchedulerSide,
)
from kvferry.client.vllm.worker_side import WorkerSide
from kvferry.testing.plugin import StartKvferryd
from support.pool_files import pool_files
from support.scheduler_helpers import A, B, C, answers, open_side, until
from support.time_limits import TIMEOUT
from support.vllm_stand_ins import finished, gpu_blocks, kv_caches, open_worker, request


def test_store_look_up_load_reset(start_kvferryd: StartKvferryd) -> None:
    daemon = start_kvferryd()
    side, worker = open_side(daemon, events=True), open_worker(daemon)
    output = side.prepare_store([A, B], request())
    worker.store(1, gpu_blocks(1, 2), output.store_spec)
    assert finished(worker, 1)[1].success
    side.complete_store({A, B}, request())
    until(lambda: answers(side, A, B, C) == ["hit", "hit", "miss"], side)
    assert [(set(e.keys), e.removed) for e in side.events() or ()] == [({A, B}, False)]
    worker.load(2, side.prepare_load([A, B], request()), gpu_blocks(3, 4))
    assert finished(worker, 1)[2].success
    side.complete_load({A, B}, request())
    stale = side.prepare_store([C], request())
    side.reset_cache()
    assert answers(side, A, B) == ["miss", "miss"]
    until(lambda: refusal(worker, 3, stale.store_spec) == Code.STALE, side)
    worker.load(4, KeysSpec((A,)), gpu_blocks(3))
    assert not finished(worker, 1)[4].success
    side.shutdown()
    worker.shutdown()


def test_a_daemon_killed_while_loads_are_pending(
    start_kvferryd: StartKvferryd, tmp_path: Path
) -> None:
    daemon = start_kvferryd(runtime_dir=tmp_path / "run")
    side, worker = open_side(daemon), open_worker(daemon)
    store(side, worker, 1, A)
    until(lambda: answers(side, A) == ["hit"], side)
    daemon.process.send_signal(signal.SIGSTOP)  # the daemon completes no job
    spec = side.prepare_load([A], request())
    worker.load(2, spec, gpu_blocks(3))
    daemon.kill()
    assert not finished(worker, 1)[2].success
    side.complete_load({A}, request())
    until(lambda: answers(side, A) == ["miss"], side)
    assert not side.prepare_store([B], request()).keys_to_store
    side.on_schedule_end()
    start_kvferryd(runtime_dir=tmp_path / "run")
    until(lambda: store(side, worker, 3, A), side)
    until(lambda: answers(side, A) == ["hit"], side)
    assert not side.has_pending_work()
    side.shutdown()
    worker.shutdown()


def store(side: SchedulerSide, worker: WorkerSide, job_id: int, key: bytes) -> bool:
    output = side.prepare_store([key], request())
    if not output.keys_to_store:
        return False
    worker.store(job_id, gpu_blocks(1), output.store_spec)
    success = finished(worker, 1)[job_id].success
    side.complete_store({key}, request())
    return success


def refusal(worker: WorkerSide, job_id: int, spec: KeysSpec) -> str:
    worker.store(job_id, gpu_blocks(5), spec)
    error = finished(worker, 1)[job_id].error
    return "" if error is None else error.code


def test_a_block_that_the_scrub_found_corrupt_is_a_miss_and_can_be_stored_again(
    start_kvferryd: StartKvferryd,
) -> None:
    daemon = start_kvferryd(integrity_scrub_rate="1GiB")
    caches = kv_caches()
    (tensor,) = (one.tensor for one in caches.tensors)
    side, worker = open_side(daemon), open_worker(daemon, caches)
    tensor[1] = 7
    assert store(side, worker, 1, A)
    until(lambda: answers(side, A) == ["hit"], side)
    first = pool_files(daemon.pid)[0]
    with first.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        at = memory.find(bytes([7]) * 64)
        assert at >= 0, f"the block is not in {first}"

        def changed_and_found() -> bool:
            """The scrub reads the block once the daemon has committed it."""
            memory[at] = (memory[at] + 1) % 256
            return answers(side, A) == ["miss"]

        until(changed_and_found, side)
    until(lambda: answers(side, A) == ["miss"] and not side.has_pending_work(), side)
    assert store(side, worker, 100, A)
    until(lambda: answers(side, A) == ["hit"], side)
    worker.load(101, side.prepare_load([A], request()), gpu_blocks(3))
    assert finished(worker, 1)[101].success
    assert (tensor[3] == 7).all()
    side.shutdown()
    worker.shutdown()


def test_the_first_lookup_waits_for_the_answer_to_the_search(
    start_kvferryd: StartKvferryd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So vLLM schedules a new prompt in the next step, although siblings are asked."""
    monkeypatch.setattr(search_answers, "ANSWER_SECONDS", TIMEOUT)
    side = open_side(start_kvferryd(siblings_enabled="true"))
    side.request_arrived("request", [A, B], 0.0)
    assert answers(side, A) == ["miss"]
    side.shutdown()


def test_a_lookup_waits_shortly_and_once_for_a_stopped_daemon(
    start_kvferryd: StartKvferryd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_namespace, "SEARCH_TIMEOUT", TIMEOUT)
    daemon = start_kvferryd(siblings_enabled="true")
    side = open_side(daemon)
    daemon.process.send_signal(signal.SIGSTOP)
    side.request_arrived("request", [A, B], 0.0)
    polls = list[None]()
    poll = side._manager.poll
    monkeypatch.setattr(side._manager, "poll", lambda: polls.append(poll()))
    assert answers(side, A) == ["retry"]
    assert polls
    polls.clear()
    assert answers(side, A) == ["retry"]
    assert not polls
    daemon.kill()
    side.shutdown()
