"""The child processes of a process, whichever of its threads started them."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def children_of(pid: int, command: bytes) -> list[int]:
    """Children whose command line contains `command`. Threads and children may end meanwhile.

    The kernel lists a child under the thread that started it; if that ends, under another one.
    """
    found = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            for child in map(int, (thread / "children").read_text().split()):
                with suppress(FileNotFoundError, ProcessLookupError):  # the child has ended
                    if command in Path(f"/proc/{child}/cmdline").read_bytes():
                        found.append(child)
    return found
