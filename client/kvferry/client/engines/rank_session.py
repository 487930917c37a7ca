"""RankSession: the session of the process that has a rank's KV caches, with its GPU's daemon.

Tensors are registered with a timeline, before any CUDA graph is captured. When a job is submitted,
its timeline value is queued in the engine's stream: behind the kernels that write the blocks to be
stored, and behind those that may still read the blocks to be overwritten by a load.

The client reconnects while it is polled, without waiting, so there is no thread. If the connection
is lost, or jobs do not complete in time, the session is abandoned: its jobs fail at once, and the
engine may reuse their blocks (see OffloadClient.abandon). No method raises. Called in one thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvferry.client.blocking import OffloadClient
from kvferry.client.engines.connecting import CONNECT_TIMEOUT, connect_if_running
from kvferry.client.jobs import TransferResult
from kvferry.client.session_state import NamespaceOptions, RegistrationState, SessionState
from kvferry.client.tensors.canonical import CanonicalKVCaches
from kvferry.client.timeline import Timeline
from kvferry.cuda.driver import driver
from kvferry.proto.errors import Code, Gone, KVFerryError
from kvferry.proto.fingerprint import Fingerprint
from kvferry.proto.results import Outcome
from kvferry.proto.specs import Direction, TransferSpec

log = logging.getLogger("kvferry")

# Seconds to wait for jobs whose GPU blocks the engine reuses; then they are abandoned.
WAIT_TIMEOUT = 10.0


@dataclass(frozen=True, slots=True)
class RankIdentity:
    """What a rank says to its daemon.

    who: in the engine's log. client: the name of the process in the daemon's. find_daemon: returns
    the daemon's directory; given the UUID of the rank's GPU, if it has one. mirror: whether the
    session mirrors the namespace. log: the engine's.
    """

    who: str
    engine: str
    client: str
    fingerprint: Fingerprint
    options: NamespaceOptions
    find_daemon: Callable[[str | None], Path]
    mirror: bool = False
    log: logging.Logger = log


class RankSession:
    """Submits the transfers of a rank and reports those that ended.

    wait_timeout: seconds, see `wait`. connect_timeout: seconds to wait for a daemon that runs when
    the engine starts. client: None if no daemon can serve the device, and while suspended.
    """

    def __init__(
        self,
        identity: RankIdentity,
        kv_caches: CanonicalKVCaches,
        *,
        wait_timeout: float = WAIT_TIMEOUT,
        connect_timeout: float = CONNECT_TIMEOUT,
    ) -> None:
        self._identity, self.kv_caches = identity, kv_caches
        self._wait_timeout, self._connect_timeout = wait_timeout, connect_timeout
        self._device = kv_caches.tensors[0].device
        # Jobs without a result, and results for the next get_finished.
        self._in_flight: set[int] = set()
        self._results: list[TransferResult] = []
        self.client: OffloadClient | None = None
        # The incarnation of the session that was abandoned last; the first one is 1.
        self._abandoned = 0
        self.timeline: Timeline | None = None
        try:
            self.timeline = Timeline.create(self._device if self._device.type == "cuda" else "cpu")
        except KVFerryError as error:
            log.warning("kvferry: %s continues without offloading: %s", identity.who, error)
        self.resume()

    def submit(
        self, job_id: int, spec: TransferSpec, direction: Direction, stream: Any = None
    ) -> None:
        """Start a transfer after the kernels of a stream; None: torch's current one."""
        client, timeline = self.client, self.timeline
        if client is None or timeline is None:
            gone = Gone(Code.DAEMON_GONE, "the rank has no daemon", job_id)
            self.note_failure(job_id, direction, gone)
            return
        value = timeline.last + 1
        try:
            client.transfer_async(job_id, spec, wait_for=value)
        except KVFerryError as error:
            self.note_failure(job_id, direction, error)
            return
        self._in_flight.add(job_id)
        try:  # signalled last: the daemon decodes the job meanwhile
            timeline.signal(self._stream(stream), value)
        except KVFerryError as error:  # without the signal the job would never begin
            self.abandon(error)

    def note_result(self, result: TransferResult) -> None:
        """Have get_finished return the result of a job that needs no transfer."""
        self._results.append(result)

    def note_failure(self, job_id: int, direction: Direction, error: KVFerryError) -> None:
        """Have get_finished return a failure of a job that was not submitted."""
        log.debug("kvferry: job %d: %s", job_id, error)
        kind = direction.transfer_type
        self.note_result(TransferResult(job_id, False, 0, 0.0, kind, Outcome.LOST, error))

    def get_finished(self) -> list[TransferResult]:
        """Results of completed jobs. success is False for failed and lost jobs."""
        self.poll()
        results, self._results = self._results, []
        return results

    def poll(self) -> bool:
        """Receive results, for the next get_finished. Returns whether there are any."""
        if (client := self.client) is not None:
            try:
                finished = client.get_finished()
            except KVFerryError as error:
                self.abandon(error)
            else:
                self._abandon_if_lost()
                for result in finished:
                    if result.error is not None:
                        log.debug("kvferry: job %d: %s", result.job_id, result.error)
                self._in_flight.difference_update([result.job_id for result in finished])
                self._results += finished
        return bool(self._results)

    def wait(self, job_ids: Collection[int]) -> None:
        """Return when these jobs no longer access their GPU blocks.

        After `wait_timeout` seconds they are abandoned; see OffloadClient.abandon.
        """
        if (client := self.client) is not None:
            try:
                client.wait(job_ids, timeout=self._wait_timeout)
            except KVFerryError as error:
                self.abandon(error)
            self._abandon_if_lost()

    def wait_all(self) -> None:
        """As `wait`, for all jobs."""
        self.wait(tuple(self._in_flight))

    def suspend(self) -> None:
        """The KV caches are about to lose their memory: end all jobs, and the session."""
        if self.client is not None:
            self.wait_all()
            self.poll()
            self.client.close()
            self.client = None

    def resume(self) -> None:
        """The KV caches have memory."""
        if self.timeline is not None and self.client is None:
            try:
                self.client = self._connect(self.timeline)
            except KVFerryError as error:  # no daemon can serve this device
                who = self._identity.who
                log.warning("kvferry: %s continues without offloading: %s", who, error)

    def shutdown(self) -> None:
        if self.timeline is not None:
            self.timeline.revoke()
        if self.client is not None:
            self.client.close()
        if self.timeline is not None:
            with suppress(KVFerryError):  # a failed GPU cannot release it
                self.timeline.close()

    def abandon(self, error: KVFerryError) -> None:
        """End all jobs, as lost: the engine reuses their blocks, and the daemon may still run."""
        assert self.client is not None
        log.warning("kvferry: %s abandons its session: %s", self._identity.who, error)
        self._abandoned = self.client.incarnation
        self.client.abandon()

    def _abandon_if_lost(self) -> None:
        """Revoke the timeline of lost jobs."""
        client = self.client
        if client is None or client.gone is None or client.incarnation == self._abandoned:
            return
        self._abandoned = client.incarnation
        client.abandon()

    def _connect(self, timeline: Timeline) -> OffloadClient:
        """A client. If a daemon runs now, it is connected, so that tensors are shared before any
        CUDA graph is captured. Raises Refused if no daemon can serve this device."""
        identity = self._identity
        find_daemon = partial(identity.find_daemon, self._uuid())
        client = OffloadClient(
            find_daemon,
            engine=identity.engine,
            client=identity.client,
            timeout=self._connect_timeout,
            state=SessionState.of_namespace(
                identity.fingerprint,
                mirror=identity.mirror,
                registration=RegistrationState(self.kv_caches, None, timeline),
                **identity.options,
            ),
        )
        timeout = self._connect_timeout
        connect_if_running(identity.who, client, [find_daemon], timeout, identity.log)
        return client

    # On the CPU, as in tests, there are no streams

    def _stream(self, stream: Any) -> Any:
        if self._device.type != "cuda":
            return None
        return torch.cuda.current_stream(self._device) if stream is None else stream

    def _uuid(self) -> str | None:
        if self._device.type != "cuda":
            return None
        index = self._device.index
        return driver().device_uuid(torch.cuda.current_device() if index is None else index)
