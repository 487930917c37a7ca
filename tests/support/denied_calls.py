"""System calls that fail, as under a seccomp profile or on an older kernel.

    call_with_denied({"setpriority": errno.EPERM}, LocalDaemon)

A filter cannot be removed. It holds for the thread that installs it, and for the threads and
processes which that thread starts.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import pytest

T = TypeVar("T")

NUMBERS = {
    "sched_setscheduler": 144,
    "setpriority": 141,
    "sched_setaffinity": 203,
    "sched_getaffinity": 204,
    "memfd_create": 319,
    "pidfd_open": 434,
}
on_x86_64 = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="the numbers of system calls are those of x86-64"
)
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _SECCOMP_MODE_FILTER = 22, 38, 2
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000
# Classic BPF: load the word at an offset, jump if equal, return.
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06


def call_with_denied(errors: Mapping[str, int], function: Callable[[], T]) -> T:
    """Call a function in a thread in which system calls fail. errors: errno of each call."""
    with ThreadPoolExecutor(1, initializer=partial(_deny_calls, errors)) as executor:
        return executor.submit(function).result()


def _deny_calls(errors: Mapping[str, int]) -> None:
    program = _instruction(_LOAD, 0)  # the number is the first word of what a filter can read
    for name, error in errors.items():
        program += _instruction(_JUMP_IF_EQUAL, NUMBERS[name], if_false=1)
        program += _instruction(_RETURN, _FAIL | error)
    program += _instruction(_RETURN, _ALLOW)
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in ((_PR_SET_NO_NEW_PRIVS, 1), (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header)):
        if libc.prctl(*arguments, 0, 0, 0):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _instruction(code: int, value: int, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, 0, if_false, value)
