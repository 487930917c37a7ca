"""A root is free once the process that has locked it has ended."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from kvferry.daemon.tiers.root_lock import LOCK, wait_until_unlocked

HOLDER = """
import fcntl, sys, time
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
print("locked", flush=True)
time.sleep(60)
"""


def test_a_root_is_free_when_its_process_has_ended(tmp_path: Path) -> None:
    assert wait_until_unlocked(tmp_path / "none", 0.0)
    assert wait_until_unlocked(tmp_path, 0.0)
    command = [sys.executable, "-c", HOLDER, str(tmp_path / LOCK)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert not wait_until_unlocked(tmp_path, 0.1)
        holder.send_signal(signal.SIGSTOP)
        holder.kill()
        assert wait_until_unlocked(tmp_path, 30.0)
