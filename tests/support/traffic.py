"""An engine that works a daemon hard and believes nothing: what `crew` starts, in processes.

It is scheduler and worker in one, does what its dice say (stores and loads of any size, whole host
blocks and parts of them, fenced before and after, cancelled, waited for, reset; goodbyes, and
registering anew), keeps account of what must be in every block that it stored, and compares every
block that it loads (marks.py). What it finds wrong is a complaint in its tally. When the daemon
goes it counts its jobs as lost and comes back as soon as there is one again; what that still has
of its host blocks must be what was stored.
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
    Fingerprint,
    GPULoadStoreSpec,
    HostRegion,
    Lookup,
    OffloadClient,
    OffloadingManager,
    TransferResult,
    TransferSpec,
    offload_key,
)
from kvferry.proto.errors import Code, Gone, Refused
from kvferry.proto.results import Outcome
from support.block_marks import Label
from support.host_blocks_model import UNDEFINED, HostBlocksJob, HostBlocksModel
from support.marked_tensors import MarkedTensors
from support.traffic_statistics import TrafficOptions, TrafficStatistics

JUNK = Label(0xFFFF, 0, 0).number
NOTICED = 0.5
"""A step that took longer was not ours: somebody stopped this process, or the machine was busy."""
EXPECTED = {Code.KEY_ABSENT, Code.CACHE_FULL, Code.STALE, Code.BUSY}
"""What a transfer by key may be refused for: others use the namespace as well."""


class Traffic:
    """One engine. Raises nothing but what nobody foresaw; `tally` has the rest."""

    def __init__(self, directory: Path, options: TrafficOptions) -> None:
        self.options, self._directory = options, directory
        self.tally = TrafficStatistics(options.name)
        self._dice = random.Random(options.seed)
        self._ground = MarkedTensors(options)
        self._shelf = HostBlocksModel(options, self._dice)
        self._free = list(range(options.gpu_blocks))
        self._jobs: dict[int, HostBlocksJob] = {}
        # What marks the blocks of a namespace.
        self._namespace_owner = 0x8000 | zlib.crc32((options.model or "").encode()) & 0x7FFF
        self._failed: set[int] = set()
        """Stores that did not complete, while loads behind them are under way."""
        self._last_id = 0
        self._client: OffloadClient | None = None
        self._manager: OffloadingManager | None = None
        self._incarnation = 0
        self._stepped = time.monotonic()

    def step(self, submit: bool = True) -> None:
        """Submit something, take in results, now and then something rare."""
        self._notice_pause()
        try:
            if self._client is None:
                self._open()
            elif submit and self._is_here(self._client):
                self._submit_some()
                self._do_something_rare()
            self._take_results()
            if self._client is not None and self._client.gone is not None:
                raise self._client.gone
        except Gone as gone:
            if gone.code not in (Code.DAEMON_GONE, Code.SHUTTING_DOWN, Code.TIMEOUT):
                self.tally.complain(f"unexpected: {gone}")
            self._lost()
        self._complain_of_late()

    def finish(self) -> TrafficStatistics:
        """Let what is under way end, and say goodbye."""
        deadline = time.monotonic() + 2 * self.options.patience
        while self._jobs and time.monotonic() < deadline:
            self.step(submit=False)
            time.sleep(0.001)
        if self._jobs:
            self.tally.complain(f"{len(self._jobs)} jobs never ended")
        self._close()
        self._ground.close()
        return self.tally

    # Coming and going

    def _open(self) -> None:
        o = self.options
        try:
            client = OffloadClient(
                self._directory, engine=o.name, client=o.name, timeout=5, reconnect=o.reconnect
            )
        except Gone:  # not back yet
            time.sleep(0.02)
            return
        self._client = client
        try:
            if o.model is not None:
                self._enter(client, o.model)
            region = client.register_kv_caches(
                self._ground.tensors,
                num_blocks=o.gpu_blocks,
                block_size_factor=o.factor,
                host_bytes=None if o.model is not None else o.host_bytes,
                timeline=self._ground.timeline,
            )
        except Refused as refused:  # the place of the one before may not be free yet
            if refused.code not in (Code.ALREADY_REGISTERED, Code.BUSY):
                raise
            self._close()
            return
        except Gone:  # a client that comes back has what was registered before: here, nothing yet
            self._close()
            raise
        self._incarnation = client.incarnation
        self._opened(region)

    def _opened(self, region: HostRegion) -> None:
        if region.reattached:
            self._shelf.survived()
        else:
            self._shelf.forget()
        self.tally.counts["opened"] += 1
        self.tally.counts["reattached"] += region.reattached

    def _is_here(self, client: OffloadClient) -> bool:
        """Whether the daemon is there; where it is another one, what is left is known now."""
        if not client.connected:
            return False
        if client.incarnation != self._incarnation:
            self._incarnation = client.incarnation
            self._take_results()
            if self._jobs:
                self.tally.complain(f"{len(self._jobs)} jobs outlived their daemon")
            assert client.region is not None
            self._opened(client.region)
        return True

    def _enter(self, client: OffloadClient, model: str) -> None:
        fingerprint = Fingerprint(model, self.options.block_bytes * self.options.factor)
        client.open_namespace(fingerprint, cpu_bytes_to_use=self.options.host_bytes)
        self._manager = OffloadingManager(client)

    def _close(self) -> None:
        if self._client is not None:
            self._client.close()
        self._client = self._manager = None

    def _lost(self) -> None:
        """The daemon went: every job must have ended, with what was done before as done."""
        if self._client is not None and self._client.connecting:
            with suppress(Gone):
                self._take_results()
            return
        self.tally.counts["lost daemons"] += 1
        if self._client is not None and self._client.gone is not None:
            with suppress(Gone):
                self._take_results()
        if self._jobs and self._client is not None and self._client.gone is not None:
            self.tally.complain(f"{len(self._jobs)} jobs without an outcome, and the daemon gone")
        self._close()
        for job in list(self._jobs.values()):
            self._end(job, None)

    # Work

    def _submit_some(self) -> None:
        while self._client is not None and len(self._jobs) < self.options.depth:
            count = min(self._dice.choice((1, 1, 2, 3, 8, 30)), len(self._free))
            count = min(count, (self.options.host_blocks - 1) * self.options.factor)
            if count == 0:
                return
            if self._manager is not None:
                if not self._submit_keyed(self._manager, count):
                    return
            elif self._dice.random() < 0.5:
                self._submit_store(count)
            else:
                self._submit_load(count)

    def _submit_store(self, count: int) -> None:
        hosts, skip, places = self._shelf.transfer(count)
        version = self._shelf.next_version()
        labels = [self._shelf.label(place, version) for place in places]
        job = self._new_job(True, count, labels)
        job.places = places
        gpu = GPULoadStoreSpec(np.array(job.gpu), (count,), (skip,))
        if self._submit(job, (gpu, CPULoadStoreSpec(np.array(hosts))), labels):
            self._shelf.store(job)

    def _submit_load(self, count: int) -> None:
        hosts, skip, places = self._shelf.transfer(count)
        labels, writers = self._shelf.expected(places)
        job = self._new_job(False, count, labels)
        job.writers, job.settled = writers, self._shelf.settled(places)
        gpu = GPULoadStoreSpec(np.array(job.gpu), (count,), (skip,))
        self._submit(job, (CPULoadStoreSpec(np.array(hosts)), gpu), [JUNK] * count)

    def _submit_keyed(self, manager: OffloadingManager, count: int) -> bool:
        """A store of keys in a row where they are not there, a load where they are.

        False where there was nothing to do.
        """
        factor = self.options.factor
        first = self._dice.randrange(self.options.keys)
        numbers = range(first, min(first + max(1, count // factor), self.options.keys))
        if len(numbers) * factor > len(self._free):
            return False
        keys = {key_of(number): number for number in numbers}
        if self._dice.random() < self.options.prefetches and manager.prefetch(keys).searches:
            self.tally.counts["prefetches"] += 1
            return False
        hits = [key for key in keys if manager.lookup(key) is Lookup.HIT]
        if hits:
            with suppress(Refused):
                spec = manager.prepare_load(hits)
                job = self._new_job(False, len(hits) * factor, self._labels(hits, keys))
                job.keys = tuple(hits)
                gpu = GPULoadStoreSpec(np.array(job.gpu))
                self._submit(job, (spec, gpu), [JUNK] * len(job.gpu))
            return True
        output = manager.prepare_store(keys)
        if output is None or not output.keys_to_store:  # full, all there, or the daemon is gone
            return False
        labels = self._labels(output.keys_to_store, keys)
        job = self._new_job(True, len(labels), labels)
        job.keys = output.keys_to_store
        self._submit(job, (GPULoadStoreSpec(np.array(job.gpu)), output.store_spec), labels)
        return True

    def _labels(self, keys: Sequence[bytes], numbers: dict[bytes, int]) -> list[int]:
        return [
            Label(self._namespace_owner, numbers[key], sub).number
            for key in keys
            for sub in range(self.options.factor)
        ]

    def _new_job(self, store: bool, count: int, labels: list[int]) -> HostBlocksJob:
        self._last_id += 1
        self._dice.shuffle(self._free)
        gpu, self._free = self._free[:count], self._free[count:]
        job = HostBlocksJob(self._last_id, store, gpu, labels, time.monotonic())
        self._jobs[job.job_id] = job
        return job

    def _submit(self, job: HostBlocksJob, spec: TransferSpec, labels: Sequence[int]) -> bool:
        """Write the job's GPU blocks and submit it, the one or the other first."""
        client, timeline = self._client, self._ground.timeline
        assert client is not None
        early = self._dice.random() < 0.3
        try:
            if early:
                client.transfer_async(job.job_id, spec, timeline.last + 1)
                if self._dice.random() < 0.1:
                    time.sleep(self._dice.random() * 0.005)
            self._ground.write(job.gpu, labels)
            fence = timeline.signal()
            if not early:
                client.transfer_async(job.job_id, spec, fence)
        except (Gone, Refused) as error:  # it was never under way
            self._end(job, None)
            if isinstance(error, Gone) or error.code not in EXPECTED:
                raise
            self.tally.counts[f"not sent: {error.code}"] += 1
            return False
        self.tally.counts["jobs"] += 1
        return True

    def _do_something_rare(self) -> None:
        client, dice = self._client, self._dice.random()
        if client is None or not self._jobs:
            return
        some = self._dice.sample(sorted(self._jobs), min(3, len(self._jobs)))
        if dice < self.options.cancels:
            client.cancel(some)
            for job_id in some:
                self._jobs[job_id].cancelled = True
        elif dice < self.options.cancels + 0.005:
            client.wait(some)
        elif dice < self.options.cancels + 0.005 + self.options.resets:
            if self._manager is not None:
                self._manager.reset_cache()
                self.tally.counts["resets"] += 1
        elif self._dice.random() < self.options.leaves:
            self._leave()

    def _leave(self) -> None:
        """Goodbye in the middle of everything, and back at once."""
        self._close()
        self.tally.counts["left"] += 1
        for job in list(self._jobs.values()):
            self._end(job, None)

    # Outcomes

    def _take_results(self) -> None:
        if self._client is None:
            return
        for result in self._client.get_finished():
            job = self._jobs.get(result.job_id)
            if job is None:
                self.tally.complain(f"an outcome for no job: {result}")
            else:
                self._check(job, result)
                self._end(job, result)

    def _check(self, job: HostBlocksJob, result: TransferResult) -> None:
        code = None if result.error is None else result.error.code
        self.tally.counts[str(result.outcome)] += 1
        self.tally.took(time.monotonic() - job.submitted)
        match str(result.outcome):
            case "done" if not job.store:
                self._compare(job)
            case "done":
                self.tally.counts["bytes"] += result.transfer_size
            case "cancelled" if job.cancelled:
                pass
            case "refused" if code in EXPECTED and job.keys:
                self.tally.counts[f"refused: {code}"] += 1
            case "refused" | "failed" if code == Code.STALE and not job.store and not job.settled:
                self.tally.counts[f"{result.outcome}: {code}"] += 1
            case "lost" if code == Code.DAEMON_GONE:
                pass
            case "failed" if code == Code.COPY_FAILED and self.options.may_fail:
                pass
            case _:
                self.tally.complain(f"job {job.job_id} ended as {result}")

    def _compare(self, job: HostBlocksJob) -> None:
        """The blocks that a load brought, as far as anybody knows what they must be."""
        if not job.keys and any(writer in self._jobs for writer in job.writers):
            self.tally.complain(f"load {job.job_id} overtook a store that it comes behind")
        if UNDEFINED in job.labels or self._failed.intersection(job.writers):
            self.tally.complain(f"load {job.job_id} is done, and a store of its blocks is not")
        known = [at for at, label in enumerate(job.labels) if label > 0]
        blocks = self._ground.read([job.gpu[at] for at in known])
        for fault in self._ground.marker.wrong(blocks, [job.labels[at] for at in known]):
            self.tally.complain(f"load {job.job_id} brought wrong bytes: {fault}")
        self.tally.counts["compared"] += len(known)
        self.tally.counts["bytes"] += len(job.gpu) * self.options.block_bytes

    def _end(self, job: HostBlocksJob, result: TransferResult | None) -> None:
        del self._jobs[job.job_id]
        self._free += job.gpu
        if job.places and result is not None and result.success:
            self._shelf.completed(job)
        elif job.places and result is not None and result.outcome is not Outcome.LOST:
            self._failed.add(job.job_id)
            self._shelf.failed(job)
        elif job.places:
            self._shelf.lost(job)
        if not self._jobs:
            self._failed.clear()
        if self._manager is not None and job.keys:
            if job.store:
                self._manager.complete_store(job.keys, result is not None and result.success)
            else:
                self._manager.complete_load(job.keys)

    def _complain_of_late(self) -> None:
        oldest = next(iter(self._jobs.values()), None)
        if oldest is None:
            return
        age = time.monotonic() - oldest.submitted
        if age > self.options.patience:
            self.tally.complain(f"job {oldest.job_id} has no outcome after {age:.1f} s")
            oldest.submitted = float("inf")

    def _notice_pause(self) -> None:
        """Time in which this process did not run is nobody's fault."""
        now = time.monotonic()
        if now - self._stepped > NOTICED:
            for job in self._jobs.values():
                job.submitted += now - self._stepped
        self._stepped = now


def key_of(number: int) -> bytes:
    return offload_key(hashlib.blake2b(number.to_bytes(8, "little"), digest_size=32).digest())
