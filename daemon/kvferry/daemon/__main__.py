"""The entry point of kvferryd: checks that must pass before the daemon's libraries are imported.

It opens closed standard streams. If address space, a system call or a package is missing, it prints
one line and exits. Ctrl-c exits without a message. SIGHUP is blocked until the daemon can reload.
Runs on the main thread.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence

from kvferry.proto.errors import Refused
from kvferry.proto.process import (
    SPARE_ADDRESS_SPACE,
    check_address_space,
    check_system_calls,
    open_standard_streams,
)

# Packages that the daemon needs and the client does not: the extra "daemon".
EXTRA = frozenset({"prometheus_client", "structlog", "uvloop", "xxhash"})


def main(arguments: Sequence[str] | None = None) -> None:
    """Run until SIGTERM. Exit status as in app.py; 2 if something is missing."""
    open_standard_streams()
    signal.pthread_sigmask(
        signal.SIG_BLOCK, {signal.SIGHUP}
    )  # signals.py unblocks it; unhandled it kills
    # The daemon does no linear algebra, and OpenBLAS would start a thread per core.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # prometheus_client would write its values to files there, for the engine that set it.
    for name in ("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir"):
        os.environ.pop(name, None)
    try:
        check_address_space(SPARE_ADDRESS_SPACE, "kvferryd")
        check_system_calls()
        _kvferryd()(arguments)
    except Refused as error:
        print(f"kvferryd: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:  # before signals.py handles it
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
