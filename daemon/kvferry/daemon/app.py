"""The composition root: reads the configuration, builds the parts and runs the event loop.

Called by __main__ on the main thread. If the operating system refuses something at start (a full
file system, no memory, no threads), the error names the setting to change.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

import structlog
import uvloop

from kvferry.daemon import config_reader
from kvferry.daemon.access.admission import Admission
from kvferry.daemon.access.runtime_directory import Endpoint
from kvferry.daemon.config import Config, HealthConfig, LimitsConfig
from kvferry.daemon.core.actions import OwnRequest, PoolRegistered
from kvferry.daemon.core.core import Core, PoolBounds
from kvferry.daemon.core.identity import DaemonIdentity
from kvferry.daemon.core.ports import Ports
from kvferry.daemon.core.regions import MAX_REGIONS
from kvferry.daemon.core.siblings import NO_SIBLINGS
from kvferry.daemon.core.transfers import MAX_GPU_BLOCKS
from kvferry.daemon.daemon_connection import can_lower_priority
from kvferry.daemon.device.command_queue import Ping
from kvferry.daemon.device.device_worker import DeviceWorker
from kvferry.daemon.device.report_queue import ReportQueue
from kvferry.daemon.engine.base import CopyEngine
from kvferry.daemon.engine.reference import Faults, ReferenceEngine
from kvferry.daemon.flows import Shutdown, running_flows
from kvferry.daemon.logs import start_logging, unfailing
from kvferry.daemon.memory.numa import can_bind
from kvferry.daemon.memory.pool import HostPool, check_fits, whole_pages
from kvferry.daemon.observability.health import Health, HealthTimeouts
from kvferry.daemon.observability.http import MetricsServer
from kvferry.daemon.observability.kv_events import KVEventPublisher
from kvferry.daemon.observability.metrics import Metrics
from kvferry.daemon.observability.probe import HOST_BYTES, Probe
from kvferry.daemon.os_errors import refuse_os_errors
from kvferry.daemon.persistence.checksum_client import ChecksumClient
from kvferry.daemon.persistence.epoch_page import EpochPage, EpochSync, open_epoch_page
from kvferry.daemon.persistence.kept_tensor_store import KeptTensorStore
from kvferry.daemon.persistence.recovery import RecoveredState, chunks_of, recover_pool
from kvferry.daemon.persistence.region_store import RegionStore
from kvferry.daemon.reload import Reload
from kvferry.daemon.siblings.peers import SiblingPeers
from kvferry.daemon.siblings.windows import MappedWindows
from kvferry.daemon.signals import SignalHandlers
from kvferry.daemon.systemd import Supervisor
from kvferry.daemon.thread_count import needed_threads
from kvferry.daemon.tiers.encryption import check_encryption
from kvferry.daemon.tiers.pool_lock import wait_until_unlocked
from kvferry.daemon.tiers.tier_process import PoolFiles
from kvferry.daemon.tiers.tiering import Tiering, description_of, start_tiers
from kvferry.daemon.transport.accept_gate import max_client_fd
from kvferry.daemon.transport.action_owners import ActionOwners, Persistence
from kvferry.daemon.transport.lender import LentPool
from kvferry.daemon.transport.server import Server
from kvferry.daemon.transport.status import StatusAssembler
from kvferry.proto.codec import MAX_MESSAGE_BYTES
from kvferry.proto.errors import Code, KVFerryError, Refused
from kvferry.proto.process import check_threads
from kvferry.proto.sizes import parse_bytes
from kvferry.proto.status import Limits
from kvferry.proto.version import kvferry_version

log = structlog.get_logger()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run until SIGTERM. Exit status: 0 stopped, 1 failed while serving, 2 refused to start."""
    sys.stderr = unfailing(sys.stderr)
    supervisor = Supervisor()
    try:
        _main(supervisor, arguments)
    finally:
        supervisor.send_queued()


def _main(supervisor: Supervisor, arguments: Sequence[str] | None) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # clients and chunks use descriptors
    try:
        config = config_reader.read(arguments)
        start_logging(config.log)
        check_threads(needed_threads(config))
        check_encryption(config.tiers.used)
        supervisor.status(f"opening device {config.device}")
        engine = make_engine(config)
        admission = Admission(config.access.group)
        with refuse_os_errors(config.directory):
            endpoint = Endpoint(config.directory / engine.info.uuid, admission)
    except KVFerryError as error:
        exit_with_error(supervisor, "refused to start", error, 2)
    with contextlib.closing(endpoint):
        try:
            epochs = open_epoch_page(config.state_directory)
            with refuse_os_errors(config.directory):
                pool, kept = make_pool(config, supervisor)
        except KVFerryError as error:
            exit_with_error(supervisor, "refused to start", error, 2)
        try:
            signals = SignalHandlers(
                supervisor, Reload(arguments, config, partial(apply_config, endpoint))
            )
            uvloop.run(run(config, engine, endpoint, HostState(pool, kept, epochs), signals))
        except Refused as error:  # an error before it serves
            exit_with_error(supervisor, "refused to start", error, 2)
        except KVFerryError as error:
            exit_with_error(supervisor, "failed", error, 1)


def exit_with_error(
    supervisor: Supervisor, what: str, error: KVFerryError, status: int
) -> NoReturn:
    supervisor.status(f"{what}: {error}")
    print(f"kvferryd: {error}", file=sys.stderr)
    sys.exit(status)


# Almost no full collections: with a million keys one takes 90 ms and finds little garbage.
GC_THRESHOLDS = 10_000, 50, 100_000


# Seconds for which one thread may hold the GIL while the event loop or the device worker waits for
# it. The default of Python is 5 ms, in which the link transfers 280 MB.
SWITCH_INTERVAL = 1e-4


@dataclass(frozen=True, slots=True)
class HostState:
    """What earlier daemons may have left. epochs: those of this host."""

    pool: HostPool
    kept: RecoveredState
    epochs: EpochPage


async def run(
    config: Config,
    engine: CopyEngine,
    endpoint: Endpoint,
    state: HostState,
    signals: SignalHandlers,
) -> None:
    pool, kept, epochs = state.pool, state.kept, state.epochs
    log_denied_calls(engine.numa_node)
    gc.set_threshold(*GC_THRESHOLDS)  # before a million keys are restored
    shutdown, reports, metrics = Shutdown(), ReportQueue(), Metrics()
    tier_configs, windows = config.tiers.used, None
    if config.siblings.enabled:
        windows = MappedWindows(engine, pool, store_all=config.siblings.store_all)
    core = Core(
        identity_of(engine, config.limits),
        PoolBounds(pool.nbytes, HOST_BYTES, max_regions()),
        Ports(epochs, tuple(map(description_of, tier_configs)), windows or NO_SIBLINGS),
        metrics.jobs.count_job,
    )
    # Before the socket exists: a user who sees it may send SIGTERM.
    with signals.handled(shutdown.stop, config.stop.with_process):
        with refuse_os_errors(config.directory):
            # First the processes: they must not inherit the sockets.
            checksums = ChecksumClient(pool.descriptors, pool.chunk_bytes, config.integrity.threads)
            pool_files = PoolFiles(pool.descriptors, pool.chunk_bytes, pool.nbytes)
            tiers = start_tiers(
                tier_configs,
                pool_files,
                core.writes,
                reports.put_reports,
            )
            publisher = KVEventPublisher(config.events.publish or f"ipc://{endpoint.events}")
            worker = DeviceWorker(engine, pool, reports.put_reports, shutdown.fail)
            scrub_rate = parse_bytes(config.integrity.scrub_rate)
            region_store = RegionStore(
                checksums,
                kept.fd_store,
                reports.put_reports,
                scrub_rate,
                kept.incarnation.number,
                lends=windows is not None,
            )
            peers = make_peers(config, endpoint.directory, core, windows, epochs.identity)
            kept_tensor_store = KeptTensorStore(kept.fd_store)
            epoch_sync = EpochSync(epochs, reports.put_reports)
            tiering = Tiering(
                tiers,
                core.writes,
                reports.put_reports,
                metrics.jobs.observe_promotion,
                core.resets.epochs_in_use,
            )
            probe = Probe(lambda message: reports.put_reports((OwnRequest(message),)), pool.address)
            health = Health(
                timeouts_of(config.health),
                probe,
                lambda now: worker.post_command(Ping(now)),
                signals,
                lambda: endpoint.find_problem() or epochs.find_problem(),
            )
            status = StatusAssembler(core, health, region_store, tiering, peers)
            metrics_server = make_metrics_server(config, metrics, status)
            owners = ActionOwners(
                worker,
                Persistence(region_store, kept_tensor_store, epoch_sync),
                tiering,
                publisher.publish,
                probe.receive_reply,
                peers,
            )
            lent = LentPool(
                pool.descriptors,
                pool.chunk_bytes,
                kept.incarnation.descriptor,
                kept.is_kept,
                epochs.identity,
                table_of=region_store.descriptor_of,
            )
            server = Server(core, endpoint, reports, owners, status, lent)
            region_store.restore_regions(kept.fds, core.restore_region)
            tensors = kept_tensor_store.restore_tensors(kept.fds, core.restore_kept_tensors)
            for number, memory in tensors.items():
                worker.hold_memory(number, memory)
            gc.freeze()
            sys.setswitchinterval(SWITCH_INTERVAL)
            worker.start()
            kept.store_new_pool()
            pool.start_filling(
                engine,
                lambda nbytes: reports.put_reports((PoolRegistered(nbytes),)),
                shutdown.fail,
            )
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
                metrics_server.start()
        flows = [server.run, region_store.run, tiering.run, *([peers.run] if peers else [])]
        async with running_flows(shutdown.fail, *flows):
            probe.allocate_memory()  # before any client can
            server.start()
            async with running_flows(shutdown.fail, health.run):
                await shutdown.until_requested()
            if shutdown.error is None:
                await server.drain(config.stop.drain_seconds)
            await server.close()
            if shutdown.error is not None:
                raise shutdown.error
        await publisher.close()
        if metrics_server:
            await asyncio.to_thread(metrics_server.close)
        worker.close()
        region_store.close()
        pool.close(engine)
    log.info("stopped")


def identity_of(engine: CopyEngine, limits: LimitsConfig) -> DaemonIdentity:
    stores, loads = limits.max_stores, limits.max_loads
    return DaemonIdentity(
        kvferry_version(),
        secrets.token_hex(8),
        os.getpid(),
        engine.info,
        Limits(MAX_MESSAGE_BYTES, MAX_GPU_BLOCKS, stores + loads, stores, loads),
        time.monotonic(),
    )


def make_peers(
    config: Config, own: Path, core: Core, windows: MappedWindows | None, identity: bytes
) -> SiblingPeers | None:
    """The sessions at siblings; None if they are off.

    own: the daemon's directory. identity: of the file with the epochs.
    """
    if windows is None:
        return None
    further = map(Path, filter(None, config.siblings.directories.split(":")))
    return SiblingPeers(own, (config.directory, *further), windows, core.used_contents, identity)


def log_denied_calls(numa_node: int | None) -> None:
    """Log the system calls that a seccomp profile denies and that the daemon can do without."""
    if not can_lower_priority():
        effect = "the checksum and tier processes have the daemon's priority"
        log.warning("system call denied; allow it in seccomp", call="setpriority", effect=effect)
    if numa_node is not None and not can_bind():
        effect = "the pool may be on another NUMA node than the GPU"
        log.warning(
            "system call denied; allow it in seccomp", call="sched_setaffinity", effect=effect
        )


def make_pool(config: Config, supervisor: Supervisor) -> tuple[HostPool, RecoveredState]:
    """The pool of an earlier daemon, or a new one (persistence/recovery.py). Raises Refused."""
    size, chunk = parse_bytes(config.pool.size), parse_bytes(config.pool.chunk)

    def check_new_pool(spare: int) -> None:
        if config.pool.check_memory:
            check_fits(size, spare=spare)
        check_descriptors(size, chunk)

    unusable, chunks = "", chunks_of(supervisor.stored_fds)
    if chunks and not wait_until_unlocked(chunks[0], TIER_END_SECONDS):
        unusable = "the process of a tier may still write into it"
    return recover_pool(
        supervisor,
        HOST_BYTES + size,
        chunk,
        keep=config.pool.keep,
        check_new_pool=check_new_pool,
        unusable=unusable,
    )


# Seconds for the tier process of a killed daemon to end. The kernel kills it with the daemon, but
# it ends only after its reads and writes in flight.
TIER_END_SECONDS = 5.0


# Descriptors that a daemon uses without pool and clients, plus some for clients.
DESCRIPTORS = 128


def max_regions() -> int:
    """The number of regions whose block tables, of two descriptors each, leave some to clients."""
    return min(MAX_REGIONS, max_client_fd() // 4)


def check_descriptors(pool_bytes: int, chunk_bytes: int) -> None:
    """Raise Refused if the descriptor limit is below twice what the daemon and its pool need."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * (DESCRIPTORS + -(-pool_bytes // whole_pages(chunk_bytes)))
    if limit < needed:
        message = (
            f"the limit of {limit} file descriptors is below the {needed} needed; raise "
            "LimitNOFILE or ulimit -n, or set a larger pool.chunk"
        )
        raise Refused(Code.BAD_CONFIG, message, limit)


def make_engine(config: Config) -> CopyEngine:
    if config.device.lower() == "cpu":
        return ReferenceEngine(Faults(config.reference.stall, config.reference.fail_every))
    from kvferry.daemon.engine.cuda.cuda_engine import CudaEngine, CudaOptions

    staging, chunk = parse_bytes(config.copy.staging), whole_pages(parse_bytes(config.pool.chunk))
    return CudaEngine(config.device, CudaOptions(config.copy.mode, staging, chunk))


def apply_config(endpoint: Endpoint, config: Config) -> None:
    """Apply the keys that can change at run time. If it raises, nothing has changed."""
    endpoint.change_group(config.access.group)
    start_logging(config.log)


def make_metrics_server(
    config: Config, metrics: Metrics, status: StatusAssembler
) -> MetricsServer | None:
    listen = config.metrics.listen
    if listen == "off":
        return None
    return MetricsServer(listen, metrics, status, config.health.deadline_seconds)


def timeouts_of(config: HealthConfig) -> HealthTimeouts:
    return HealthTimeouts(config.every_seconds, config.deadline_seconds, config.worker_seconds)
