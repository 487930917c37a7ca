"""A daemon for the worker of vLLM's tests, which does their stores and loads.

vLLM's tests decide when a job completes, and check block ids and keys only. Here each job is also
submitted to a KVFerryWorker. Each stored GPU block gets unique bytes, derived from its key and its
position in the chunk. Each loaded block must have the bytes of its key.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from kvferry.client import LocalDaemon, shared_empty
from kvferry.client.vllm import KVFerryConnector, KVFerrySpec
from kvferry.client.vllm.connector import FaultTolerantWorker
from kvferry.client.vllm.scheduler_side import KeysSpec
from kvferry.client.vllm.spec import KVFerryManager
from kvferry.proto.errors import Refused
from support.time_limits import TIMEOUT

POOL_BYTES = 64 << 20
HOST_BYTES = 256 << 10

_numbers = itertools.count()


class DaemonOfTests:
    """The daemon of all tests, started by the first test that needs it, and one test's workers."""

    def __init__(self) -> None:
        self._daemon: LocalDaemon | None = None
        self.workers: list[Any] = []
        self.transferred_blocks = 0

    def directory(self) -> str:
        if self._daemon is None:
            self._daemon = LocalDaemon("cpu", pool_bytes=POOL_BYTES)
        return str(self._daemon.directory)

    def end_test(self) -> None:
        for worker in self.workers:
            worker.shutdown()
        self.workers.clear()

    def close(self) -> None:
        if self._daemon is not None:
            self._daemon.close()


daemon = DaemonOfTests()


class ConnectorOverDaemon(KVFerryConnector):
    """KVFerryConnector with an extra configuration that selects the daemon of the tests."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        if "kvferry_dirs" not in extra:
            directories = [daemon.directory()] * vllm_config.parallel_config.world_size
            host = {"kvferry_dirs": directories, "cpu_bytes_to_use": HOST_BYTES}
            extra |= {**host, "kvferry_salt": str(next(_numbers)), **extra}
        if "block_size" not in extra:
            extra.setdefault("blocks_per_chunk", 1)
        super().__init__(vllm_config, role, kv_cache_config)


class WorkerOfTests(FaultTolerantWorker):
    """FaultTolerantWorker for tests that create it and its metadata without a connector."""

    _prepared: Any = None

    def __init__(self, **arguments: Any) -> None:
        super().__init__(*arguments.values())
        if not hasattr(self.spec, "engine_config"):
            self.spec.engine_config = SimpleNamespace(packed=None)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Add the fields of kvferry's connector to the metadata first."""
        self._prepared = kv_connector_metadata
        kv_connector_metadata.has_no_forward_pass = False
        kv_connector_metadata.late_loads = set()
        super().handle_preemptions(kv_connector_metadata)

    def start_kv_transfers(self, metadata: Any) -> None:
        """Call handle_preemptions first if the test has not. vLLM's model runners always do."""
        if metadata is not self._prepared:
            self.handle_preemptions(metadata)
        super().start_kv_transfers(metadata)


class SharedTensors:
    """The torch module, with an `empty` whose tensors a daemon can map."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        tensor = shared_empty(shape, dtype, "cpu")
        assert isinstance(tensor, torch.Tensor)
        return tensor


def give_daemon(utils: Any) -> None:
    """Patch the module of vLLM's tests that has MockOffloadingSpec."""

    class WorkerOverDaemon(utils.MockOffloadingWorker):  # type: ignore[misc]
        """Completes a job when the test requests it and the daemon has done it."""

        def __init__(self) -> None:
            super().__init__()
            self.transfers: CheckedTransfers | None = None

        def wait_next_load(self) -> None:
            """Does nothing, because the test decides when a load completes."""

        def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
            if self.transfers is not None:
                self.transfers.store(job_id, src_spec, tuple(dst_spec.offload_keys))
            return bool(super().submit_store(job_id, src_spec, dst_spec))

        def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, **options: Any) -> bool:
            if self.transfers is not None:
                self.transfers.load(job_id, tuple(src_spec.offload_keys), dst_spec)
            return bool(super().submit_load(job_id, src_spec, dst_spec, **options))

        def complete_jobs(self, job_ids: set[int]) -> None:
            if self.transfers is not None:
                self.transfers.complete(job_ids & self.waiting_jobs)
            super().complete_jobs(job_ids)

    class SpecOverDaemon(utils.MockOffloadingSpec):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.manager.is_resetting.return_value = False  # a MagicMock's is true
            # Some tests create the spec without a connector.
            with contextlib.suppress(Refused):
                self._spec = KVFerrySpec(config)
                self.engine_config = self._spec.engine_config

        def get_worker(self, kv_caches: Any) -> Any:
            worker = self._spec.get_worker(kv_caches)
            self.handler.transfers = CheckedTransfers(worker, kv_caches, self.blocks_per_chunk)
            daemon.workers.append(self.handler.transfers)
            return super().get_worker(kv_caches)

    utils.MockOffloadingWorker = WorkerOverDaemon
    utils.MockOffloadingSpec = SpecOverDaemon
    utils.OffloadingManager = KVFerryManager
    utils.torch = SharedTensors()


class CheckedTransfers:
    """Jobs of one KVFerryWorker, and checks of their bytes. kv_caches: canonical, from vLLM."""

    def __init__(self, worker: Any, kv_caches: Any, factor: int) -> None:
        self._worker, self._kv_caches, self._factor = worker, kv_caches, factor
        self._loads: dict[int, tuple[tuple[bytes, ...], Any]] = {}
        self._results: dict[int, Any] = {}

    def store(self, job_id: int, blocks: Any, keys: tuple[bytes, ...]) -> None:
        for row, expected in self._rows(blocks, keys):
            row.copy_(expected)
        self._worker.submit_store(job_id, blocks, KeysSpec(keys))

    def load(self, job_id: int, keys: tuple[bytes, ...], blocks: Any) -> None:
        for row, _ in self._rows(blocks, keys):
            row.zero_()
        self._loads[job_id] = keys, blocks
        self._worker.submit_load(job_id, KeysSpec(keys), blocks)

    def complete(self, job_ids: set[int]) -> None:
        deadline = time.monotonic() + TIMEOUT
        while not job_ids <= self._results.keys():
            assert time.monotonic() < deadline, f"jobs {job_ids} have no result: {self._results}"
            self._results |= {result.job_id: result for result in self._worker.get_finished()}
        for job_id in sorted(job_ids):
            result = self._results.pop(job_id)
            assert result.success, result
            keys, blocks = self._loads.pop(job_id, ((), None))
            for row, expected in self._rows(blocks, keys) if keys else ():
                assert torch.equal(row, expected), f"job {job_id} loaded other bytes"

    def shutdown(self) -> None:
        self._worker.shutdown()

    def _rows(
        self, blocks: Any, keys: tuple[bytes, ...]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """For each page of a transfer's GPU blocks, its bytes and the expected ones."""
        ids, hosts = iter(blocks.block_ids.tolist()), iter(keys)
        sizes = zip(blocks.group_sizes, blocks.block_indices, strict=True)
        for refs, (size, first) in zip(self._kv_caches.group_data_refs, sizes, strict=True):
            positions = [divmod(first + n, self._factor) for n in range(size)]
            host_blocks = {chunk: next(hosts) for chunk in dict.fromkeys(c for c, _ in positions)}
            for chunk, part in positions:
                block = next(ids)
                daemon.transferred_blocks += 1
                for number, ref in enumerate(refs):
                    tensor = self._kv_caches.tensors[ref.tensor_idx].tensor
                    row = tensor[block, : ref.page_size_bytes].view(torch.uint8)
                    yield row, page(host_blocks[chunk], part, number, ref.page_size_bytes)


def page(key: bytes, part: int, number: int, nbytes: int) -> torch.Tensor:
    """The bytes of a page: by key, position in the chunk, and number of the group's tensor."""
    digest = hashlib.sha256(key + bytes((part, number))).digest()
    repeated = digest * -(-nbytes // len(digest))
    return torch.frombuffer(bytearray(repeated[:nbytes]), dtype=torch.uint8)
