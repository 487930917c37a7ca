"""Programs under the system call filter of containers, and the calls that it denies.

    with SeccompProfile() as profile:
        subprocess.run([*profile.launcher, "kvferryd", "--device", "cpu"])
    print(profile.denied)

The launcher, which is this file, installs the filter through libseccomp, as a container runtime
does, and becomes the program. A call that the profile does not name fails with the error that it
fails with in a container; but the kernel asks a thread of the test first, which records the name.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import select
import socket
import struct
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

PROFILE = Path(__file__).parents[2] / "deploy" / "containers" / "kvferryd.seccomp.json"

# Calls that neither the profile nor the unit allows, a few of each kind.
REFUSED_CALLS = (
    *("acct", "add_key", "bpf", "chroot", "clock_settime", "delete_module", "fanotify_init"),
    *("finit_module", "init_module", "io_uring_setup", "kexec_file_load", "kexec_load", "keyctl"),
    *("mount", "move_mount", "open_by_handle_at", "perf_event_open", "pidfd_getfd", "pivot_root"),
    *("ptrace", "quotactl", "reboot", "request_key", "swapon", "syslog", "umount2", "userfaultfd"),
)
# A program that prints the errno of calls, after `NUMBERS`: pairs of a name and a number. No call
# has valid arguments, except for unshare and socket.
PROBE = """
import ctypes, json
libc = ctypes.CDLL(None, use_errno=True)
def error_of(call, *arguments):
    ctypes.set_errno(0)
    call(*arguments)
    return ctypes.get_errno()
found = {name: error_of(libc.syscall, number, *[-1] * 6) for name, number in NUMBERS}
found["unshare"] = error_of(libc.unshare, 0x10000000)  # a user namespace
found["socket"] = error_of(libc.socket, 16, 3, 0)  # AF_NETLINK
print(json.dumps(found))
"""

_ALLOW, _FAIL, _NOTIFY = 0x7FFF0000, 0x00050000, 0x7FC00000
_OPERATORS = {"SCMP_CMP_EQ": 4, "SCMP_CMP_MASKED_EQ": 7}
_NATIVE, _UNKNOWN = 0, -1
# Two ioctls. The kernel writes 80 bytes: an id, and at 16 the number of the call. The answer has
# the id, a return value, the negative errno and flags.
_RECEIVE, _ANSWER = 0xC0502100, 0xC0182101
_RECEIVED_BYTES, _ID, _NUMBER, _ANSWERED = 80, struct.Struct("Q"), struct.Struct("i"), "QqiI"


class SeccompProfile:
    """Answers for the filters that `launcher` installs. Their programs must end before it."""

    def __init__(self, path: Path = PROFILE) -> None:
        # Calls that failed because the profile does not name them.
        self.denied = set[str]()
        self._error: int = json.loads(path.read_text())["defaultErrnoRet"]
        self._library = libseccomp()
        self._folder = tempfile.TemporaryDirectory(prefix="kvferry-")
        self._place = f"{self._folder.name}/filters"
        self.launcher = [sys.executable, "-IS", __file__, str(path), self._place]
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self._place)
        self._thread = threading.Thread(target=self._answer_all, name="seccomp profile")
        self._thread.start()

    def close(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection:
            connection.sendto(b"end", self._place)
        self._thread.join()
        self._socket.close()
        self._folder.cleanup()

    def __enter__(self) -> SeccompProfile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # On the thread

    def _answer_all(self) -> None:
        poll, filters = select.poll(), set[int]()
        poll.register(self._socket, select.POLLIN)
        while True:
            for descriptor, events in poll.poll():
                if descriptor == self._socket.fileno():
                    message, (*received,), _, _ = socket.recv_fds(self._socket, 16, 1)
                    if message == b"end":
                        for each in filters:
                            os.close(each)
                        return
                    filters.update(received)
                    for each in received:
                        poll.register(each, select.POLLIN)
                elif events & select.POLLIN:
                    self._answer(descriptor)
                else:  # the last process under this filter has ended
                    poll.unregister(descriptor)
                    filters.remove(descriptor)
                    os.close(descriptor)

    def _answer(self, descriptor: int) -> None:
        received = bytearray(_RECEIVED_BYTES)
        with suppress(FileNotFoundError):  # the process has ended, or a signal interrupts the call
            fcntl.ioctl(descriptor, _RECEIVE, received)
            (number,) = _NUMBER.unpack_from(received, 16)
            name = self._library.seccomp_syscall_resolve_num_arch(_NATIVE, number)
            self.denied.add(name.decode() if name else str(number))
            answer = struct.pack(_ANSWERED, *_ID.unpack_from(received), 0, -self._error, 0)
            fcntl.ioctl(descriptor, _ANSWER, answer)


def libseccomp() -> ctypes.CDLL:
    """Raises OSError if it is not installed."""
    library = ctypes.CDLL("libseccomp.so.2")
    library.seccomp_init.restype = ctypes.c_void_p
    library.seccomp_syscall_resolve_num_arch.restype = ctypes.c_char_p
    return library


def probe() -> str:
    """PROBE with the numbers of REFUSED_CALLS on this architecture."""
    resolve = libseccomp().seccomp_syscall_resolve_name
    numbers = [(name, resolve(name.encode())) for name in REFUSED_CALLS]
    return f"NUMBERS = {numbers}\n{PROBE}"


class _Comparison(ctypes.Structure):
    _fields_ = (
        ("index", ctypes.c_uint),
        ("operator", ctypes.c_int),
        ("value", ctypes.c_uint64),
        ("value_two", ctypes.c_uint64),
    )


def install(profile: dict[str, Any]) -> int:
    """Install the filter in this process. Returns the descriptor to read denied calls from."""
    library = libseccomp()
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(_NOTIFY)))
    for rule in profile["syscalls"]:
        allowed = rule["action"] == "SCMP_ACT_ALLOW"
        action = ctypes.c_uint32(_ALLOW if allowed else _FAIL | rule["errnoRet"])
        comparisons = [
            _Comparison(
                each["index"], _OPERATORS[each["op"]], each["value"], each.get("valueTwo", 0)
            )
            for each in rule.get("args", ())
        ]
        array = (_Comparison * len(comparisons))(*comparisons)
        for name in rule["names"]:
            number = library.seccomp_syscall_resolve_name(name.encode())
            if number != _UNKNOWN:  # newer than this libseccomp
                _check(library.seccomp_rule_add_array(context, action, number, len(array), array))
    _check(library.seccomp_load(context))
    return int(library.seccomp_notify_fd(context))


def _check(result: int) -> None:
    if result < 0:
        raise OSError(-result, os.strerror(-result))


def main(path: str, place: str, *command: str) -> None:
    profile = json.loads(Path(path).read_text())
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    connection.connect(place)
    socket.send_fds(connection, [b"filter"], [install(profile)])
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])
