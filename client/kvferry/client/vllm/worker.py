"""The worker's side: jobs of vLLM's OffloadingWorker, over a client of the daemon of this GPU.

Tensors are registered once a storage, before any graph is captured, with a timeline. A job's value
of it is written into the compute stream when the job is submitted: behind the kernels launched so
far, those that wrote what is stored, and those that may still read what is loaded over.

The client reconnects by itself while it is polled; no step of it waits, so there is no thread. If
the daemon is lost, or jobs do not end in time, the client abandons the session: its jobs end as
failed at once, and vLLM may reuse their blocks (OffloadClient.abandon says what is guaranteed). As
on the scheduler's side, no vLLM is needed here, and nothing raises.
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
from kvferry.client.session_state import Registration, SessionState
from kvferry.client.tensors.canonical import CanonicalKVCaches
from kvferry.client.timeline import Timeline
from kvferry.client.vllm.engine_config import TIMEOUT, EngineConfig
from kvferry.client.vllm.load_eta import LoadEta
from kvferry.client.vllm.scheduler import KeysSpec
from kvferry.proto.errors import Code, Gone, KVFerryError
from kvferry.proto.messages import Outcome
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

# Seconds that jobs have to end before their GPU blocks are reused.
WAIT_TIMEOUT = 10.0
# Seconds between two polls for a load that is about to end.
POLL_INTERVAL = 20e-6


class WorkerSide:
    """`kv_caches`: vLLM's canonical tensors."""

    def __init__(self, config: EngineConfig, kv_caches: Any) -> None:
        self._config = config
        self._kv_caches = canonical_kv_caches(kv_caches, config.factor)
        self._device = self._kv_caches.tensors[0].device
        # Results of the next get_finished.
        self._ended: list[TransferResult] = []
        self._load_eta = LoadEta()
        self._timeline: Timeline | None = None
        self._client: OffloadClient | None = None
        # The incarnation of the session that was abandoned last; the first one is 1.
        self._abandoned = 0
        try:
            self._timeline = Timeline.create(self._device if self._device.type == "cuda" else "cpu")
            self._client = self._open(self._timeline)
        except KVFerryError as error:  # this device cannot be served
            log.warning("kvferry: the worker goes on without offloading: %s", error)

    def store(self, job_id: int, blocks: Any, keys: KeysSpec) -> None:
        """blocks: vLLM's GPULoadStoreSpec."""
        there = KeyLoadStoreSpec(keys.keys, keys.generation(self._config.rank), keys.keep)
        self._submit(job_id, (gpu_spec(blocks), there), Direction.STORE)

    def load(self, job_id: int, keys: KeysSpec, blocks: Any) -> None:
        there = gpu_spec(blocks)
        self._submit(job_id, (KeyLoadStoreSpec(keys.keys), there), Direction.LOAD)
        self._load_eta.submitted(job_id, self._nbytes(there), time.monotonic())

    def get_finished(self) -> list[TransferResult]:
        """Also of jobs that failed, or were lost with their daemon: success is False then."""
        self._poll()
        results, self._ended = self._ended, []
        now = time.monotonic()
        for result in results:
            self._load_eta.ended(result.job_id, result.transfer_size, result.transfer_time, now)
        return results

    def wait_next_load(self) -> None:
        """For a step that runs nothing: where a load is about to end, wait until it has."""
        now = time.monotonic()
        deadline = now + self._load_eta.patience(now)
        while not self._ended and time.monotonic() < deadline:
            self._poll()
            time.sleep(POLL_INTERVAL)

    def wait(self, job_ids: Collection[int]) -> None:
        """Return when these jobs cannot touch their GPU blocks any more; bounded by FLUSH.

        After FLUSH seconds they are abandoned; what is guaranteed then: OffloadClient.abandon.
        """
        if (client := self._client) is not None:
            try:
                client.wait(job_ids, timeout=WAIT_TIMEOUT)
            except KVFerryError as error:
                self._abandon(error)
            self._abandon_if_lost()

    def shutdown(self) -> None:
        if self._timeline is not None:
            self._timeline.revoke()
        if self._client is not None:
            self._client.close()
        if self._timeline is not None:
            with suppress(KVFerryError):  # a GPU that has failed releases nothing
                self._timeline.close()

    def _submit(self, job_id: int, spec: TransferSpec, direction: Direction) -> None:
        client, timeline = self._client, self._timeline
        if client is None or timeline is None:
            self._fail(job_id, direction, Gone(Code.DAEMON_GONE, "there is no daemon", job_id))
            return
        value = timeline.last + 1
        try:
            client.transfer_async(job_id, spec, wait_for=value)
        except KVFerryError as error:
            self._fail(job_id, direction, error)
            return
        try:  # last: the daemon reads the job meanwhile
            timeline.signal(self._stream(), value)
        except KVFerryError as error:  # nothing else would ever let the job begin
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
                log.info("kvferry: job %d: %s", result.job_id, result.error)
        self._ended += finished

    def _fail(self, job_id: int, direction: Direction, error: KVFerryError) -> None:
        log.info("kvferry: job %d: %s", job_id, error)
        kind = direction.transfer_type
        result = TransferResult(job_id, False, 0, 0.0, kind, Outcome.LOST, error)
        self._ended.append(result)

    def _abandon_if_lost(self) -> None:
        """The blocks of lost jobs are reused, and their daemon may not have ended: revoke."""
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

    def _open(self, timeline: Timeline) -> OffloadClient:
        """A client that is connected if a daemon is there now: tensors are shared before any graph
        is captured then. Raises Refused if no daemon can serve this device."""
        config, uuid = self._config, self._uuid()
        client = OffloadClient(
            partial(config.daemon, uuid),
            engine=config.engine,
            client=f"vLLM worker {config.rank}",
            timeout=TIMEOUT,
            state=SessionState.of_namespace(
                config.fingerprint,
                mirror=False,
                registration=Registration(self._kv_caches, None, timeline),
                **config.options,
            ),
        )
        try:
            config.daemon(uuid)
            client.wait_connected()
        except KVFerryError as error:
            log.warning("kvferry: the worker goes on without its daemon for now: %s", error)
        return client

    def _nbytes(self, blocks: GPULoadStoreSpec) -> int:
        layout = self._kv_caches.layout
        sizes = blocks.group_sizes or (len(blocks.block_ids),)
        return sum(size * layout.group_bytes(group) for group, size in enumerate(sizes))

    # The device; on a CPU, as in tests, stores to the timeline are plain and streams there are none

    def _stream(self) -> Any:
        cuda = self._device.type == "cuda"
        return torch.cuda.current_stream(self._device) if cuda else None

    def _uuid(self) -> str | None:
        if self._device.type != "cuda":
            return None
        return f"GPU-{torch.cuda.get_device_properties(self._device).uuid}"


def canonical_kv_caches(kv_caches: Any, factor: int) -> CanonicalKVCaches:
    """vLLM's canonical tensors as kvferry's; no bytes are copied."""
    tensors = tuple(one.tensor for one in kv_caches.tensors)
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
