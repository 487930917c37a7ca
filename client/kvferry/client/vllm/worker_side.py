"""The worker's side: the jobs of vLLM's OffloadingWorker, over a client of this GPU's daemon.

Tensors are registered with a timeline, before any CUDA graph is captured. When a job is submitted,
its timeline value is queued in the compute stream: behind the kernels that write the blocks to be
stored, and behind those that may still read the blocks to be overwritten by a load.

The client reconnects while it is polled, without waiting, so there is no thread. If the connection
is lost, or jobs do not complete in time, the session is abandoned: its jobs fail at once, and vLLM
may reuse their blocks (see OffloadClient.abandon). Like the scheduler's side, this does not import
vLLM, and no method raises.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch

from kvferry.client.blocking import OffloadClient
from kvferry.client.jobs import TransferResult
from kvferry.client.session_state import RegistrationState, SessionState
from kvferry.client.tensors.canonical import CanonicalKVCaches
from kvferry.client.timeline import Timeline
from kvferry.client.vllm.connection_log import connect_if_running, vllm_log
from kvferry.client.vllm.engine_config import TIMEOUT, EngineConfig
from kvferry.client.vllm.load_eta import LoadEta
from kvferry.client.vllm.own_blocks import own_blocks
from kvferry.client.vllm.scheduler_side import KeysSpec
from kvferry.cuda.driver import driver
from kvferry.proto.errors import Code, Gone, KVFerryError
from kvferry.proto.results import Outcome
from kvferry.proto.sizes import format_size
from kvferry.proto.specs import (
    Direction,
    GPULoadStoreSpec,
    KeyLoadStoreSpec,
    KVLayout,
    TensorLayout,
    TensorRef,
    TransferSpec,
)

log = logging.getLogger("kvferry")

# Seconds to wait for jobs whose GPU blocks vLLM reuses; then they are abandoned.
WAIT_TIMEOUT = 10.0
# Seconds between two polls for a load that is about to complete.
POLL_INTERVAL = 20e-6


class WorkerSide:
    """The connector in a vLLM worker: submits transfers and reports those that ended.

    kv_caches: vLLM's CanonicalKVCaches, or kvferry's. wait_timeout: seconds, see `wait`.
    connect_timeout: seconds to wait for a daemon that runs when the engine starts.
    """

    def __init__(
        self,
        config: EngineConfig,
        kv_caches: Any,
        *,
        wait_timeout: float = WAIT_TIMEOUT,
        connect_timeout: float = TIMEOUT,
    ) -> None:
        self._config, self._wait_timeout = config, wait_timeout
        self._connect_timeout = connect_timeout
        if not isinstance(kv_caches, CanonicalKVCaches):
            kv_caches = canonical_kv_caches(kv_caches, config.factor)
        self._kv_caches: CanonicalKVCaches = kv_caches
        self._device = self._kv_caches.tensors[0].device
        # Jobs without a result, and results for the next get_finished.
        self._in_flight: set[int] = set()
        self._results: list[TransferResult] = []
        self._load_eta = LoadEta()
        self._has_loaded = False
        self._timeline: Timeline | None = None
        self._client: OffloadClient | None = None
        # The incarnation of the session that was abandoned last; the first one is 1.
        self._abandoned = 0
        try:
            self._timeline = Timeline.create(self._device if self._device.type == "cuda" else "cpu")
        except KVFerryError as error:
            log.warning("kvferry: the worker continues without offloading: %s", error)
        self.resume()

    def store(self, job_id: int, blocks: Any, keys: KeysSpec) -> None:
        """blocks: vLLM's GPULoadStoreSpec."""
        gpu, names, rank = gpu_spec(blocks), keys.keys, self._config.rank
        if keys.writers > 1:
            gpu, names = own_blocks(gpu, names, self._config.factor, rank, keys.writers)
        if not names:
            kind = Direction.STORE.transfer_type
            self._results.append(TransferResult(job_id, True, 0, 0.0, kind, Outcome.DONE))
            return
        host = KeyLoadStoreSpec(names, keys.epoch(rank), keys.keep)
        self._submit(job_id, (gpu, host), Direction.STORE)

    def load(self, job_id: int, keys: KeysSpec, blocks: Any) -> None:
        gpu = gpu_spec(blocks)
        self._submit(job_id, (KeyLoadStoreSpec(keys.keys), gpu), Direction.LOAD)
        self._load_eta.load_submitted(job_id, self._nbytes(gpu), time.monotonic())

    def get_finished(self) -> list[TransferResult]:
        """Results of completed jobs. success is False for failed and lost jobs."""
        self._poll()
        results, self._results = self._results, []
        now = time.monotonic()
        for result in results:
            self._load_eta.job_completed(
                result.job_id, result.transfer_size, result.transfer_time, now
            )
            if not self._has_loaded:
                self._log_first_load(result)
        return results

    def wait_next_load(self) -> None:
        """In a step without a forward pass: if a load is about to complete, wait for it."""
        now = time.monotonic()
        deadline = now + self._load_eta.wait_seconds(now)
        while not self._results and time.monotonic() < deadline:
            self._poll()
            time.sleep(POLL_INTERVAL)

    def wait(self, job_ids: Collection[int]) -> None:
        """Return when these jobs no longer access their GPU blocks.

        After `wait_timeout` seconds they are abandoned; see OffloadClient.abandon.
        """
        if (client := self._client) is not None:
            try:
                client.wait(job_ids, timeout=self._wait_timeout)
            except KVFerryError as error:
                self._abandon(error)
            self._abandon_if_lost()

    def suspend(self) -> None:
        """The KV caches are about to lose their memory: end all jobs, and the session."""
        if self._client is not None:
            self.wait(tuple(self._in_flight))
            self._poll()
            self._client.close()
            self._client = None

    def resume(self) -> None:
        """The KV caches have memory."""
        if self._timeline is not None and self._client is None:
            try:
                self._client = self._connect(self._timeline)
            except KVFerryError as error:  # no daemon can serve this device
                log.warning("kvferry: the worker continues without offloading: %s", error)

    def shutdown(self) -> None:
        if self._timeline is not None:
            self._timeline.revoke()
        if self._client is not None:
            self._client.close()
        if self._timeline is not None:
            with suppress(KVFerryError):  # a failed GPU cannot release it
                self._timeline.close()

    def _submit(self, job_id: int, spec: TransferSpec, direction: Direction) -> None:
        client, timeline = self._client, self._timeline
        if client is None or timeline is None:
            self._fail(
                job_id, direction, Gone(Code.DAEMON_GONE, "the worker has no daemon", job_id)
            )
            return
        value = timeline.last + 1
        try:
            client.transfer_async(job_id, spec, wait_for=value)
        except KVFerryError as error:
            self._fail(job_id, direction, error)
            return
        self._in_flight.add(job_id)
        try:  # signalled last: the daemon decodes the job meanwhile
            timeline.signal(self._stream(), value)
        except KVFerryError as error:  # without the signal the job would never begin
            self._abandon(error)

    def _poll(self) -> None:
        if (client := self._client) is None:
            return
        try:
            finished = client.get_finished()
        except KVFerryError as error:
            self._abandon(error)
            return
        self._abandon_if_lost()
        for result in finished:
            if result.error is not None:
                log.debug("kvferry: job %d: %s", result.job_id, result.error)
        self._in_flight.difference_update([result.job_id for result in finished])
        self._results += finished

    def _fail(self, job_id: int, direction: Direction, error: KVFerryError) -> None:
        log.debug("kvferry: job %d: %s", job_id, error)
        kind = direction.transfer_type
        result = TransferResult(job_id, False, 0, 0.0, kind, Outcome.LOST, error)
        self._results.append(result)

    def _log_first_load(self, result: TransferResult) -> None:
        """Ranks load the same chunks: the first one logs it."""
        if not result.success or result.transfer_type != Direction.LOAD.transfer_type:
            return
        self._has_loaded = True
        if self._config.rank == 0:
            size, ms = format_size(result.transfer_size), 1000 * result.transfer_time
            vllm_log.info("kvferry: first load from host memory: %s in %.2f ms", size, ms)

    def _abandon_if_lost(self) -> None:
        """Revoke the timeline of lost jobs: vLLM reuses their blocks, the daemon may still run."""
        client = self._client
        if client is None or client.gone is None or client.incarnation == self._abandoned:
            return
        self._abandoned = client.incarnation
        client.abandon()

    def _abandon(self, error: KVFerryError) -> None:
        assert self._client is not None
        log.warning("kvferry: the worker abandons its session: %s", error)
        self._abandoned = self._client.incarnation
        self._client.abandon()

    def _connect(self, timeline: Timeline) -> OffloadClient:
        """A client. If a daemon runs now, it is connected, so that tensors are shared before any
        CUDA graph is captured. Raises Refused if no daemon can serve this device."""
        config = self._config
        find_daemon = partial(config.find_daemon, self._uuid())
        client = OffloadClient(
            find_daemon,
            engine=config.engine,
            client=f"vLLM worker {config.rank}",
            timeout=self._connect_timeout,
            state=SessionState.of_namespace(
                config.fingerprint,
                mirror=False,
                registration=RegistrationState(self._kv_caches, None, timeline),
                **config.options,
            ),
        )
        connect_if_running("the worker", client, [find_daemon], self._connect_timeout)
        return client

    def _nbytes(self, blocks: GPULoadStoreSpec) -> int:
        layout = self._kv_caches.layout
        sizes = blocks.group_sizes or (len(blocks.block_ids),)
        return sum(size * layout.group_bytes(group) for group, size in enumerate(sizes))

    # On the CPU, as in tests, there are no streams

    def _stream(self) -> Any:
        cuda = self._device.type == "cuda"
        return torch.cuda.current_stream(self._device) if cuda else None

    def _uuid(self) -> str | None:
        if self._device.type != "cuda":
            return None
        index = self._device.index
        return driver().device_uuid(torch.cuda.current_device() if index is None else index)


def canonical_kv_caches(kv_caches: Any, factor: int) -> CanonicalKVCaches:
    """Convert vLLM's CanonicalKVCaches to kvferry's; no bytes are copied."""
    tensors = tuple(canonical.tensor for canonical in kv_caches.tensors)
    layouts = tuple(
        TensorLayout(tensor.shape[0], one.page_size_bytes, tensor.stride(0) * tensor.element_size())
        for one, tensor in zip(kv_caches.tensors, tensors, strict=True)
    )
    groups = tuple(
        tuple(TensorRef(ref.tensor_idx, ref.page_size_bytes) for ref in refs)
        for refs in kv_caches.group_data_refs
    )
    return CanonicalKVCaches(KVLayout(layouts, groups, factor), tensors)


def gpu_spec(spec: Any) -> GPULoadStoreSpec:
    sizes, indices = tuple(spec.group_sizes), tuple(spec.block_indices)
    return GPULoadStoreSpec(np.asarray(spec.block_ids), sizes, indices)
