"""A worker process ends with its daemon in every state, also before it runs its own code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from kvferry.testing.engine import until

# Starts a worker that it stops at once, and dies. Prints the pid of the worker.
DAEMON = """
import os, signal
from kvferry.daemon.processes import start_worker
process, _ = start_worker("http.server", lambda number: [], [])
os.kill(process.pid, signal.SIGSTOP)
print(process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_worker_that_is_stopped_at_its_start_ends_with_the_daemon() -> None:
    done = subprocess.run([sys.executable, "-c", DAEMON], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    worker = int(done.stdout)
    try:
        until(lambda: not is_alive(worker))
    finally:
        if is_alive(worker):
            os.kill(worker, signal.SIGKILL)
