"""A pool is free once the processes that have locked it have ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from kvferry.daemon.tiers.pool_lock import wait_until_unlocked
from kvferry.shm.memfd import sealed_memfd
from support.time_limits import TIMEOUT

HOLDER = """
import sys, time
from kvferry.daemon.tiers.pool_lock import lock_pool
lock = lock_pool(int(sys.argv[1]))
print("locked", flush=True)
time.sleep(60)
"""


def test_a_pool_is_free_when_its_processes_have_ended() -> None:
    chunk = sealed_memfd("chunk", 4096)
    assert wait_until_unlocked(chunk, 0.0)
    command = [sys.executable, "-c", HOLDER, str(chunk)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=[chunk]) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert not wait_until_unlocked(chunk, 0.1)
        holder.send_signal(signal.SIGSTOP)
        holder.kill()
        assert wait_until_unlocked(chunk, TIMEOUT)
    os.close(chunk)
