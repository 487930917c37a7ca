"""kvferryd's entry point: what must be right before the daemon's libraries are imported.

Closed standard streams, too little address space or a missing package end here with a line and a
status; ctrl-c ends without a word, and a reload that comes early waits. Runs on the main thread.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence

from kvferry.proto.errors import Refused
from kvferry.proto.process import SPARE_ADDRESS_SPACE, check_address_space, open_standard_streams

# What the daemon needs beyond the client: the extra "daemon".
EXTRA = frozenset({"prometheus_client", "structlog", "uvloop", "xxhash"})


def main(arguments: Sequence[str] | None = None) -> None:
    """Run until SIGTERM. Exit status as in app.py; 2 if a package or address space lacks."""
    open_standard_streams()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})  # `Signals` heeds it, or it kills
    # The daemon does no linear algebra: numpy's library would start a thread per core for nothing.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        check_address_space(SPARE_ADDRESS_SPACE, "kvferryd")
        _kvferryd()(arguments)
    except Refused as error:
        print(f"kvferryd: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:  # before its loop heeds it
        sys.exit(130)


def _kvferryd() -> Callable[[Sequence[str] | None], None]:
    try:
        from kvferry.daemon import app
    except ModuleNotFoundError as error:
        if error.name not in EXTRA:
            raise
        install = "pip install '.[daemon]' in a checkout of kvferry"
        print(f"kvferryd: {error.name} is not installed: {install}", file=sys.stderr)
        sys.exit(2)
    return app.main


if __name__ == "__main__":
    main()
