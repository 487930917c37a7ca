"""Checks of the daemon: its directory, access, versions, device, pool, and a round trip."""

from __future__ import annotations

import grp
import os
import pwd
import socket
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from kvferry.client.arrays import torch_if_installed
from kvferry.client.blocking import OffloadClient
from kvferry.client.doctor.check import CheckContext, Finding, fail, ok, warn
from kvferry.client.endpoint import daemon_pid, find_daemons, runtime_directories
from kvferry.cuda.driver import driver
from kvferry.proto.errors import OTHER_BUILD, Code, KVFerryError, Refused
from kvferry.proto.protocol import format_protocol, protocol_number
from kvferry.proto.specs import (
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    KVLayout,
    TensorLayout,
    TensorRef,
)
from kvferry.proto.version import kvferry_version

ENGINE = "kvferry-doctor"
PAGE = 4096
# Device nodes of NVIDIA's driver that each process with a GPU needs, besides that of the GPU.
DEVICE_NODES = "/dev/nvidiactl", "/dev/nvidia-uvm"
# Seconds after its start by which a daemon should have registered its pool.
POOL_READY_SECONDS = 120.0
# The share of blocks that may fail to be packed.
MAX_UNPACKABLE = 0.01


# Runtime directory and sockets


def directory(context: CheckContext) -> Iterator[Finding]:
    directories = runtime_directories() if context.search_in is None else [context.search_in]
    found, inaccessible = find_daemons(directories)
    searched = ", ".join(map(str, directories))
    if found:
        context.directory = found[0]
        yield ok("directory", str(found[0]))
    elif not inaccessible:
        change = f"{_start_command(directories[0])}, or name its runtime directory with --directory"
        yield fail("directory", f"no daemon's sockets in {searched}", change)
    for path in inaccessible if not found else ():
        # Of the directories above, the first that this user may not search denies access.
        denying = next(
            (each for each in reversed(path.parents) if not os.access(each, os.X_OK)), path
        )
        yield fail(
            "directory",
            f"{denying}: permission denied, {_describe_owner(denying)}",
            _access_advice(denying),
        )


def _start_command(directory: Path) -> str:
    """The command that starts a daemon for the device after which a directory is named."""
    if directory.name == "cpu":
        return "kvferryd --device cpu"
    device = directory.name if directory.name.startswith("GPU-") else "0"
    return f"kvferryd --device {device} --pool-size 64GiB"


def _describe_owner(path: Path) -> str:
    status = path.stat()
    owner = f"{_user(status.st_uid)}:{_group(status.st_gid)}"
    return f"owned by {owner}, mode {stat.S_IMODE(status.st_mode):o}"


def _access_advice(path: Path) -> str:
    """The rule that gives this user access."""
    status = path.stat()
    owner, me = _user(status.st_uid), _user(os.geteuid())
    if status.st_mode & stat.S_IXGRP:
        return f"usermod -aG {_group(status.st_gid)} {me}, and log in again"
    return f"run the engine as {owner}, or the daemon as {me}"


def _user(uid: int) -> str:
    with suppress(KeyError):
        return pwd.getpwuid(uid).pw_name
    return str(uid)


def _group(gid: int) -> str:
    with suppress(KeyError):
        return grp.getgrgid(gid).gr_name
    return str(gid)


def sockets(context: CheckContext) -> Iterator[Finding]:
    if context.directory is None:
        return
    for name in ("kvferry.sock", "fds.sock"):
        path = context.directory / name
        kind = socket.SOCK_STREAM if name == "kvferry.sock" else socket.SOCK_SEQPACKET
        try:
            with socket.socket(socket.AF_UNIX, kind) as probe:
                probe.settimeout(context.timeout)
                probe.connect(str(path))
        except PermissionError:
            yield fail(
                "sockets",
                f"{path}: permission denied, {_describe_owner(path)}",
                _access_advice(path),
            )
        except (ConnectionRefusedError, FileNotFoundError):
            found = f"no process listens at {path}"
            yield fail("sockets", found, _start_command(context.directory))
        except OSError as error:  # its queue of connections is full
            yield fail(
                "sockets", f"{path}: {error}", _restart_advice(daemon_pid(context.directory))
            )
        else:
            continue
        context.directory = None
        return
    yield ok("sockets", "both accept connections")


# Access


def connection(context: CheckContext) -> Iterator[Finding]:
    if context.directory is None:
        return
    try:
        context.client = OffloadClient(
            context.directory,
            engine=ENGINE,
            client="kvferry doctor",
            timeout=context.timeout,
            reconnect=False,
        )
    except KVFerryError as error:
        found = str(error)
        if error.code in OTHER_BUILD:
            ours = f"{kvferry_version()}, protocol {format_protocol(protocol_number())}"
            found += f"; this client is kvferry {ours}"
        yield fail("connection", found, _advice(error, context.directory))
    else:
        daemon = context.client.daemon
        yield ok("connection", f"kvferryd {daemon.version} (pid {daemon.pid}) accepts this user")


def _advice(error: KVFerryError, directory: Path) -> str:
    match error.code:
        case Code.TIMEOUT:
            return _restart_advice(daemon_pid(directory))
        case code if code in OTHER_BUILD:
            return "install the same build of kvferry on both sides, and restart both"
        case Code.FORBIDDEN:
            return "name a group of this user as access.group in the daemon's configuration"
        case Code.SHUTTING_DOWN:
            return f"start the daemon again: {_start_command(directory)}"
    return "see the daemon's log"


def _restart_advice(pid: int | None) -> str:
    with suppress(OSError, AttributeError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state == "T":
            return f"continue the stopped process: kill -CONT {pid}"
    process = "the daemon" if pid is None else f"process {pid}"
    return f"see the log of {process}, and restart it"


def version(context: CheckContext) -> Iterator[Finding]:
    if context.client is None:
        return
    daemon, ours = context.client.daemon, kvferry_version()
    protocol = format_protocol(daemon.protocol)  # of both, or the daemon would have refused it
    if daemon.version != ours:
        found = f"the daemon has {daemon.version}, this client {ours}; both use protocol {protocol}"
        yield warn("version", found, "install the same version on both sides")
    else:
        yield ok("version", f"{daemon.version} on both sides, protocol {protocol}")


def refused(context: CheckContext) -> Iterator[Finding]:
    """Engines that run without offloading, because the daemon has refused them."""
    engines = {} if context.status is None else context.status.refused_engines
    for engine, error in engines.items():
        found = f"the daemon has refused engine {engine!r}: [{error.code}] {error.message}"
        change = "change what the message says; the engine tries again by itself, if it still runs"
        yield warn("refused", found, change)


def status(context: CheckContext) -> Iterator[Finding]:
    if context.client is None:
        return
    began = time.monotonic()
    try:
        context.status = context.client.status(timeout=context.timeout)
    except KVFerryError as error:
        yield fail("status", f"no status: {error}", _advice(error, context.client.directory))
    else:
        took = (time.monotonic() - began) * 1e3
        errors = ", ".join(f"{code} x{n}" for code, n in sorted(context.status.errors.items()))
        yield ok("status", f"status in {took:.1f} ms; errors so far: {errors or 'none'}")


# The parts of the daemon


def processes(context: CheckContext) -> Iterator[Finding]:
    """Whether this process sees the daemon's process. CUDA IPC needs that."""
    if context.client is None:
        return
    pid = context.client.daemon.pid
    inside = next((p for p in ("/.dockerenv", "/run/.containerenv") if Path(p).exists()), None)
    path = context.client.directory / "fds.sock"
    try:
        listening = _listening_process(path, context.timeout)
    except OSError as error:  # its queue of connections is full
        yield warn("processes", f"{path}: {error}", _restart_advice(pid))
        return
    if listening == pid:
        where = f"; this is a container ({inside})" if inside else ""
        yield ok("processes", f"this process and the daemon (pid {pid}) see each other{where}")
    else:
        yield warn(
            "processes",
            f"the daemon's pid {pid} is not visible here, so CUDA IPC cannot share tensors",
            "vLLM 0.31 and newer do not need it; else share tensors of allocate_kv_caches, or "
            "start both containers with --pid=host --ipc=host",
        )


def _listening_process(path: Path, timeout: float) -> int:
    """The pid that the process at this socket has in this PID namespace; 0 if it is in another one.

    Raises OSError if the socket accepts no connection: with a timeout, Linux does not wait if its
    queue is full.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as channel:
        channel.settimeout(timeout)
        channel.connect(str(path))
        credentials = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        return int.from_bytes(credentials[:4], sys.byteorder)


def device(context: CheckContext) -> Iterator[Finding]:
    if context.client is None:
        return
    gpu = context.client.daemon.device
    if gpu.kind == "cpu":
        yield ok("device", "the daemon uses no GPU, but shared memory (for trials)")
        return
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    setting = "CUDA_VISIBLE_DEVICES is not set" if mask is None else f"CUDA_VISIBLE_DEVICES={mask}"
    try:
        visible = [driver().device_uuid(n) for n in range(driver().device_count())]
    except Refused as error:
        change = "run where the GPU is: docker run --gpus all (a scheduler needs no GPU)"
        absent = [node for node in DEVICE_NODES if not os.access(node, os.R_OK | os.W_OK)]
        nodes = f"; not accessible here: {', '.join(absent)}" if absent else ""
        yield fail("device", f"{error}; {setting}{nodes}", change)
        return
    if gpu.uuid in visible:
        yield ok("device", f"{gpu.name} ({gpu.uuid}) is visible here")
    else:
        here = ", ".join(visible) or "none"
        change = f"CUDA_VISIBLE_DEVICES={gpu.uuid}, or connect to the daemon of a visible GPU"
        yield fail("device", f"the daemon uses {gpu.uuid}; visible here: {here}; {setting}", change)


def corrupt_blocks(context: CheckContext) -> Iterator[Finding]:
    for story in () if context.status is None else context.status.corrupt:
        change = "check the host's memory (dmesg, EDAC counters); the block is a miss since then"
        yield fail("corrupt blocks", f"a block does not match its checksum. {story}", change)


def unpackable_blocks(context: CheckContext) -> Iterator[Finding]:
    """Namespaces whose KV does not pack well: blocks that were not stored end prefixes early."""
    if context.client is None or context.status is None:
        return
    for namespace in context.client.namespaces(timeout=context.timeout):
        lost, stored = namespace.stores_unpackable, namespace.stored
        if lost > MAX_UNPACKABLE * (stored + lost):
            found = (
                f"{lost} of {stored + lost} blocks of {namespace.fingerprint.model} were not "
                "stored, because their values are too far apart"
            )
            yield warn("packing", found, 'start the engine with "kvferry_pack": "off"')


def pool(context: CheckContext) -> Iterator[Finding]:
    if context.status is None:
        return
    pool, status = context.status.pool, context.status
    mib = 1 << 20
    registering = pool.pinned_bytes < pool.size_bytes
    progress = f" ({100 * pool.pinned_bytes // pool.size_bytes}%, being registered)"
    found = (
        f"{pool.size_bytes // mib} MiB, {pool.pinned_bytes // mib} MiB registered"
        f"{progress if registering else ''}, {pool.reserved_bytes // mib} MiB reserved"
    )
    if registering and status.uptime_seconds > POOL_READY_SECONDS:
        waiting = f"{found}, {status.uptime_seconds:.0f} s after its start"
        yield warn("pool", waiting, "see the daemon's log, or set a smaller pool.size")
    else:
        yield ok("pool", found)


def round_trip(context: CheckContext) -> Iterator[Finding]:
    """Store and load one page of a tensor that the daemon allocates; uses one page of its pool,
    which is freed when the client disconnects."""
    if context.client is None or context.status is None:
        return
    if context.status.pool.size_bytes - context.status.pool.reserved_bytes < PAGE:
        found = "skipped: the pool is full"
        yield warn("round trip", found, "run it again when the pool has room")
        return
    on_gpu = context.status.device.kind == "cuda"
    torch = torch_if_installed()
    if on_gpu and torch is None:
        yield warn("round trip", "skipped: torch is not installed", "pip install torch")
        return
    layout = KVLayout((TensorLayout(2, PAGE, PAGE),), ((TensorRef(0, PAGE),),))
    try:
        tensor: Any = context.client.allocate_kv_caches(layout, host_bytes=PAGE).tensors[0]
        context.client.release_kv_caches(host_memory=True)  # when this client disconnects
        sent = np.arange(PAGE).astype(np.int8)
        tensor[0], tensor[1] = sent if torch is None else torch.from_numpy(sent), 0
        if on_gpu and torch is not None:
            torch.cuda.synchronize(tensor.device)
        context.client.transfer_async(1, (GPULoadStoreSpec([0]), CPULoadStoreSpec([0])))
        context.client.transfer_async(2, (CPULoadStoreSpec([0]), GPULoadStoreSpec([1])))
        context.client.wait([1, 2])
    except KVFerryError as error:
        pool = context.status.pool
        if error.code == Code.TIMEOUT and pool.pinned_bytes < pool.size_bytes:
            found = f"not complete: the page waits for the pool to be registered ({error})"
            yield warn("round trip", found, "run it again when all of the pool is registered")
        else:
            yield fail("round trip", str(error), _advice(error, context.client.directory))
        return
    results = context.client.get_finished()
    if failed := [result for result in results if not result.success]:
        yield fail("round trip", str(failed[0].error), "see the daemon's log")
    elif tensor[1].tolist() != sent.tolist():
        yield fail(
            "round trip", "the loaded bytes differ from the stored ones", "report this as a bug"
        )
    else:
        spent = sum(result.transfer_time for result in results)
        yield ok(
            "round trip", f"{PAGE} bytes stored and loaded, {spent * 1e6:.0f} us on the device"
        )
