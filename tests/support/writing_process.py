"""A process that writes to shared memory, again and again, while a test reads it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# Readers of a test. If the processes share one core, the writer is interrupted a few hundred times
# meanwhile; else it writes during each of them.
READS = 200_000

_PROGRAM = """
import mmap, sys
import numpy as np
descriptor = int(sys.argv[1])
{prepare}
print(flush=True)
while True:
    {write}
"""


@contextmanager
def writing_process(descriptor: int, prepare: str, write: str) -> Iterator[None]:
    """Run Python code in another process, which has `descriptor` under its number.

    prepare: what is done once; several lines. write: what is repeated until the block ends; one
    line. Raises AssertionError if that fails.
    """
    program = _PROGRAM.format(prepare=prepare, write=write)
    command = [sys.executable, "-c", program, str(descriptor)]
    process = subprocess.Popen(command, pass_fds=[descriptor], stdout=subprocess.PIPE)
    with process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline(), "the writing process has failed"
            yield
            assert process.poll() is None, "the writing process has failed"
        finally:
            process.kill()
