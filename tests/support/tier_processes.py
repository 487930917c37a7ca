"""The processes of a daemon's tiers."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

# The end of the title, which is an argument until the process has set it.
TITLE = b" tier\0"


def tier_process_of(daemon: int) -> int | None:
    """The pid of the process of a daemon's only tier; None if no such process runs."""
    for pid in Path(f"/proc/{daemon}/task/{daemon}/children").read_text().split():
        with suppress(FileNotFoundError, ProcessLookupError):
            if TITLE in Path(f"/proc/{pid}/cmdline").read_bytes():
                return int(pid)
    return None
