"""Fakes of the objects that vLLM passes to both sides of its connector, without vLLM."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Unpack

import torch

from kvferry.client import Fingerprint, LocalDaemon, TransferResult, shared_empty
from kvferry.client.session_state import NamespaceOptions
from kvferry.client.vllm.engine_config import EngineConfig
from kvferry.client.vllm.worker_side import WorkerSide
from support.time_limits import TIMEOUT

PAGE = 4096
BLOCKS = 16
KEY_BYTES = 8


def prompt(number: int, tokens: int = 200) -> list[int]:
    """Tokens of a request. Those of another number have no common beginning."""
    return [(number * 37 + n * 11) % 900 for n in range(tokens)]


def engine_config_at(directory: Path | str, **options: Unpack[NamespaceOptions]) -> EngineConfig:
    """The configuration of an engine with one rank, whose host blocks are one page."""
    return EngineConfig(
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
    """Canonical KV caches of that engine: one tensor, in shared memory."""
    tensor = shared_empty((BLOCKS, PAGE), torch.int8, "cpu")
    return SimpleNamespace(
        tensors=[SimpleNamespace(tensor=tensor, page_size_bytes=PAGE)],
        group_data_refs=[[SimpleNamespace(tensor_idx=0, page_size_bytes=PAGE)]],
    )


def open_worker(daemon: LocalDaemon, caches: Any = None, **options: Any) -> WorkerSide:
    """A worker's side that is connected. options: of WorkerSide."""
    caches = kv_caches() if caches is None else caches
    worker = WorkerSide(engine_config_at(daemon.directory), caches, **options)
    wait_connected(worker.session.client)
    return worker


def wait_connected(client: Any) -> None:
    """client: OffloadClient or OffloadingManager. An engine does not wait for so long."""
    client.wait_connected(TIMEOUT)


def gpu_blocks(*ids: int) -> Any:
    """A GPULoadStoreSpec."""
    return SimpleNamespace(block_ids=list(ids), group_sizes=[len(ids)], block_indices=[0])


def request(name: str = "request") -> Any:
    """A ReqContext."""
    return SimpleNamespace(req_id=name)


def finished(worker: WorkerSide, count: int, seconds: float = TIMEOUT) -> dict[int, TransferResult]:
    """The next `count` results of a worker, by job; fewer if they do not arrive in time."""
    results: dict[int, TransferResult] = {}
    deadline = time.monotonic() + seconds
    while len(results) < count and time.monotonic() < deadline:
        results |= {result.job_id: result for result in worker.get_finished()}
    return results


def vllm_config(engine: str, extra: dict[str, Any]) -> Any:
    """The attributes of a VllmConfig that the connector reads. GPU blocks have 16 tokens."""
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            engine_id=engine,
            kv_role="kv_both",
            kv_connector_extra_config=extra,
            kv_load_failure_policy="recompute",
        ),
        kv_events_config=None,
        model_config=SimpleNamespace(
            model="llama",
            revision=None,
            dtype="bfloat16",
            hf_config=SimpleNamespace(_commit_hash="aaaa"),
            max_model_len=8192,
            use_mla=False,
            get_total_num_kv_heads=lambda: 1,
        ),
        cache_config=SimpleNamespace(
            block_size=16,
            cache_dtype="auto",
            enable_prefix_caching=True,
            prefix_caching_hash_algo="sha256",
            mamba_block_size=None,
            prefix_match_unit=None,
            hash_block_size=None,
            kv_cache_layout=None,
            prefix_cache_retention_interval=None,
        ),
        parallel_config=SimpleNamespace(
            rank=0,
            world_size=1,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
            data_parallel_rank_local=None,
            data_parallel_index=0,
            data_parallel_size=1,
            nnodes_within_dp=1,
            cp_kv_cache_interleave_size=1,
            distributed_executor_backend="uni",
            data_parallel_backend="mp",
        ),
        speculative_config=None,
        use_v2_model_runner=False,
    )
