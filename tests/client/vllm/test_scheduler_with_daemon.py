"""The scheduler's side over a real daemon, without vLLM."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from kvferry.client import namespace as client_namespace
from kvferry.client.engines import search_answers
from kvferry.client.vllm.scheduler_side import (
    SchedulerSide,
)
from kvferry.client.vllm.worker_side import WorkerSide
from kvferry.testing.plugin import StartKvferryd
from support.scheduler_helpers import A, B, answers, open_side, until
from support.time_limits import TIMEOUT
from support.vllm_stand_ins import finished, gpu_blocks, open_worker, request


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
