"""kvferryd's door: what is said where a package is missing, and nothing where ctrl-c came early. A
reload that comes early waits."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence

EXTRA = frozenset({"prometheus_client", "structlog", "uvloop", "xxhash"})
"""What the daemon needs beyond the client: the extra "daemon"."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run until SIGTERM. Exit status as kvferryd.py has it; 2 where a package is missing."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})  # `Signals` heeds it, or it kills
    try:
        _kvferryd()(arguments)
    except KeyboardInterrupt:  # before its loop heeds it
        sys.exit(130)


def _kvferryd() -> Callable[[Sequence[str] | None], None]:
    try:
        from kvferry.daemon import kvferryd
    except ModuleNotFoundError as error:
        if error.name not in EXTRA:
            raise
        install = "pip install '.[daemon]' in a checkout of kvferry"
        print(f"kvferryd: {error.name} is not installed: {install}", file=sys.stderr)
        sys.exit(2)
    return kvferryd.main


if __name__ == "__main__":
    main()
