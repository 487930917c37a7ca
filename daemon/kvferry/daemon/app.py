"""kvferryd: the only place that reads configuration and picks an engine.

Called by __main__ on the main thread. What the operating system refuses while the daemon starts (a
full file system, no memory, no threads) becomes a line with the setting to change.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import resource
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

import structlog
import uvloop
import zmq

from kvferry.daemon import config as configuration
from kvferry.daemon.access.admission import Admission
from kvferry.daemon.access.endpoint import Endpoint
from kvferry.daemon.config import Config, HealthConfig
from kvferry.daemon.core.core import Core, DaemonIdentity
from kvferry.daemon.core.regions import MAX_REGIONS
from kvferry.daemon.device.command_queue import Ping
from kvferry.daemon.device.worker import DeviceWorker
from kvferry.daemon.engine.base import CopyEngine
from kvferry.daemon.engine.reference import Faults, ReferenceEngine
from kvferry.daemon.logs import start_logging, unfailing
from kvferry.daemon.memory.pool import HostPool, check_fits, free_chunks, used_bytes, whole_pages
from kvferry.daemon.observability.health import Health, HealthTimeouts
from kvferry.daemon.observability.http import MetricsServer
from kvferry.daemon.observability.kv_events import KVEventPublisher
from kvferry.daemon.observability.metrics import Metrics
from kvferry.daemon.observability.probe import HOST_BYTES, Probe
from kvferry.daemon.persistence.checksum_client import ChecksumClient
from kvferry.daemon.persistence.kept_tensor_store import KeptTensorStore
from kvferry.daemon.persistence.region_store import FdStore, NullFdStore, RegionStore
from kvferry.daemon.reload import Reload
from kvferry.daemon.systemd import Supervisor
from kvferry.daemon.transport.accept_gate import max_client_fd
from kvferry.daemon.transport.server import Server
from kvferry.proto.codec import MAX_MESSAGE_BYTES
from kvferry.proto.errors import Code, KVFerryError, Refused
from kvferry.proto.sizes import parse_bytes
from kvferry.proto.specs import MAX_BLOCK_IDS
from kvferry.proto.status import Limits
from kvferry.proto.version import kvferry_version

log = structlog.get_logger()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run until SIGTERM. Exit status: 0 stopped, 1 something failed, 2 refused to start."""
    sys.stderr = unfailing(sys.stderr)
    supervisor = Supervisor()
    try:
        _main(supervisor, arguments)
    finally:
        supervisor.send_queued()


def _main(supervisor: Supervisor, arguments: Sequence[str] | None) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # clients and chunks take some each
    try:
        config = configuration.read(arguments)
        start_logging(config.log)
        supervisor.status(f"opening device {config.device}")
        engine = make_engine(config)
        admission = Admission(config.access.group)
        with refuse_os_errors(config.directory):
            endpoint = Endpoint(config.directory / engine.info.uuid, admission)
    except KVFerryError as error:
        exit_with_error(supervisor, "refused to start", error, 2)
    with contextlib.closing(endpoint):
        try:
            with refuse_os_errors(config.directory):
                pool, kept = make_pool(config, supervisor, locked=engine.info.kind != "cpu")
        except KVFerryError as error:
            exit_with_error(supervisor, "refused to start", error, 2)
        try:
            signals = SignalHandlers(
                supervisor, Reload(arguments, config, partial(apply_config, endpoint))
            )
            uvloop.run(run(config, engine, pool, endpoint, kept, signals))
        except Refused as error:  # errors before it serves
            exit_with_error(supervisor, "refused to start", error, 2)
        except KVFerryError as error:
            exit_with_error(supervisor, "failed", error, 1)


# Errors of a file system that takes no new file, and of a kernel that has no memory left.
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO})
NO_MEMORY = frozenset({errno.ENOMEM, errno.EAGAIN})


@contextlib.contextmanager
def refuse_os_errors(directory: Path) -> Iterator[None]:
    """Turn errors of the operating system at start into Refused (BAD_CONFIG).

    directory: the runtime directory, the only place where the daemon makes files.
    """
    try:
        yield
    except (OSError, zmq.ZMQError) as error:
        if error.errno in NO_ROOM:
            message = (
                f"cannot create sockets in runtime_dir {directory} ({os.strerror(error.errno)}); "
                "free some space, or set a runtime_dir on another file system"
            )
            raise Refused(Code.BAD_CONFIG, message, str(directory)) from error
        if error.errno in NO_MEMORY:
            raise _no_memory(error) from error
        raise
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "start new thread" not in str(error):
            raise
        raise _no_memory(error) from error


def _no_memory(error: Exception) -> Refused:
    reason = str(error) or type(error).__name__
    message = (
        f"no memory or threads left at start ({reason}); raise LimitAS, LimitNPROC, and the memory "
        "and tasks of the control group, or reduce pool.size"
    )
    return Refused(Code.BAD_CONFIG, message, reason)


def exit_with_error(
    supervisor: Supervisor, what: str, error: KVFerryError, status: int
) -> NoReturn:
    supervisor.status(f"{what}: {error}")
    print(f"kvferryd: {error}", file=sys.stderr)
    sys.exit(status)


# Prefix of the names of the pool's descriptors in the descriptor store.
CHUNK = "pool-"


# Almost no full collections: one that walks a million keys takes 90 ms and finds little garbage.
GC_THRESHOLDS = 10_000, 50, 100_000


# Seconds for which the event loop and the device worker may keep the GIL from each other. Python's
# default is 5 ms: as long as the link takes for 280 MB.
SWITCH_INTERVAL = 1e-4


@dataclass(frozen=True, slots=True)
class RecoveredState:
    """The stored descriptors of an earlier daemon, and where the next daemon finds new ones.

    fds: descriptors to be restored (pool, block tables, tensors), by name. stale_fds: those that
    cannot be used; they are still stored. new_chunks: chunks of a new pool, not stored yet.
    reason: why the pool of the earlier daemon cannot be used; empty if there was none.
    """

    supervisor: Supervisor
    fd_store: FdStore
    fds: Mapping[str, int]
    stale_fds: Mapping[str, int]
    new_chunks: Mapping[str, int]
    reason: str = ""

    def store_new_pool(self) -> None:
        """Free the stale pool and store the new one.

        Called when nothing can fail the start any longer, and before the new pool takes memory: it
        may need the memory of the old one.
        """
        if self.reason:
            log.warning("kept pool dropped; the new pool is empty", reason=self.reason)
        free_chunks(
            chunks_of(self.stale_fds)
        )  # otherwise systemd holds the memory until it closes them
        for name, descriptor in self.stale_fds.items():
            self.supervisor.remove_fd(name)
            os.close(descriptor)
        for name, descriptor in self.new_chunks.items():
            self.fd_store.store_fd(name, descriptor)
        self.supervisor.send_queued()


def chunks_of(kept: Mapping[str, int]) -> list[int]:
    """The descriptors of a pool, in order."""
    return [kept[name] for name in sorted(kept) if name.startswith(CHUNK)]


async def run(
    config: Config,
    engine: CopyEngine,
    pool: HostPool,
    endpoint: Endpoint,
    kept: RecoveredState,
    signals: SignalHandlers,
) -> None:
    metrics = Metrics()
    metrics_server = make_metrics_server(config, metrics)
    stores, loads = config.limits.max_stores, config.limits.max_loads
    limits = Limits(MAX_MESSAGE_BYTES, MAX_BLOCK_IDS, stores + loads, stores, loads)
    identity = DaemonIdentity(
        kvferry_version(), secrets.token_hex(8), os.getpid(), engine.info, limits
    )
    core = Core(
        identity, pool.nbytes, time.monotonic(), HOST_BYTES, max_regions(), metrics.jobs.count_job
    )
    gc.set_threshold(*GC_THRESHOLDS)  # before a million keys are restored
    # Before the socket exists: a client that sees it may send SIGTERM.
    with signals.handled(lambda: server.stop()):
        with refuse_os_errors(config.directory):
            checksums = ChecksumClient(  # first: so its process never has a socket of ours
                pool.descriptors,
                pool.chunk_bytes,
                config.integrity.threads,
                lambda error: server.fail(error),
            )
            publisher = KVEventPublisher(config.events.publish or f"ipc://{endpoint.events}")
            server = Server(core, endpoint, publisher.publish)
            worker = DeviceWorker(engine, pool, server.device_reports, server.fail)
            scrub_rate = parse_bytes(config.integrity.scrub_rate)
            region_store = RegionStore(checksums, kept.fd_store, server.report_to_core, scrub_rate)
            region_store.restore_regions(kept.fds, core.restore_region)
            kept_tensor_store = KeptTensorStore(kept.fd_store)
            for number, memory in kept_tensor_store.restore_tensors(
                kept.fds, core.restore_kept_tensors
            ).items():
                worker.hold_memory(number, memory)
            health = make_health(
                config.health, server, worker, pool.address, signals, endpoint.find_problem
            )
            gc.freeze()
            sys.setswitchinterval(SWITCH_INTERVAL)
            worker.start()
            kept.store_new_pool()
            pool.start_filling(engine, server.pool_grew, server.fail)
            region_store.start()
            log.info(
                "serving",
                device=engine.info.name,
                directory=str(endpoint.directory),
                pool=pool.nbytes - HOST_BYTES,
                numa_node="-" if engine.numa_node is None else engine.numa_node,
                metrics=metrics_server.address if metrics_server else "off",
            )
            signals.set_status(f"serving {engine.info.name} at {endpoint.directory}")
            if metrics_server:
                metrics_server.start(server)
        await server.serve(
            worker, region_store, kept_tensor_store, health, config.stop.drain_seconds
        )
        await publisher.close()
        if metrics_server:
            await asyncio.to_thread(metrics_server.close)
        worker.close()
        region_store.close()
        pool.close(engine)
    log.info("stopped")


def make_pool(
    config: Config, supervisor: Supervisor, *, locked: bool
) -> tuple[HostPool, RecoveredState]:
    """The pool of an earlier daemon with its block tables, or a new pool. Raises Refused.

    Stored descriptors stay stored until `RecoveredState.store_new_pool`, also if the start fails.
    """
    size, chunk = parse_bytes(config.pool.size), parse_bytes(config.pool.chunk)
    fd_store = supervisor if config.pool.keep and supervisor.has_fd_store else NullFdStore()
    kept = supervisor.stored_fds
    chunks, reason = chunks_of(kept), ""
    if chunks and config.pool.keep:
        try:
            pool = HostPool(HOST_BYTES + size, chunk, chunks)
            return pool, RecoveredState(supervisor, fd_store, kept, {}, {})
        except KVFerryError as error:
            if (
                error.code == Code.POOL_TOO_LARGE
            ):  # the stored pool fits the configuration, but cannot be mapped now
                raise
            reason = str(error)
    if config.pool.check_memory:
        check_fits(size, locked=locked, spare=sum(map(used_bytes, chunks)))
    check_descriptors(size, chunk)
    pool = HostPool(HOST_BYTES + size, chunk)
    names = {f"{CHUNK}{number:05}": made for number, made in enumerate(pool.descriptors)}
    return pool, RecoveredState(supervisor, fd_store, {}, kept, names, reason)


# Descriptors of a daemon without pool and clients, plus a few for clients.
DESCRIPTORS = 128


def max_regions() -> int:
    """Regions whose block tables, of two descriptors each, leave some to clients."""
    return min(MAX_REGIONS, max_client_fd() // 4)


def check_descriptors(pool_bytes: int, chunk_bytes: int) -> None:
    """Raise Refused if the descriptor limit is too low for the pool and as many for clients."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * (DESCRIPTORS + -(-pool_bytes // whole_pages(chunk_bytes)))
    if most < needed:
        message = (
            f"the limit of {most} file descriptors is below the {needed} needed; raise LimitNOFILE "
            "or ulimit -n, or set a larger pool.chunk"
        )
        raise Refused(Code.BAD_CONFIG, message, most)


def make_engine(config: Config) -> CopyEngine:
    if config.device.lower() == "cpu":
        return ReferenceEngine(Faults(config.reference.stall, config.reference.fail_every))
    from kvferry.daemon.engine.cuda.engine import CudaEngine, CudaOptions

    staging, chunk = parse_bytes(config.copy.staging), whole_pages(parse_bytes(config.pool.chunk))
    return CudaEngine(config.device, CudaOptions(config.copy.mode, staging, chunk))


class SignalHandlers:
    """SIGTERM and SIGINT stop the server, SIGHUP reloads. Both, and health, go to the supervisor.

    SIGINT stays ignored if it was ignored when the daemon started.
    """

    def __init__(self, supervisor: Supervisor, reload: Callable[[], None]) -> None:
        self._supervisor, self._reload = supervisor, reload
        self._status = ""
        self._ready = False

    @property
    def watchdog_seconds(self) -> float | None:
        return self._supervisor.watchdog_seconds

    def set_status(self, status: str) -> None:
        """Set the text that `systemctl status` shows once the daemon is ready."""
        self._status = status

    def ready(self) -> None:
        self._ready = True
        self._supervisor.ready(self._status)

    def keep_alive(self) -> None:
        self._supervisor.keep_alive()

    def report_unhealthy(self, why: str) -> None:
        self._supervisor.status(f"unhealthy: {why}" if why else self._status)

    @contextlib.contextmanager
    def handled(self, stop: Callable[[], None]) -> Iterator[None]:
        """Handle signals while the context is open; their actions run on the event loop."""
        loop = asyncio.get_running_loop()
        stop = partial(self._end, stop)
        handlers: dict[signal.Signals, Callable[[], None]] = {
            signal.SIGTERM: stop,
            signal.SIGHUP: self._hup,
        }
        # A shell has its background jobs ignore SIGINT: ctrl-c is meant for the job in front.
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            handlers[signal.SIGINT] = stop
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})  # one may have waited
        yield
        for number in handlers:
            loop.remove_signal_handler(number)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the daemon is stopping: nothing to reload

    def _end(self, stop: Callable[[], None]) -> None:
        self._supervisor.stopping()
        stop()

    def _hup(self) -> None:
        if self._ready:
            self._supervisor.reloading()
        self._reload()
        if self._ready:
            self._supervisor.ready(self._status)


def apply_config(endpoint: Endpoint, config: Config) -> None:
    """Apply the keys that can change at run time. If it raises (as `admit`), nothing changed."""
    endpoint.change_group(config.access.group)
    start_logging(config.log)


def make_metrics_server(config: Config, metrics: Metrics) -> MetricsServer | None:
    listen = config.metrics.listen
    if listen == "off":
        return None
    return MetricsServer(listen, metrics, config.health.deadline_seconds)


def make_health(
    config: HealthConfig,
    server: Server,
    worker: DeviceWorker,
    address: int,
    signals: SignalHandlers,
    find_problem: Callable[[], str | None],
) -> Health:
    """address: of the front of the pool, which contains the probe's blocks."""
    timeouts = HealthTimeouts(config.every_seconds, config.deadline_seconds, config.worker_seconds)
    send = server.open_own_session(lambda message: prober.receive_reply(message))
    prober = Probe(send, address)
    return Health(
        timeouts, prober, lambda now: worker.post_command(Ping(now)), signals, find_problem
    )
