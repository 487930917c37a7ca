"""The worker's side: jobs of vLLM's OffloadingWorker, over a client of the daemon of this GPU.

Tensors are registered once a storage, before any graph is captured, with a timeline. A job's value
of it is written into the compute stream when the job is submitted: behind the kernels launched so
far, those that wrote what is stored, and those that may still read what is loaded over.

A job that the daemon cannot do any more ends as failed, here, at once. As on the scheduler's side,
no vLLM is needed here, and nothing raises.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvferry.client.blocking import OffloadClient
from kvferry.client.jobs import TransferResult
from kvferry.client.tensors.canonical import CanonicalKVCaches
from kvferry.client.timeline import Timeline
from kvferry.client.vllm.arrivals import Arrivals
from kvferry.client.vllm.lasting import Lasting
from kvferry.client.vllm.place import TIMEOUT, Place
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

FLUSH = 10.0
"""Seconds that jobs have to end before their GPU blocks go to somebody else."""
LOOK = 20e-6
"""Seconds between two looks at a load that is about to end."""


@dataclass(frozen=True, eq=False)
class Attached:
    """A client that has registered the tensors, and the timeline of its jobs."""

    client: OffloadClient
    timeline: Timeline

    @property
    def gone(self) -> Gone | None:
        return self.client.gone

    def close(self) -> None:
        """From here on none of its jobs touches the tensors, also where its daemon stands still."""
        self.timeline.revoke()
        self.client.close()


class WorkerSide:
    """`kv_caches`: vLLM's canonical tensors."""

    def __init__(self, place: Place, kv_caches: Any) -> None:
        self._place = place
        self._kv_caches = canonical(kv_caches, place.factor)
        self._device = self._kv_caches.tensors[0].device
        self._timelines: list[Timeline] = []
        """Of all clients: a stream may still write there."""
        self._ended: list[TransferResult] = []
        """To be told with the next get_finished."""
        self._arrivals = Arrivals()
        self._lasting = Lasting("the worker's connection", self._register)
        self._attached: Attached | None = None
        """The one that has the jobs under way."""
        self._under_way: dict[int, Direction] = {}

    def store(self, job_id: int, blocks: Any, keys: KeysSpec) -> None:
        """blocks: vLLM's GPULoadStoreSpec."""
        there = KeyLoadStoreSpec(keys.keys, keys.generation(self._place.rank), keys.keep)
        self._submit(job_id, (gpu_side(blocks), there), Direction.STORE)

    def load(self, job_id: int, keys: KeysSpec, blocks: Any) -> None:
        there = gpu_side(blocks)
        self._submit(job_id, (KeyLoadStoreSpec(keys.keys), there), Direction.LOAD)
        self._arrivals.submitted(job_id, self._nbytes(there), time.monotonic())

    def get_finished(self) -> list[TransferResult]:
        """Also of jobs that failed, or were lost with their daemon: success is False then."""
        self._take_in()
        results, self._ended = self._ended, []
        now = time.monotonic()
        for result in results:
            self._arrivals.ended(result.job_id, result.transfer_size, result.transfer_time, now)
        return results

    def await_load(self) -> None:
        """For a step that runs nothing: where a load is about to end, wait until it has."""
        now = time.monotonic()
        deadline = now + self._arrivals.patience(now)
        while not self._ended and time.monotonic() < deadline:
            self._take_in()
            time.sleep(LOOK)

    def wait(self, job_ids: Collection[int]) -> None:
        """Return when these jobs can touch their GPU blocks no more; bounded."""
        attached = self._connected()
        if attached is not None:
            try:
                attached.client.wait(job_ids, timeout=FLUSH)
            except KVFerryError as error:
                self._give_up(error)  # the daemon ends what is under way; here it is lost

    def shutdown(self) -> None:
        self._lasting.close()
        for timeline in self._timelines:
            with suppress(KVFerryError):  # a GPU that has failed lets go of nothing
                timeline.close()

    def _submit(self, job_id: int, spec: TransferSpec, direction: Direction) -> None:
        attached = self._connected()
        try:
            if attached is None:
                raise Gone(Code.DAEMON_GONE, "there is no daemon now", job_id)
            timeline = attached.timeline
            value = timeline.last + 1
            attached.client.transfer_async(job_id, spec, wait_for=value)
        except KVFerryError as error:
            self._fail(job_id, direction, error)
            return
        self._under_way[job_id] = direction
        try:  # last: the daemon reads the job meanwhile
            timeline.signal(self._stream(), value)
        except KVFerryError as error:  # nothing else would ever let the job begin
            self._give_up(error)

    def _take_in(self) -> None:
        attached = self._connected()
        if attached is None:
            return
        try:
            finished = attached.client.get_finished()
        except KVFerryError as error:
            self._give_up(error)
            return
        for result in finished:
            self._under_way.pop(result.job_id, None)
            if result.error is not None:
                log.info("kvferry: job %d: %s", result.job_id, result.error)
        self._ended += finished

    def _fail(self, job_id: int, direction: Direction, error: KVFerryError) -> None:
        log.info("kvferry: job %d: %s", job_id, error)
        kind = direction.transfer_type
        result = TransferResult(job_id, False, 0, 0.0, kind, Outcome.LOST, error)
        self._ended.append(result)

    def _connected(self) -> Attached | None:
        """What there is. Jobs of a client that went before it told of them have failed."""
        attached = self._lasting.current
        if attached is not self._attached:
            lost, self._under_way = self._under_way, {}
            self._attached = attached
            for job_id, direction in lost.items():
                error = Gone(Code.DAEMON_GONE, "lost with its daemon", job_id)
                self._fail(job_id, direction, error)
        return attached

    def _give_up(self, error: KVFerryError) -> None:
        log.warning("kvferry: jobs do not end, giving the connection up: %s", error)
        self._lasting.give_up()

    def _register(self) -> Attached:
        self._choose_device()
        # Of any other device the registration is refused, and vLLM goes on without.
        timeline = Timeline.create(self._device if self._device.type == "cuda" else "cpu")
        try:
            client = self._join(timeline)
        except BaseException:
            timeline.close()  # nothing was given a value of it
            raise
        self._timelines.append(timeline)
        return Attached(client, timeline)

    def _join(self, timeline: Timeline) -> OffloadClient:
        place = self._place
        client = OffloadClient(
            place.daemon(self._uuid()),
            engine=place.engine,
            client=f"vLLM worker {place.rank}",
            timeout=TIMEOUT,
            reconnect=False,  # Lasting makes another
        )
        try:
            client.open_namespace(place.fingerprint, mirror=False, **place.options)
            client.register_kv_caches(self._kv_caches, timeline=timeline)
        except BaseException:
            client.close()
            raise
        return client

    def _nbytes(self, blocks: GPULoadStoreSpec) -> int:
        layout = self._kv_caches.layout
        sizes = blocks.group_sizes or (len(blocks.block_ids),)
        return sum(size * layout.group_bytes(group) for group, size in enumerate(sizes))

    # The device; on a CPU, as in tests, stores to the timeline are plain and streams there are none

    def _stream(self) -> Any:
        cuda = self._device.type == "cuda"
        return torch.cuda.current_stream(self._device) if cuda else None

    def _choose_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def _uuid(self) -> str | None:
        if self._device.type != "cuda":
            return None
        return f"GPU-{torch.cuda.get_device_properties(self._device).uuid}"


def canonical(kv_caches: Any, factor: int) -> CanonicalKVCaches:
    """vLLM's canonical tensors in our words; the bytes are where they were."""
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


def gpu_side(spec: Any) -> GPULoadStoreSpec:
    sizes, indices = tuple(spec.group_sizes), tuple(spec.block_indices)
    return GPULoadStoreSpec(np.asarray(spec.block_ids), sizes, indices)
