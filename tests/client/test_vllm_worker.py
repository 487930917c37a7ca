"""The worker's half against vLLM's own classes: every job is told of once, come what may.

Skipped where vLLM is not installed. Tensors are on the CPU: the stream stands in for CUDA's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvferry.client import Fingerprint, LocalDaemon, shared_empty
from kvferry.testing.plugin import StartKvferryd

base = pytest.importorskip("vllm.v1.kv_offload.base", reason="vLLM is not installed here")
PAGE = 4096


@pytest.fixture
def start_worker(monkeypatch: pytest.MonkeyPatch) -> Callable[[LocalDaemon], Any]:
    from kvferry.client.vllm import worker

    monkeypatch.setattr(worker, "FLUSH", 0.5)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: None)

    def start(daemon: LocalDaemon) -> Any:
        tensor = shared_empty((16, PAGE), torch.int8, "cpu")
        caches = base.CanonicalKVCaches(
            [base.CanonicalKVCacheTensor(tensor, PAGE)], [[base.CanonicalKVCacheRef(0, PAGE)]]
        )
        config = SimpleNamespace(
            parallel=SimpleNamespace(rank=0, world_size=1),
            cache=SimpleNamespace(blocks_per_chunk=1),
            extra_config={"kvferry_dirs": str(daemon.directory), "cpu_bytes_to_use": 1 << 20},
            engine_id="engine",
        )
        return worker.Worker(config, Fingerprint("model", PAGE, key_bytes=8), caches)

    return start


def store(worker: Any, job_id: int) -> None:
    from kvferry.client.vllm.scheduler import KeysSpec

    gpu = base.GPULoadStoreSpec([job_id], [1], [0])
    assert worker.submit_store(job_id, gpu, KeysSpec((job_id.to_bytes(8, "big"),)))


def ended(worker: Any, count: int) -> list[tuple[int, bool]]:
    results: list[Any] = []
    deadline = time.monotonic() + 10
    while len(results) < count and time.monotonic() < deadline:
        results += worker.get_finished()
    return sorted((result.job_id, result.success) for result in results)


def test_jobs_are_done(start_kvferryd: StartKvferryd, start_worker: Any) -> None:
    worker = start_worker(start_kvferryd())
    store(worker, 1)
    assert ended(worker, 1) == [(1, True)]
    worker.shutdown()


def test_jobs_that_do_not_end_are_given_up(
    start_kvferryd: StartKvferryd, start_worker: Any
) -> None:
    worker = start_worker(start_kvferryd(reference_stall=5, stop_drain_seconds=0))
    store(worker, 1)
    store(worker, 2)
    worker.wait({1, 2})
    assert ended(worker, 2) == [(1, False), (2, False)]
    worker.shutdown()


def test_jobs_of_a_daemon_that_was_killed_have_failed(
    start_kvferryd: StartKvferryd, start_worker: Any
) -> None:
    daemon = start_kvferryd(reference_stall=5)
    worker = start_worker(daemon)
    store(worker, 1)
    daemon.kill()
    worker.wait({1})
    store(worker, 2)
    assert ended(worker, 2) == [(1, False), (2, False)]
    worker.shutdown()
