"""The children of a process whose threads end."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

from support.child_processes import children_of


def test_threads_that_end_hide_no_child() -> None:
    mark = "mark_of_a_child"
    child = subprocess.Popen(
        [sys.executable, "-c", "input()", mark], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            short = [threading.Thread(target=int) for _ in range(8)]
            for thread in short:
                thread.start()
            for thread in short:
                thread.join()

    starter = threading.Thread(target=churn)
    starter.start()
    try:
        for _ in range(1_000):
            assert children_of(os.getpid(), mark.encode()) == [child.pid]
    finally:
        stop.set()
        starter.join()
        child.communicate(b"\n")
