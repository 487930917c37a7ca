"""A kvferryd with deadlines for tiers that are longer than any pause of a busy machine.

For tests of tiers; other tests cover the deadlines. As a program, it takes kvferryd's options.
"""

from __future__ import annotations

import sys

from kvferry.client import LocalDaemon
from kvferry.daemon import __main__ as kvferryd
from kvferry.daemon.core import promotions
from kvferry.daemon.tiers import tiering
from support.time_limits import TIMEOUT


class PatientDaemon(LocalDaemon):
    def _start(self, timeout: float) -> None:
        self.command[1:3] = [__file__]
        super()._start(timeout)


if __name__ == "__main__":
    promotions.MIN_SECONDS = promotions.MAX_SECONDS = TIMEOUT
    tiering.FIND_SECONDS = TIMEOUT
    kvferryd.main(sys.argv[1:])
