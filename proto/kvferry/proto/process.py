"""Checks of the calling process: standard streams, address space, threads, and system calls.

Called by kvferryd and kvferry before they import libraries that abort instead of raising (OpenBLAS
and libzmq do so when they cannot start a thread), and by the daemon before it maps memory. Imports
the standard library and the errors only.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from kvferry.proto.errors import Code, Refused

# Bytes that are left for everything but mappings: stacks, the allocator's arenas, libraries.
SPARE_ADDRESS_SPACE = 1 << 30
# Address space of an x86-64 process without five-level paging.
_MAX_ADDRESS_SPACE = 1 << 47
# Of a thread that waits for a semaphore. No machine has a larger minimum.
_STACK_BYTES = 256 << 10
# The first kernel with all system calls that the daemon cannot do without.
MIN_KERNEL = "5.3"


def open_standard_streams() -> None:
    """Open closed standard descriptors as /dev/null.

    Otherwise the next opened file gets such a number, and output of libraries to stderr would be
    written into that file.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def check_address_space(needed: int, what: str, code: Code = Code.BAD_CONFIG) -> None:
    """Raise Refused if this process cannot map `needed` more bytes.

    The soft limit is raised as far as the hard one allows. what: what needs them, for the message.
    """
    _, limit = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    left = address_space_left()
    if needed > left:
        raise Refused(
            code,
            f"{what} needs {needed} bytes of address space, but {max(0, left)} of "
            f"{_limit()} are left; raise LimitAS of the unit, or ulimit -v",
            needed,
        )


def address_space_left() -> int:
    """Bytes that this process can still map. Negative if its limit was lowered below its size."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return _limit() - pages * resource.getpagesize()


def _limit() -> int:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return _MAX_ADDRESS_SPACE if limit == resource.RLIM_INFINITY else min(limit, _MAX_ADDRESS_SPACE)


def check_threads(needed: int) -> None:
    """Raise Refused (BAD_CONFIG) if this user or control group cannot have `needed` more threads.

    Without them the daemon would start, and fail later. Nothing says how many are left: the limit
    of a user also counts processes that this one cannot see.
    """
    left = count_startable_threads(needed)
    if left < needed:
        message = (
            f"{left} threads can be started, but {needed} are needed; raise LimitNPROC and "
            "TasksMax of the unit (ulimit -u, or the pids limit of the container)"
        )
        raise Refused(Code.BAD_CONFIG, message, left)


def count_startable_threads(most: int) -> int:
    """How many threads the kernel allows to start, up to `most`. They end at once.

    They execute no Python and allocate nothing: each thread that does takes 64 MiB of addresses.
    """
    libc = ctypes.CDLL(None)
    semaphore, attributes = ctypes.create_string_buffer(64), ctypes.create_string_buffer(128)
    libc.sem_init(semaphore, 0, 0)
    libc.pthread_attr_init(attributes)
    libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(_STACK_BYTES))
    threads = []
    try:
        for _ in range(most):
            thread = ctypes.c_ulong()
            if libc.pthread_create(ctypes.byref(thread), attributes, libc.sem_wait, semaphore):
                break
            threads.append(thread)
    finally:
        for _ in threads:
            libc.sem_post(semaphore)
        for thread in threads:
            libc.pthread_join(thread, None)
    return len(threads)


def check_system_calls(*names: str) -> None:
    """Raise Refused (BAD_CONFIG) if the kernel lacks a system call, or a seccomp profile denies it.

    names: those to check, in this order; default: all that the daemon cannot do without. A client
    needs all but pidfd_open.
    """
    for name in names or _NEEDED_CALLS:
        try:
            _NEEDED_CALLS[name]()
        except (OSError, AttributeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            message = (
                f"the system call {name} fails on Linux {platform.release()} ({reason}); use Linux "
                f"{MIN_KERNEL} or newer, and allow this call in the seccomp profile"
            )
            raise Refused(Code.BAD_CONFIG, message, name) from error


def _create_memfd() -> None:
    os.close(os.memfd_create("kvferry-check", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))


def _open_pidfd() -> None:
    os.close(os.pidfd_open(os.getpid()))  # AttributeError: Python was built for an older kernel


def _keep_scheduling() -> None:
    """Make the calls that each thread of libzmq makes; if one fails there, the process ends."""
    libc, thread = ctypes.CDLL(None), ctypes.c_ulong(threading.get_ident())
    policy, parameters = ctypes.c_int(), ctypes.create_string_buffer(64)
    error = libc.pthread_getschedparam(thread, ctypes.byref(policy), parameters)
    error = error or libc.pthread_setschedparam(thread, policy, parameters)
    if error:
        raise OSError(error, os.strerror(error))


_NEEDED_CALLS: Mapping[str, Callable[[], None]] = {
    "memfd_create": _create_memfd,
    "pidfd_open": _open_pidfd,
    "sched_setscheduler": _keep_scheduling,
}
