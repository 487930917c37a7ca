"""What makes calls slow from outside: a thread that never gives the GIL away, cores all busy."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

_SPIN = "import os\nprint(flush=True)\nme = os.getppid()\nwhile os.getppid() == me: pass"


@contextlib.contextmanager
def burnt_gil() -> Iterator[None]:
    """A Python thread that computes; it lets go when the interpreter's switch interval says so."""
    stop = threading.Event()

    def burn() -> None:
        count = 0
        while not stop.is_set():
            for _ in range(10_000):
                count += 1

    thread = threading.Thread(target=burn, name="kvferry-bench-gil")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@contextlib.contextmanager
def busy_cores() -> Iterator[None]:
    """As many spinning processes as this one may use cores."""
    with contextlib.ExitStack() as stack:
        command = [sys.executable, "-c", _SPIN]
        spinners = []
        for _ in os.sched_getaffinity(0):
            spinner = subprocess.Popen(command, stdout=subprocess.PIPE, process_group=0)
            spinners.append(stack.enter_context(spinner))
            stack.callback(spinner.kill)
        for spinner in spinners:
            assert spinner.stdout is not None
            spinner.stdout.readline()
        yield
