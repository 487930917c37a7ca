"""The threads that sum host blocks up come and go together."""

from __future__ import annotations

import subprocess
import sys

CLOSED_AT_ONCE = """
import threading, time
import numpy as np
from kvferry.daemon.engine import auditor

def late(*_):
    if threading.current_thread().name.endswith("_1"):
        time.sleep(0.05)

auditor._be_nice = late
pool = np.zeros(4096, dtype=np.uint8)
auditor.Auditor(pool.ctypes.data, pool.nbytes, 2).close()
"""
"""In a process of its own: Python waits for such threads at its end, too."""


def test_it_closes_at_once_however_late_its_threads_begin() -> None:
    """A daemon may be stopped as soon as it has started."""
    subprocess.run([sys.executable, "-c", CLOSED_AT_ONCE], timeout=30, check=True)
