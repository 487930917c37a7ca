"""What a service manager keeps of a daemon's host blocks, read behind everybody's back."""

from __future__ import annotations

import os
from contextlib import closing

from kvferry.daemon.persistence.block_table import BlockTable
from kvferry.testing.engine import until
from support.service_manager import ServiceManager


def await_committed(manager: ServiceManager, count: int) -> None:
    """Return once so many blocks are committed, over all tables. Which tables there are is asked
    each time: the manager may yet have to receive one."""
    until(lambda: sum(_committed(manager, name) for name in manager.names) == count)


def _committed(manager: ServiceManager, name: str) -> int:
    if not name.startswith("block-table-"):
        return 0
    try:
        descriptor = os.dup(manager.kept(name))
    except (StopIteration, OSError):  # it has just gone
        return 0
    with closing(BlockTable(descriptor)) as table:
        return table.committed_blocks().size
