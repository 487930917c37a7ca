"""Reads the block tables that a service manager keeps for a daemon, without the daemon."""

from __future__ import annotations

import os
from contextlib import closing

import numpy as np

from kvferry.daemon.persistence.table_file import TableFile
from kvferry.testing.engine import until
from support.service_manager import ServiceManager


def await_committed(manager: ServiceManager, count: int) -> None:
    """Wait until `count` blocks are committed in all tables together.

    Each attempt lists the tables again, because the manager may not have received all of them.
    """
    until(lambda: sum(_count_committed(manager, name) for name in manager.names) == count)


def _count_committed(manager: ServiceManager, name: str) -> int:
    if not name.startswith("block-table-"):
        return 0
    try:
        descriptor = os.dup(manager.kept(name))
    except (StopIteration, OSError):  # the daemon has just removed it
        return 0
    with closing(TableFile(descriptor)) as file:
        return int(np.count_nonzero(file.lines["committed"]))
