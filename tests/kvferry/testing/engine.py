"""A small LLM engine that computes nothing: a scheduler in this process, its worker in another.

    with LocalDaemon() as daemon, WorkerProcess() as process:
        with Engine(daemon.directory, process, EngineOptions(num_blocks=64)) as engine:
            value = engine.worker.write([3, 4], seed=1, slow=0.2)       # returns at once
            job = engine.store([3, 4], [0, 1], wait_for=value)
            (result,) = engine.finish(job)
            engine.finish(engine.load([0, 1], [8, 9]))
            assert (engine.worker.read([8, 9]) == engine.expected([3, 4], seed=1)).all()

As in real engines, the scheduler submits and polls, and touches no tensor. The worker registers the
KV tensors, runs kernels on them (real ones on a GPU) and advances the timeline after them. A
worker's process takes seconds to start, so it can serve one engine after another.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from kvferry.client import (
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    OffloadClient,
    TransferResult,
    TransferSpec,
)
from kvferry.testing.content import Bytes, expected
from kvferry.testing.options import EngineOptions, Form, GroupOptions

if TYPE_CHECKING:
    from kvferry.testing.worker import SmallEngineWorker, WorkerOpened

POLL = 0.0005
# Seconds; long, because other processes may use the cores.
TIMEOUT = 60.0


def until(condition: Callable[[], bool], timeout: float = TIMEOUT) -> None:
    """Wait until `condition` is true. Raises TimeoutError after `timeout` seconds.

    The condition is checked once more after the timeout, because a busy machine may have delayed
    this process.
    """
    deadline, expired = time.monotonic() + timeout, False
    while not condition():
        if expired:
            raise TimeoutError(f"the condition is false after {timeout:g} s")
        time.sleep(POLL)
        expired = time.monotonic() > deadline


class WorkerDied(Exception):
    """The worker's process ended before it replied."""


class WorkerProcess:
    """A process that can be an engine's worker. `close` ends it."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, child_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(child_end,), daemon=True)
        self._process.start()
        child_end.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def call(self, name: str, *arguments: Any, **keywords: Any) -> Any:
        """Call a method of the worker. Returns its value, or raises its error.

        Raises TimeoutError after TIMEOUT seconds, and WorkerDied if the process has ended.
        """
        try:
            self._pipe.send((name, arguments, keywords))
            if not self._pipe.poll(TIMEOUT):
                raise TimeoutError(f"the worker did not reply to {name}")
            reply, error = self._pipe.recv()
        except (EOFError, ConnectionError) as broken:
            raise WorkerDied(name) from broken
        if error is not None:
            raise error
        return reply

    def kill(self) -> None:
        """Send SIGKILL, and wait until the process has ended."""
        self._process.kill()
        self._process.join()

    def close(self) -> None:
        self._pipe.close()
        self._process.join(5)
        self.kill()

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _serve(pipe: Any) -> None:
    from kvferry.testing.worker import serve

    serve(pipe)


class _Remote:
    """Forwards method calls to the worker in another process."""

    def __init__(self, process: WorkerProcess) -> None:
        self._call = process.call

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._call, name)


class SmallEngine:
    """The scheduler, and a handle of the worker.

    worker: the methods of SmallEngineWorker, which run in `process`. region: of the host pool.
    kept: whether the worker received the kept tensors of the previous one.
    client: the scheduler's session. history: results in the order of their arrival.
    """

    def __init__(self, directory: Path, process: WorkerProcess, options: EngineOptions) -> None:
        self.directory, self.options = directory, options
        self.history: list[TransferResult] = []
        self._job_ids, self._closed = count(1), False
        self.start_worker(process)
        self.client = OffloadClient(
            directory, engine=options.name, client="scheduler", timeout=TIMEOUT
        )

    def start_worker(self, process: WorkerProcess) -> None:
        """Make `process` the worker, also after the previous one has died."""
        self.process = process
        opened: WorkerOpened = process.call("open", self.directory, self.options)
        self.region, self.parts, self.kept = opened.region, opened.parts, opened.kept
        self.worker = cast("SmallEngineWorker", _Remote(process))

    def expected(self, block_ids: Sequence[int], seed: int, group: int = 0) -> Bytes:
        """The value of `worker.read` for blocks that were written with `seed`."""
        return expected(self.parts[group], block_ids, seed)

    def store(
        self,
        gpu: Sequence[int],
        host: Sequence[int],
        *,
        wait_for: int = 0,
        sizes: Sequence[int] | None = None,
        firsts: Sequence[int] | None = None,
    ) -> int:
        """Submit a store of GPU blocks to host blocks. Returns the job's id."""
        spec = _gpu(gpu, sizes, firsts), CPULoadStoreSpec(np.asarray(host, dtype=np.int64))
        return self.submit(spec, wait_for)

    def load(
        self,
        host: Sequence[int],
        gpu: Sequence[int],
        *,
        wait_for: int = 0,
        sizes: Sequence[int] | None = None,
        firsts: Sequence[int] | None = None,
    ) -> int:
        """Submit a load of host blocks to GPU blocks. Returns the job's id."""
        spec = CPULoadStoreSpec(np.asarray(host, dtype=np.int64)), _gpu(gpu, sizes, firsts)
        return self.submit(spec, wait_for)

    def submit(self, spec: TransferSpec, wait_for: int = 0) -> int:
        job_id = next(self._job_ids)
        self.client.transfer_async(job_id, spec, wait_for)
        return job_id

    def poll(self) -> list[TransferResult]:
        """Receive new results. Returns all results so far."""
        self.history += self.client.get_finished()
        return self.history

    def finish(self, *job_ids: int, timeout: float = TIMEOUT) -> list[TransferResult]:
        """Poll until these jobs have ended. Returns their results in the order of `job_ids`."""
        until(lambda: {result.job_id for result in self.poll()} >= set(job_ids), timeout)
        by_id = {result.job_id: result for result in self.history}
        return [by_id[job_id] for job_id in job_ids]

    def close(self) -> None:
        """Close both sessions. The process continues. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self.client.close()
            if self.process.alive:
                self.worker.close()

    def __enter__(self) -> SmallEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# Called with a daemon or its directory, and fields of EngineOptions as keywords.
StartSmallEngine = Callable[..., SmallEngine]


def _gpu(
    ids: Sequence[int], sizes: Sequence[int] | None, firsts: Sequence[int] | None
) -> GPULoadStoreSpec:
    return GPULoadStoreSpec(
        np.asarray(ids, dtype=np.int64),
        None if sizes is None else tuple(sizes),
        None if firsts is None else tuple(firsts),
    )


__all__ = [
    "SmallEngine",
    "EngineOptions",
    "Form",
    "GroupOptions",
    "StartSmallEngine",
    "WorkerDied",
    "WorkerProcess",
    "until",
]
