"""An engine that submits random transfers and checks every result. traffic_processes.py starts it.

It is scheduler and worker in one. At random it stores and loads any number of blocks, whole host
blocks or parts of them, signals the timeline before or after it submits, cancels and waits for
jobs, resets the namespace, disconnects, and registers again. It knows what each block that it
stored must hold, compares each block that it loads, and records differences as errors. When the
daemon is gone, it counts its jobs as lost and connects to the next daemon. The host blocks there
must hold the stored bytes.
"""

from __future__ import annotations

import hashlib
import random
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from kvferry.client import (
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    HostRegion,
    Lookup,
    OffloadClient,
    OffloadingManager,
    TransferSpec,
    offload_key,
)
from kvferry.proto.errors import Code, Gone, Refused
from support.block_marks import Label
from support.host_blocks_model import HostBlocksModel
from support.marked_tensors import MarkedTensors
from support.traffic_jobs import EXPECTED_REFUSALS, TrafficJob, TrafficJobs
from support.traffic_statistics import TrafficOptions, TrafficStatistics

# Written to GPU blocks before a load, so that a load that copies nothing is detected.
OVERWRITTEN = Label(0xFFFF, 0, 0).number
# A longer step means that this process was stopped, or that the machine was busy.
LONGEST_STEP = 0.5


class Traffic:
    """One engine. Raises only unexpected exceptions; all other errors are in `statistics`."""

    def __init__(self, directory: Path, options: TrafficOptions) -> None:
        self.options, self._directory = options, directory
        self.statistics = TrafficStatistics(options.name)
        self._rng = random.Random(options.seed)
        self._tensors = MarkedTensors(options)
        self._host_blocks = HostBlocksModel(options, self._rng)
        self._jobs = TrafficJobs(
            options, self._tensors, self._host_blocks, self.statistics, self._rng
        )
        # Marks the blocks of the namespace, which several engines store.
        self._namespace_owner = 0x8000 | zlib.crc32((options.model or "").encode()) & 0x7FFF
        self._client: OffloadClient | None = None
        self._manager: OffloadingManager | None = None
        self._incarnation = 0
        self._last_step = time.monotonic()

    def step(self, submit: bool = True) -> None:
        """Submit jobs, receive results, and rarely cancel, wait, reset or disconnect."""
        self._exclude_pause()
        try:
            if self._client is None:
                self._connect()
            elif submit and self._is_connected(self._client):
                self._submit_jobs()
                self._do_rare_operation()
            self._receive_results()
            if self._client is not None and self._client.gone is not None:
                raise self._client.gone
        except Gone as gone:
            if gone.code not in (Code.DAEMON_GONE, Code.SHUTTING_DOWN, Code.TIMEOUT):
                self.statistics.add_error(f"unexpected: {gone}")
            self._handle_disconnect()
        self._jobs.report_late()

    def finish(self) -> TrafficStatistics:
        """Wait until all jobs have ended, then disconnect."""
        deadline = time.monotonic() + 2 * self.options.job_timeout
        while self._jobs.in_flight and time.monotonic() < deadline:
            self.step(submit=False)
            time.sleep(0.001)
        if self._jobs.in_flight:
            self.statistics.add_error(f"{len(self._jobs.in_flight)} jobs never ended")
        self._close()
        self._tensors.close()
        return self.statistics

    # Connection

    def _connect(self) -> None:
        o = self.options
        try:
            client = OffloadClient(
                self._directory, engine=o.name, client=o.name, timeout=5, reconnect=o.reconnect
            )
        except Gone:  # the next daemon does not serve yet
            time.sleep(0.02)
            return
        self._client = client
        try:
            if o.model is not None:
                client.open_namespace(o.fingerprint, cpu_bytes_to_use=o.host_bytes)
                self._manager = OffloadingManager(client)
            region = client.register_kv_caches(
                self._tensors.tensors,
                num_blocks=o.gpu_blocks,
                block_size_factor=o.factor,
                host_bytes=None if o.model is not None else o.host_bytes,
                timeline=self._tensors.timeline,
                packed=o.packed,
            )
        except Refused as refused:  # the region of the session before may be in use still
            if refused.code not in (Code.ALREADY_REGISTERED, Code.BUSY):
                raise
            self._close()
            return
        except Gone:  # reconnecting restores only a completed registration
            self._close()
            raise
        self._incarnation = client.incarnation
        self._update_region(region)

    def _update_region(self, region: HostRegion) -> None:
        if region.reattached:
            self._host_blocks.reattach()
        else:
            self._host_blocks.clear()
        self.statistics.counts["opened"] += 1
        self.statistics.counts["reattached"] += region.reattached

    def _is_connected(self, client: OffloadClient) -> bool:
        """Whether the client is connected. After a reconnect, update what the region holds."""
        if not client.connected:
            return False
        if client.incarnation != self._incarnation:
            self._incarnation = client.incarnation
            self._receive_results()
            if self._jobs.in_flight:
                count = len(self._jobs.in_flight)
                self.statistics.add_error(f"{count} jobs have no result after a reconnect")
            assert client.region is not None
            self._update_region(client.region)
        return True

    def _handle_disconnect(self) -> None:
        """Every job must have a result. Close the client unless it reconnects by itself."""
        if self._client is not None and self._client.connecting:
            with suppress(Gone):
                self._receive_results()
            return
        self.statistics.counts["lost daemons"] += 1
        if self._client is not None and self._client.gone is not None:
            with suppress(Gone):
                self._receive_results()
            if self._jobs.in_flight:
                count = len(self._jobs.in_flight)
                self.statistics.add_error(f"{count} jobs have no result, and the daemon is gone")
        self._disconnect()

    def _disconnect(self) -> None:
        self._close()
        for job in list(self._jobs.in_flight.values()):
            self._end(job)

    def _close(self) -> None:
        if self._client is not None:
            self._client.close()
        self._client = self._manager = None

    # Jobs

    def _submit_jobs(self) -> None:
        options, jobs = self.options, self._jobs
        while self._client is not None and len(jobs.in_flight) < options.depth:
            count = min(self._rng.choice((1, 1, 2, 3, 8, 30)), len(jobs.free_blocks))
            count = min(count, (options.host_blocks - 1) * options.factor)
            if count == 0:
                return
            if self._manager is not None:
                if not self._submit_by_key(self._manager, count):
                    return
            elif self._rng.random() < 0.5:
                self._submit_store(count)
            else:
                self._submit_load(count)

    def _submit_store(self, count: int) -> None:
        hosts, skip, subs = self._host_blocks.choose_blocks(count)
        job = self._jobs.begin(True, self._host_blocks.new_labels(subs))
        job.subs = subs
        gpu = GPULoadStoreSpec(np.array(job.gpu), (count,), (skip,))
        if self._submit(job, (gpu, CPULoadStoreSpec(np.array(hosts))), job.labels):
            self._host_blocks.submit_store(job.job_id, subs, job.labels)

    def _submit_load(self, count: int) -> None:
        hosts, skip, subs = self._host_blocks.choose_blocks(count)
        labels, writers = self._host_blocks.expected(subs)
        job = self._jobs.begin(False, labels)
        job.writers, job.stores_complete = writers, self._host_blocks.all_complete(subs)
        gpu = GPULoadStoreSpec(np.array(job.gpu), (count,), (skip,))
        self._submit(job, (CPULoadStoreSpec(np.array(hosts)), gpu), [OVERWRITTEN] * count)

    def _submit_by_key(self, manager: OffloadingManager, count: int) -> bool:
        """Load those of some consecutive keys that are resident; if there are none, store them.

        Returns False if nothing was submitted.
        """
        factor = self.options.factor
        first = self._rng.randrange(self.options.keys)
        numbers = range(first, min(first + max(1, count // factor), self.options.keys))
        if len(numbers) * factor > len(self._jobs.free_blocks):
            return False
        keys = {key_of(number): number for number in numbers}
        if self._rng.random() < self.options.prefetches and manager.prefetch(keys).searches:
            self.statistics.counts["prefetches"] += 1
            return False
        hits = [key for key in keys if manager.lookup(key) is Lookup.HIT]
        if hits:
            with suppress(Refused):
                spec = manager.prepare_load(hits)
                job = self._jobs.begin(False, self._key_labels(hits, keys))
                job.keys = tuple(hits)
                gpu = GPULoadStoreSpec(np.array(job.gpu))
                self._submit(job, (spec, gpu), [OVERWRITTEN] * len(job.gpu))
            return True
        output = manager.prepare_store(keys)
        if output is None or not output.keys_to_store:  # full, all resident, or not connected
            return False
        job = self._jobs.begin(True, self._key_labels(output.keys_to_store, keys))
        job.keys = output.keys_to_store
        gpu = GPULoadStoreSpec(np.array(job.gpu))
        self._submit(job, (gpu, output.store_spec), job.labels)
        return True

    def _key_labels(self, keys: Sequence[bytes], numbers: dict[bytes, int]) -> list[int]:
        return [
            Label(self._namespace_owner, numbers[key], sub).number
            for key in keys
            for sub in range(self.options.factor)
        ]

    def _submit(self, job: TrafficJob, spec: TransferSpec, labels: Sequence[int]) -> bool:
        """Write labels to the job's GPU blocks, and submit it: before or after, at random."""
        client, timeline = self._client, self._tensors.timeline
        assert client is not None
        before = self._rng.random() < 0.3
        try:
            if before:
                client.transfer_async(job.job_id, spec, timeline.last + 1)
                if self._rng.random() < 0.1:
                    time.sleep(self._rng.random() * 0.005)
            self._tensors.write(job.gpu, labels)
            value = timeline.signal()
            if not before:
                client.transfer_async(job.job_id, spec, value)
        except (Gone, Refused) as error:  # it was not submitted
            self._end(job)
            if isinstance(error, Gone) or error.code not in EXPECTED_REFUSALS:
                raise
            self.statistics.counts[f"not sent: {error.code}"] += 1
            return False
        self.statistics.counts["jobs"] += 1
        return True

    def _do_rare_operation(self) -> None:
        client, chance, in_flight = self._client, self._rng.random(), self._jobs.in_flight
        if client is None or not in_flight:
            return
        some = self._rng.sample(sorted(in_flight), min(3, len(in_flight)))
        if chance < self.options.cancels:
            client.cancel(some)
            for job_id in some:
                in_flight[job_id].cancelled = True
        elif chance < self.options.cancels + 0.005:
            client.wait(some)
        elif chance < self.options.cancels + 0.005 + self.options.resets:
            if self._manager is not None:
                self._manager.reset_cache()
                self.statistics.counts["resets"] += 1
        elif self._rng.random() < self.options.disconnects:
            self._disconnect()  # with jobs in flight; the next step connects again
            self.statistics.counts["disconnects"] += 1

    # Results

    def _receive_results(self) -> None:
        if self._client is None:
            return
        for result in self._client.get_finished():
            if job := self._jobs.complete(result):
                self._complete_keys(job, result.success)

    def _end(self, job: TrafficJob) -> None:
        """End a job without a result."""
        self._jobs.end(job, None)
        self._complete_keys(job, False)

    def _complete_keys(self, job: TrafficJob, success: bool) -> None:
        if self._manager is None or not job.keys:
            return
        if job.store:
            self._manager.complete_store(job.keys, success)
        else:
            self._manager.complete_load(job.keys)

    def _exclude_pause(self) -> None:
        now = time.monotonic()
        if now - self._last_step > LONGEST_STEP:
            self._jobs.exclude_time(now - self._last_step)
        self._last_step = now


def key_of(number: int) -> bytes:
    return offload_key(hashlib.blake2b(number.to_bytes(8, "little"), digest_size=32).digest())
