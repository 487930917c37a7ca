"""What a service manager keeps of a daemon's host blocks, read behind everybody's back."""

from __future__ import annotations

import os
from contextlib import closing

from kvferry.daemon.engine.ledger import Ledger
from kvferry.testing.engine import until
from kvferry.testing.manager import ServiceManager


def await_sealed(manager: ServiceManager, count: int) -> None:
    """Return once so many blocks are sealed, over all ledgers. Which there are is asked each time:
    the manager may yet have to hear of one."""
    until(lambda: sum(_sealed(manager, name) for name in manager.names) == count)


def _sealed(manager: ServiceManager, name: str) -> int:
    if not name.startswith("ledger-"):
        return 0
    try:
        descriptor = os.dup(manager.kept(name))
    except (StopIteration, OSError):  # it has just gone
        return 0
    with closing(Ledger(descriptor)) as ledger:
        return ledger.sealed_blocks().size
