"""The title of a worker process, which ps, top and systemctl show.

A worker process gets the title as its first argument, and sets it as the first thing that it does,
on its only thread. Imported by worker processes, so it imports little.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def set_process_title(title: str) -> None:
    """Show this process as "kvferryd: TITLE" instead of its arguments, if the kernel allows it.

    The arguments are memory of the process. If their last byte is not zero, /proc/PID/cmdline ends
    at the first zero byte (get_mm_proctitle in fs/proc/base.c), so a short title hides the rest.
    """
    name = f"kvferryd: {title}".encode()
    with suppress(OSError):
        Path("/proc/self/comm").write_bytes(name)  # the kernel keeps 15 bytes; new threads get it
        # The name in parentheses, which may contain spaces, is field 2; arg_start is field 48.
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        start, end = int(fields[45]), int(fields[46])
        room = end - start - len(name)
        if room < 2:  # a sandbox that does not show the addresses
            return
        memory = os.open("/proc/self/mem", os.O_WRONLY)
        try:
            os.pwrite(memory, name + bytes(room - 1) + b"\1", start)
        finally:
            os.close(memory)
