"""The device worker: the one thread that owns the device.

It takes commands from a queue and repeats three things: it polls the chunks in flight, submits the
next ones, and sleeps. There is no scheduler. The rules:

    loads before stores     whenever the worker decides what to submit next, it tries a load first
    one chunk, then check    after each chunk it handles commands and polls again; so a load that
                            arrives while stores are submitted waits for one chunk to be submitted,
                            and a cancel acts within one chunk
    few in flight           the engine limits the bytes in flight (CopyEngine.chunk_budget), which
                            limits how long a chunk waits for the device
    back-off                it sleeps on its command queue: without limit if nothing waits, else
                            for the time that poll_backoff.py returns

Loads and stores use different copy engines and directions of the link. So stores keep their few
chunks in flight during a load: a limit of one chunk would make a load 35 us faster, and cost stores
20 to 60 % of their speed.

Each registration has a FIFO of transfers per direction, and registrations take turns chunk by
chunk. Only the head of a FIFO submits, and only when RegistrationQueues.must_wait allows it. This
thread reads the fences. Nothing waits on a stream, so nothing can hang one.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import TypeAlias

from kvferry.daemon.core.actions import (
    CancelTransfers,
    Continue,
    CopyCalibrated,
    ForgetStores,
    Pong,
    ReleaseTensors,
    Report,
    StartTransfer,
    TensorsUnmapped,
    UnmapTensors,
)
from kvferry.daemon.device.command_queue import CommandQueue, Ping, Stop
from kvferry.daemon.device.mappings import MapCommand, Mappings
from kvferry.daemon.device.poll_backoff import MAX_FENCE_POLL, MAX_POLL, PollBackoff
from kvferry.daemon.device.transfer_queues import (
    ActiveTransfer,
    DirectionQueue,
    InflightChunk,
    RegistrationQueues,
    TransferQueue,
    oldest_accepted,
)
from kvferry.daemon.engine.base import ChunkRequest, CopyEngine
from kvferry.daemon.memory.pool import HostPool
from kvferry.proto.errors import Code, Failed, KVFerryError
from kvferry.proto.results import Outcome
from kvferry.proto.specs import Direction

# Maximum of transfers cancelled together. There may be thousands; the event loop must handle the
# end of each.
MAX_CANCELS = 64
# Without it Linux rounds a sleep of 20 us up to 70.
_PR_SET_TIMERSLACK = 29

Command: TypeAlias = (
    MapCommand
    | ReleaseTensors
    | UnmapTensors
    | StartTransfer
    | CancelTransfers
    | ForgetStores
    | Ping
    | Stop
)


class DeviceWorker:
    """Owns `engine`: after `start` only this thread calls it, except pin and unpin (pool.py).

    `post_command` may be called on any thread; `hold_memory`, `start` and `close` on the thread
    that created the worker, `hold_memory` only before `start`.
    report: called on the worker's thread with reports, in the order of events. died: called there
    once, if the worker fails.
    """

    def __init__(
        self,
        engine: CopyEngine,
        pool: HostPool,
        report: Callable[[list[Report]], None],
        died: Callable[[KVFerryError], None],
    ) -> None:
        self._engine = engine
        self._pool = pool
        self._report = report
        self._died = died
        self._commands: CommandQueue[Command] = CommandQueue()
        self._mappings = Mappings(engine)
        self._registrations = self._mappings.queues
        self._loads, self._stores = DirectionQueue(Direction.LOAD), DirectionQueue(Direction.STORE)
        self._directions = {queue.direction: queue for queue in (self._loads, self._stores)}
        self._backoff = PollBackoff()
        self._reports: list[Report] = []
        self._stopping = False
        self._started = threading.Event()
        self._start_error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="kvferry-device", daemon=True)

    def hold_memory(self, number: int, *descriptors: int) -> None:
        """Take over memory that an earlier daemon held for a registration."""
        assert self._thread.ident is None, "hold_memory() after start()"
        self._mappings.hold_memory(number, *descriptors)

    def start(self) -> None:
        """Start the thread and attach the engine there. Raises what CopyEngine.attach raises."""
        self._thread.start()
        self._started.wait()
        if self._start_error is not None:
            raise self._start_error

    def post_command(self, command: Command) -> None:
        """Queue a command. Any thread."""
        self._commands.put_command(command)

    def close(self) -> None:
        """Stop the thread and wait for it. Transfers that have not ended are dropped."""
        self.post_command(Stop())
        self._thread.join()

    def _run(self) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1)
        try:
            copying = self._engine.attach(self._pool.address)
            if copying is not None:
                self._reports.append(CopyCalibrated(copying))
                self._send_reports()
        except Exception as error:
            self._start_error = error
            return
        finally:
            self._started.set()
        try:
            while not self._stopping:
                self._commands.wait_for_command(self._sleep_seconds())
                while self._step():
                    pass
            self._mappings.release_all_memory()
            self._engine.shutdown()
        except Exception as error:
            self._died(Failed(Code.COPY_FAILED, f"the device worker failed: {error!r}"))
            raise

    def _sleep_seconds(self) -> float | None:
        """How long to sleep unless a command arrives; None: until one does."""
        if self._loads.inflight or self._stores.inflight:
            return self._backoff.next(MAX_POLL)
        if self._loads.waiting or self._stores.waiting:
            return self._backoff.next(MAX_FENCE_POLL)
        return None

    def _step(self) -> bool:
        """Handle commands, poll, report, and submit one chunk. Return whether to repeat at once."""
        while not self._stopping and (command := self._commands.take_command()) is not None:
            self._handle(command)
        if self._stopping:
            return False
        for queue in self._directions.values():
            self._poll(queue)
        self._send_reports()  # first: submitting takes longer than reporting
        again = self._submit_next()
        self._send_reports()
        return again

    def _handle(self, command: Command) -> None:
        self._backoff.reset()
        match command:
            case StartTransfer(plan=plan):
                registration = self._registrations[plan.registration]
                registration.add_transfer(plan)
                self._directions[plan.direction].add_registration(registration)
            case MapCommand():
                self._reports.append(self._mappings.map_tensors(command))
            case CancelTransfers(number, serials):
                self._cancel(number, serials)
            case UnmapTensors(number):
                self._unmap(number)
            case ReleaseTensors(number):
                self._mappings.release_memory(number)
            case ForgetStores(number, serials):
                if registered := self._registrations.get(number):
                    registered.failed_stores.difference_update(serials)
            case Ping(posted):
                self._reports.append(Pong(posted, *oldest_accepted(self._registrations.values())))
            case Stop():
                self._stopping = True
        self._retry_full()  # the next chunk may be another one now

    def _retry_full(self) -> None:
        """Something happened: the engine may accept a chunk now."""
        for queue in self._directions.values():
            queue.full = False

    def _unmap(self, number: int) -> None:
        if registration := self._registrations.get(number):
            registration.unmapping = True
            self._cancel(number, registration.serials)
        else:  # mapping it failed
            self._reports.append(TensorsUnmapped(number))

    def _cancel(self, number: int, serials: tuple[int, ...]) -> None:
        """Cancel some transfers. The others follow when the event loop has handled these."""
        if (registration := self._registrations.get(number)) is None:
            return
        for queue, transfer in registration.cancel_transfers(serials[:MAX_CANCELS]):
            self._report_if_over(queue, transfer)
        if rest := serials[MAX_CANCELS:]:
            self._reports.append(Continue(CancelTransfers(number, rest)))
        self._close_if_unmapped(number, registration)

    # Completed chunks

    def _poll(self, queue: DirectionQueue) -> None:
        """Remove the chunks that are done, in the order of submission."""
        while queue.inflight:
            chunk = queue.inflight[0]
            transfer = chunk.transfer
            try:
                if not self._engine.poll(chunk.submission):
                    return
                if queue.direction is Direction.STORE and chunk.registration.mapping.layout.packed:
                    chunk.add_unpackable(self._engine.unpackable_blocks(chunk.submission))
                if transfer.in_flight == 1 and not transfer.rest:
                    transfer.seconds = self._engine.elapsed(
                        transfer.first, chunk.submission, transfer.before
                    )
            except KVFerryError as error:
                chunk.fail_transfer(error.info)
            queue.inflight.popleft()
            chunk.mark_done()
            self._backoff.reset()
            self._retry_full()
            self._report_if_over(chunk.registration.transfers[queue.direction], transfer)
            self._close_if_unmapped(transfer.plan.registration, chunk.registration)

    def _report_if_over(self, queue: TransferQueue, transfer: ActiveTransfer) -> None:
        """Report ended transfers in queue order; a cancelled one at once."""
        if not transfer.over:
            return
        if transfer.outcome is Outcome.CANCELLED and transfer.plan.serial in queue.live:
            self._report_end(queue, transfer)
        while (first := queue.oldest) and queue.finished(first):
            self._report_end(queue, first)

    def _report_end(self, queue: TransferQueue, transfer: ActiveTransfer) -> None:
        plan = transfer.plan
        del queue.live[plan.serial]
        self._reports.append(transfer.completion)
        if plan.direction is Direction.STORE and transfer.outcome is not Outcome.DONE:
            self._registrations[plan.registration].mark_store_failed(plan.serial)
            # The core may plan loads that require it until it has handled its end.
            self._reports.append(Continue(ForgetStores(plan.registration, (plan.serial,))))

    def _close_if_unmapped(self, number: int, registration: RegistrationQueues) -> None:
        if not (registration.unmapping and registration.empty):
            return
        for queue in self._directions.values():
            queue.remove_registration(registration)
        self._mappings.unmap_tensors(number)
        self._reports.append(TensorsUnmapped(number))

    def _send_reports(self) -> None:
        if self._reports:
            reports, self._reports = self._reports, []
            self._report(reports)

    # Chunks to submit

    def _submit_next(self) -> bool:
        """Submit a chunk of a load, else of a store. Return whether one was submitted."""
        for queue in (self._loads, self._stores):
            if self._submit_in_turn(queue):
                self._backoff.reset()
                return True
            if queue.inflight or queue.turns:
                self._engine.flush(queue.direction, more=queue.full)
        return False

    def _submit_in_turn(self, queue: DirectionQueue) -> bool:
        """Submit a chunk of the next registration that has one and need not wait."""
        if queue.full:
            return False
        for _ in range(len(queue.turns)):
            registration = queue.turns[0]
            transfers = registration.transfers[queue.direction]
            if not transfers.waiting:
                transfers.listed = False
                queue.turns.popleft()
            elif registration.must_wait(transfers.head.plan, self._pool.ready_bytes):
                queue.turns.rotate(-1)
            elif self._submit_head(queue, registration, transfers):
                queue.turns.rotate(-1)
                return True
            else:  # it stays the first, for the next budget
                queue.full = True
                return False
        return False

    def _submit_head(
        self, queue: DirectionQueue, registration: RegistrationQueues, transfers: TransferQueue
    ) -> bool:
        """Submit the next chunk of the first transfer; False if the engine does not accept it."""
        transfer = transfers.head
        if transfer.failed_store is not None:
            message = "a store that this load waited for did not complete; store its blocks again"
            stale = Failed(Code.STALE, message, f"transfer {transfer.failed_store}")
            transfer.abort(Outcome.FAILED, stale.info)
        if transfer.rest and not self._submit_chunk(queue, registration, transfer):
            return False
        if not transfer.rest:
            transfers.waiting.popitem(last=False)
            self._report_if_over(transfers, transfer)
        return True

    def _submit_chunk(
        self, queue: DirectionQueue, registration: RegistrationQueues, transfer: ActiveTransfer
    ) -> bool:
        mapping, direction = registration.mapping, queue.direction
        layout = mapping.layout
        request = ChunkRequest(
            transfer.rest[0].group,
            layout.count_bytes(transfer.rest),
            self._directions[direction.other].contends,
        )
        budget = self._engine.chunk_budget(direction, mapping, request)
        if not budget.nbytes:
            return False
        extent, rest = layout.split_chunk(transfer.rest, budget.nbytes, budget.blocks)
        try:
            submission = self._engine.submit(direction, mapping, extent)
        except KVFerryError as error:
            transfer.abort(Outcome.FAILED, error.info)
            return True
        transfer.rest = rest
        transfer.in_flight += 1
        if transfer.first is None:
            transfer.first = submission
            transfer.before = queue.inflight[-1].submission if queue.inflight else None
            if accepted := transfer.plan.accepted:
                transfer.queued = time.monotonic() - accepted
        nbytes = layout.count_bytes((extent,))
        queue.inflight.append(InflightChunk(registration, transfer, submission, extent, nbytes))
        return True
