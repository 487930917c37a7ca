"""What vLLM would give its connector's halves, in shape, where there is no vLLM."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from kvferry.client import Fingerprint, TransferResult, shared_empty
from kvferry.client.vllm.place import Place
from kvferry.client.vllm.worker import WorkerSide

PAGE = 4096
BLOCKS = 16
KEY_BYTES = 8


def place_at(directory: Path | str, **options: Any) -> Place:
    """An engine of one rank, whose host blocks are one page."""
    return Place(
        engine="engine",
        fingerprint=Fingerprint("model", PAGE, key_bytes=KEY_BYTES),
        rank=0,
        world_size=1,
        factor=1,
        options={"cpu_bytes_to_use": 1 << 20, **options},
        directories=(str(directory),),
        first_device=0,
    )


def kv_caches() -> Any:
    """Its canonical KV caches, in shared memory: one tensor."""
    tensor = shared_empty((BLOCKS, PAGE), torch.int8, "cpu")
    return SimpleNamespace(
        tensors=[SimpleNamespace(tensor=tensor, page_size_bytes=PAGE)],
        group_data_refs=[[SimpleNamespace(tensor_idx=0, page_size_bytes=PAGE)]],
    )


def gpu_blocks(*ids: int) -> Any:
    """A GPULoadStoreSpec."""
    return SimpleNamespace(block_ids=list(ids), group_sizes=[len(ids)], block_indices=[0])


def request(name: str = "request") -> Any:
    """A ReqContext."""
    return SimpleNamespace(req_id=name)


def finished(worker: WorkerSide, count: int, seconds: float = 20.0) -> dict[int, TransferResult]:
    """The next `count` results of a worker, by job; fewer where they do not come in time."""
    results: dict[int, TransferResult] = {}
    deadline = time.monotonic() + seconds
    while len(results) < count and time.monotonic() < deadline:
        results |= {result.job_id: result for result in worker.get_finished()}
    return results
