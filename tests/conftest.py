"""Devices, and engines on them, for every test here. The plugin is what users get."""

from __future__ import annotations

import random
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from kvferry.client import LocalDaemon
from kvferry.testing.engine import EngineOptions, SmallEngine, StartSmallEngine, WorkerProcess

if TYPE_CHECKING:
    from kvferry.testing.plugin import StartKvferryd

pytest_plugins = ["kvferry.testing.plugin"]

POOL_BYTES = 64 << 20

settings.register_profile(
    "kvferry", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("kvferry")  # the same examples everywhere, however slow a machine is


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="the suites of faults in full")
    parser.addoption("--seed", type=int, help="of the suites of faults; by default a new one")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.seed is None:
        config.option.seed = random.randrange(1 << 31)


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {config.option.seed}"


@pytest.fixture(scope="session", autouse=True)
def default_signals_for_children() -> Iterator[None]:
    """Have the processes that tests start heed SIGINT and SIGHUP, also if pytest ignores them.

    A script's background job ignores SIGINT, what runs under nohup SIGHUP, and so would everything
    they start. A handler that does nothing keeps this process as it was and is not inherited.
    """
    ignored = [n for n in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, lambda *_: None)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where KV tensors are, as torch names it."""
    if request.param == "cuda":
        import torch

        if not torch.cuda.is_available():
            pytest.skip("torch sees no CUDA device here")
        return "cuda:0"
    return str(request.param)


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder for sockets: below pytest's own, a GPU's UUID would make their paths too long."""
    with tempfile.TemporaryDirectory(prefix="kvferry-") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def daemon(device: str) -> Iterator[LocalDaemon]:
    """A daemon of the device, for all tests of a file that leave it as it is."""
    name = "0" if device.startswith("cuda") else device
    with LocalDaemon(name, pool_bytes=POOL_BYTES) as running:
        yield running
        assert running.process.poll() is None, running.log()


class WorkerProcesses:
    """Processes that take seconds to start are used again, unless a test killed them."""

    def __init__(self) -> None:
        self._idle: list[WorkerProcess] = []

    def take(self) -> WorkerProcess:
        return self._idle.pop() if self._idle else WorkerProcess()

    def give_back(self, process: WorkerProcess) -> None:
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
    with ExitStack() as taken:

        def take() -> WorkerProcess:
            process = worker_processes.take()
            taken.callback(worker_processes.give_back, process)
            return process

        yield take


_numbers = count(1)


@pytest.fixture
def start_engine(
    start_kvferryd: StartKvferryd, worker_process: Callable[[], WorkerProcess]
) -> Iterator[StartSmallEngine]:
    """start_engine(daemon or its directory, **EngineOptions) -> Engine, of a name of its own.

    Engines are closed before the daemons of the test are.
    """
    with ExitStack() as running:

        def start(where: LocalDaemon | Path, **options: Any) -> SmallEngine:
            directory = where.directory if isinstance(where, LocalDaemon) else where
            kind = "cpu" if directory.name == "cpu" else "cuda:0"
            named = {"name": f"engine-{next(_numbers)}", "device": kind, "host_bytes": 1 << 20}
            chosen = EngineOptions(**{**named, **options})
            return running.enter_context(SmallEngine(directory, worker_process(), chosen))

        yield start
