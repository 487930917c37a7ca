"""Fixtures of all tests: devices, daemons and engines. The plugin is shipped to users."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from kvferry.client import LocalDaemon
from kvferry.testing.engine import EngineOptions, SmallEngine, StartSmallEngine, WorkerProcess
from support.command_line import restored_handlers
from support.virtual_time import VirtualTimeLoop

if TYPE_CHECKING:
    from kvferry.testing.plugin import StartKvferryd

pytest_plugins = ["kvferry.testing.plugin"]

POOL_BYTES = 64 << 20

settings.register_profile(
    "kvferry", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("kvferry")  # the same examples on every machine, also on a slow one


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the long form of tests")
    parser.addoption("--seed", type=int, help="seed of tests/faults; by default a new one")


def pytest_configure(config: pytest.Config) -> None:
    # Threads of one tensor operation spin for each other, which takes long if the cores are busy.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    if config.option.seed is None:
        config.option.seed = random.randrange(1 << 31)


@pytest.fixture
def long(request: pytest.FixtureRequest) -> bool:
    """Whether to run the long form."""
    return bool(request.config.option.long)


def pytest_asyncio_loop_factories(
    item: pytest.Item,
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    if item.get_closest_marker("virtual_time"):
        return {"virtual": VirtualTimeLoop}
    return {"real": asyncio.new_event_loop}


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {config.option.seed}"


@pytest.fixture(autouse=True)
def handlers_of_this_process() -> Iterator[None]:
    """A test that runs the command in this process leaves no handler of it installed."""
    with restored_handlers():
        yield


@pytest.fixture(scope="session", autouse=True)
def default_signals_for_children() -> Iterator[None]:
    """Give SIGINT and SIGHUP their default action in child processes, also if pytest ignores them.

    A background job of a script ignores SIGINT, and a process under nohup ignores SIGHUP. Their
    children would inherit that. A handler that does nothing also ignores the signal in this
    process, and is not inherited.
    """
    ignored = [n for n in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, lambda *_: None)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """The device of KV tensors, as torch names it."""
    if request.param == "cuda":
        import torch

        if not torch.cuda.is_available():
            pytest.skip("torch has no CUDA device on this machine")
        return "cuda:0"
    return str(request.param)


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory for sockets. With a GPU's UUID, paths below pytest's tmp_path are too long."""
    with tempfile.TemporaryDirectory(prefix="kvferry-") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def daemon(device: str) -> Iterator[LocalDaemon]:
    """A daemon of the device, shared by all tests of a file that do not change it."""
    name = "0" if device.startswith("cuda") else device
    with LocalDaemon(name, pool_bytes=POOL_BYTES) as running:
        yield running
        assert running.process.poll() is None, running.log()


class WorkerProcesses:
    """Reuses worker processes, because their start takes seconds. Killed ones are not reused."""

    def __init__(self) -> None:
        self._idle: list[WorkerProcess] = []

    def acquire(self) -> WorkerProcess:
        return self._idle.pop() if self._idle else WorkerProcess()

    def release(self, process: WorkerProcess) -> None:
        if process.alive:
            self._idle.append(process)
        else:
            process.close()

    def close(self) -> None:
        for process in self._idle:
            process.close()


@pytest.fixture(scope="session")
def worker_processes() -> Iterator[WorkerProcesses]:
    processes = WorkerProcesses()
    yield processes
    processes.close()


@pytest.fixture
def worker_process(worker_processes: WorkerProcesses) -> Iterator[Callable[[], WorkerProcess]]:
    """worker_process() -> a process without an engine."""
    with ExitStack() as stack:

        def acquire() -> WorkerProcess:
            process = worker_processes.acquire()
            stack.callback(worker_processes.release, process)
            return process

        yield acquire


_numbers = count(1)


@pytest.fixture
def start_engine(
    start_kvferryd: StartKvferryd, worker_process: Callable[[], WorkerProcess]
) -> Iterator[StartSmallEngine]:
    """start_engine(daemon or its directory, **EngineOptions) -> SmallEngine, with a unique name.

    Engines are closed before the daemons of the test.
    """
    with ExitStack() as running:

        def start(daemon_or_directory: LocalDaemon | Path, **options: Any) -> SmallEngine:
            directory = (
                daemon_or_directory.directory
                if isinstance(daemon_or_directory, LocalDaemon)
                else daemon_or_directory
            )
            kind = "cpu" if directory.name == "cpu" else "cuda:0"
            defaults = {"name": f"engine-{next(_numbers)}", "device": kind, "host_bytes": 1 << 20}
            chosen = EngineOptions(**{**defaults, **options})
            return running.enter_context(SmallEngine(directory, worker_process(), chosen))

        yield start
