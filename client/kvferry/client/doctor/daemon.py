"""Checks of the daemon: where it is, whether it accepts this user, what it offers."""

from __future__ import annotations

import grp
import os
import pwd
import re
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from kvferry.client.blocking import OffloadClient
from kvferry.client.doctor.case import Case, Finding, fail, ok, warn
from kvferry.client.endpoint import look_for, runtime_directories
from kvferry.cuda.driver import driver
from kvferry.proto.errors import Code, KVFerryError, Refused
from kvferry.proto.messages import PROTOCOL
from kvferry.proto.specs import (
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    KVLayout,
    TensorLayout,
    TensorRef,
)
from kvferry.proto.version import installed_version

ENGINE = "kvferry-doctor"
PAGE = 4096
# Seconds after its start by which a daemon should have registered its pool.
SETTLED = 120.0


# Where it is


def folder(case: Case) -> Iterator[Finding]:
    places = runtime_directories() if case.asked is None else [case.asked]
    found, closed = look_for(places)
    seen = ", ".join(map(str, places))
    if len(found) == 1:
        case.directory = found[0]
        yield ok("folder", str(found[0]))
    elif found:
        which = ", ".join(map(str, found))
        change = f"kvferry doctor -d {found[0]}; OffloadClient({str(found[0])!r})"
        yield fail("folder", f"several daemons run: {which}", change)
    elif not closed:
        change = f"{_start(places[0])}, or name its folder with --directory"
        yield fail("folder", f"no daemon's sockets in {seen}", change)
    for path in closed:
        if not found:
            yield fail("folder", f"{path}: permission denied, {_owned(path)}", _entry(path))


def _start(directory: Path) -> str:
    """A daemon for the device that a folder is named by."""
    if directory.name == "cpu":
        return "kvferryd --device cpu"
    device = directory.name if directory.name.startswith("GPU-") else "0"
    return f"kvferryd --device {device} --pool-size 64GiB"


def _owned(path: Path) -> str:
    about = path.stat()
    return f"of {_user(about.st_uid)}:{_group(about.st_gid)}, mode {stat.S_IMODE(about.st_mode):o}"


def _entry(path: Path) -> str:
    """How this user gets in."""
    about = path.stat()
    owner, me = _user(about.st_uid), _user(os.geteuid())
    if about.st_mode & stat.S_IXGRP:
        return f"join its group: usermod -aG {_group(about.st_gid)} {me}, and log in again"
    return f"run the engine as {owner}, or the daemon as {me}"


def _user(uid: int) -> str:
    with suppress(KeyError):
        return pwd.getpwuid(uid).pw_name
    return str(uid)


def _group(gid: int) -> str:
    with suppress(KeyError):
        return grp.getgrgid(gid).gr_name
    return str(gid)


def listening(case: Case) -> Iterator[Finding]:
    if case.directory is None:
        return
    for name in ("kvferry.sock", "fds.sock"):
        path = case.directory / name
        kind = socket.SOCK_STREAM if name == "kvferry.sock" else socket.SOCK_SEQPACKET
        try:
            with socket.socket(socket.AF_UNIX, kind) as probe:
                probe.settimeout(case.timeout)
                probe.connect(str(path))
        except PermissionError:
            yield fail("sockets", f"{path}: permission denied, {_owned(path)}", _entry(path))
        except (ConnectionRefusedError, FileNotFoundError):
            found = f"no process listens at {path}"
            yield fail("sockets", found, _start(case.directory))
        except OSError as error:  # too many wait already
            yield fail("sockets", f"{path}: {error}", _revive(_holder(case.directory)))
        else:
            continue
        case.directory = None
        return
    yield ok("sockets", "both accept connections")


# Access


def greeting(case: Case) -> Iterator[Finding]:
    if case.directory is None:
        return
    try:
        case.client = OffloadClient(
            case.directory,
            engine=ENGINE,
            client="kvferry doctor",
            timeout=case.timeout,
            reconnect=False,
        )
    except KVFerryError as error:
        yield fail("greeting", str(error), _change(error, case.directory))
    else:
        daemon = case.client.daemon
        yield ok("greeting", f"kvferryd {daemon.version} (pid {daemon.pid}) accepts this user")


def _change(error: KVFerryError, directory: Path) -> str:
    match error.code:
        case Code.TIMEOUT:
            return _revive(_holder(directory))
        case Code.PROTOCOL_VERSION | Code.BAD_MESSAGE:
            return "install the same version of kvferry on both sides, and restart both"
        case Code.FORBIDDEN if "access.group" in error.message:
            return "name a group of this user as access.group in the daemon's configuration"
        case Code.FORBIDDEN:
            return "one PID namespace for both: docker run --pid=host"
        case Code.SHUTTING_DOWN:
            return f"start the daemon again: {_start(directory)}"
    return "see the daemon's log"


def _holder(directory: Path) -> int | None:
    """The process that holds the folder, as it says itself."""
    try:
        return int((directory / "lock").read_text())
    except (OSError, ValueError):
        return None


def _revive(pid: int | None) -> str:
    with suppress(OSError, AttributeError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state == "T":
            return f"continue the stopped process: kill -CONT {pid}"
    return f"see its log (pid {pid}) and restart it"


def version(case: Case) -> Iterator[Finding]:
    if case.client is None:
        return
    theirs, ours = case.client.daemon, installed_version("kvferry")
    if theirs.protocol != PROTOCOL:
        age = "newer" if theirs.protocol > PROTOCOL else "older"
        yield fail(
            "version",
            f"the daemon is {age}: protocol {theirs.protocol}, this client {PROTOCOL}",
            f"pip install . here, in a checkout of kvferry {theirs.version}, or upgrade the daemon",
        )
        case.close()
        case.client = None
    elif ours is not None and theirs.version != ours:
        found = f"the daemon has {theirs.version}, this client {ours}; both speak {PROTOCOL}"
        yield warn("version", found, "install the same version on both sides")
    else:
        yield ok("version", f"{theirs.version} on both sides, protocol {PROTOCOL}")


def answering(case: Case) -> Iterator[Finding]:
    if case.client is None:
        return
    began = time.monotonic()
    try:
        case.status = case.client.status(timeout=case.timeout)
    except KVFerryError as error:
        yield fail("answers", f"no status: {error}", _change(error, case.client.directory))
    else:
        took = (time.monotonic() - began) * 1e3
        errors = ", ".join(f"{code} x{n}" for code, n in sorted(case.status.errors.items()))
        yield ok("answers", f"status in {took:.1f} ms; errors so far: {errors or 'none'}")


# What it offers


def processes(case: Case) -> Iterator[Finding]:
    """It admitted us, so it sees this process; what a container needs besides is a hint."""
    if case.client is None:
        return
    pid = case.client.daemon.pid
    inside = next((p for p in ("/.dockerenv", "/run/.containerenv") if Path(p).exists()), None)
    if _holder(case.client.directory) == pid and Path(f"/proc/{pid}").exists():
        where = f"; this is a container ({inside})" if inside else ""
        yield ok("processes", f"this process and the daemon (pid {pid}) see each other{where}")
    else:
        yield warn(
            "processes",
            f"the daemon sees this process, but its pid {pid} is not visible here",
            "if sharing tensors fails: --pid=host --ipc=host for the engine's container",
        )


def device(case: Case) -> Iterator[Finding]:
    if case.client is None:
        return
    theirs = case.client.daemon.device
    if theirs.kind == "cpu":
        yield ok("device", "the daemon uses shared memory, no GPU (for trials)")
        return
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    setting = "CUDA_VISIBLE_DEVICES is not set" if mask is None else f"CUDA_VISIBLE_DEVICES={mask}"
    try:
        visible = [driver().device_uuid(n) for n in range(driver().device_count())]
    except Refused as error:
        change = "run where the GPU is: docker run --gpus all (a scheduler needs no GPU)"
        yield fail("device", f"{error}; {setting}", change)
        return
    if theirs.uuid in visible:
        yield ok("device", f"{theirs.name} ({theirs.uuid}) is visible here")
    else:
        here = ", ".join(visible) or "none"
        change = f"CUDA_VISIBLE_DEVICES={theirs.uuid}, or connect to the daemon of a visible GPU"
        yield fail(
            "device", f"the daemon uses {theirs.uuid}; visible here: {here}; {setting}", change
        )


def pool(case: Case) -> Iterator[Finding]:
    if case.status is None:
        return
    pool, status = case.status.pool, case.status
    mib = 1 << 20
    found = (
        f"{pool.size_bytes // mib} MiB, {pool.pinned_bytes // mib} MiB registered, "
        f"{pool.reserved_bytes // mib} MiB reserved"
    )
    if pool.pinned_bytes < pool.size_bytes and status.uptime_seconds > SETTLED:
        limit = _memlock(status.pid)
        change = "ulimit -l unlimited for the daemon (LimitMEMLOCK=infinity), or a smaller pool"
        said = "" if limit is None else f"; its limit of locked memory: {limit}"
        yield warn("pool", f"{found}, {status.uptime_seconds:.0f} s after its start{said}", change)
    else:
        yield ok("pool", found)


def _memlock(pid: int) -> str | None:
    with suppress(OSError):
        limits = Path(f"/proc/{pid}/limits").read_text()
        if line := re.search(r"^Max locked memory\s+(\S+)", limits, re.MULTILINE):
            return line[1]
    return None


def round_trip(case: Case) -> Iterator[Finding]:
    """A page there and back, through memory of the daemon's. It takes a page of the pool."""
    if case.client is None or case.status is None:
        return
    if case.status.pool.size_bytes - case.status.pool.reserved_bytes < PAGE:
        found = "skipped: the pool is full"
        yield warn("round trip", found, "run it again when the pool has room")
        return
    try:
        import torch
    except ModuleNotFoundError:
        yield warn("round trip", "skipped: torch is not installed", "pip install torch")
        return
    layout = KVLayout((TensorLayout(2, PAGE, PAGE),), ((TensorRef(0, PAGE),),))
    try:
        (tensor,) = case.client.allocate_kv_caches(layout, host_bytes=PAGE).tensors
        sent = torch.arange(PAGE, dtype=torch.int64).to(torch.int8)
        tensor[0], tensor[1] = sent.to(tensor.device), 0
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)
        case.client.transfer_async(1, (GPULoadStoreSpec([0]), CPULoadStoreSpec([0])))
        case.client.transfer_async(2, (CPULoadStoreSpec([0]), GPULoadStoreSpec([1])))
        case.client.wait([1, 2])
    except KVFerryError as error:
        yield fail("round trip", str(error), _change(error, case.client.directory))
        return
    results = case.client.get_finished()
    if failed := [result for result in results if not result.success]:
        yield fail("round trip", str(failed[0].error), "see the daemon's log")
    elif not torch.equal(tensor[1].cpu(), sent):
        yield fail("round trip", "the bytes that came back differ", "report this as a bug")
    else:
        spent = sum(result.transfer_time for result in results)
        yield ok(
            "round trip", f"{PAGE} bytes stored and loaded, {spent * 1e6:.0f} us on the device"
        )
